"""Helpful and harmless (arXiv:2204.05862): conversations with a preferred and a rejected answer.

    python examples/data_preprocess/full_hh_rlhf.py --split rl --local_dataset_path raw/hh

`--split` chooses the use; the files are in a folder of that name below the results:

    sft   `prompt` (messages), `response`: the preferred answer
    rm    `prompt` (messages), `chosen`, `rejected`: for training a reward model
    rl    `prompt` (messages), scored by a reward model; `ground_truth` is the preferred answer

Raw rows have `prompt`, a transcript of `Human:` and `Assistant:`, `chosen` and `rejected`.
"""

import re
from typing import Any

from preparation import Source, command_line, prepare, save_dir

SOURCE = Source("Dahoas/full-hh-rlhf")
ROLES = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"\n\n(Human|Assistant):")


def messages(transcript: str) -> list[dict[str, str]]:
    """The turns of a transcript that ends where the assistant is to answer."""
    before, *parts = TURN.split(transcript)
    turns = list(zip(parts[::2], parts[1::2], strict=True))
    if before.strip() or not turns or turns[-1][0] != "Assistant" or turns[-1][1].strip():
        raise ValueError(
            f"the prompt is no transcript that waits for an answer: {transcript!r:.80}"
        )
    return [{"role": ROLES[who], "content": said.strip()} for who, said in turns[:-1]]


def make_sft_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    return {"prompt": messages(raw["prompt"]), "response": raw["chosen"].strip()}


def make_rm_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    answers = {name: raw[name].strip() for name in ("chosen", "rejected")}
    return {"prompt": messages(raw["prompt"]), **answers}


def make_rl_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": "Dahoas/full-hh-rlhf",
        "prompt": messages(raw["prompt"]),
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": raw["chosen"].strip()},
        "extra_info": {"split": split, "index": index},
    }


USES = {"sft": make_sft_row, "rm": make_rm_row, "rl": make_rl_row}


if __name__ == "__main__":
    parser = command_line(__doc__, "~/data/full_hh_rlhf")
    parser.add_argument("--split", choices=USES, required=True, help="what the rows are for")
    arguments = parser.parse_args()
    arguments.local_save_dir = str(save_dir(arguments) / arguments.split)
    arguments.local_dir = None
    if arguments.hdfs_dir is not None:
        arguments.hdfs_dir = f"{arguments.hdfs_dir.rstrip('/')}/{arguments.split}"
    prepare(arguments, SOURCE, USES[arguments.split])
