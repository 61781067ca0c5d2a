"""HellaSwag (arXiv:1905.07830): which of four endings continues a scene.

    python examples/data_preprocess/hellaswag.py --local_dataset_path raw/hellaswag

Raw rows have `activity_label`, `ctx_a`, `ctx_b`, `endings` and `label`, the number of the right
ending from 0. The labels of the raw test split are not public, so `test.parquet` is the raw
validation split. No reward function is built in for it: `custom_reward_function.path` compares the
answer's letter with `ground_truth`.
"""

import re
from typing import Any

from preparation import Source, command_line, prepare

SOURCE = Source("Rowan/hellaswag", splits={"train": "train", "test": "validation"})
LETTERS = "ABCD"
INSTRUCTION = "Which ending fits best? Answer with its letter."
BRACKETED = re.compile(r"\[[^\[\]]*\]")


def clean(text: str) -> str:
    """Without the marks of the web pages that the texts come from: [header], [step], [title]."""
    text = text.strip().replace(" [title]", ". ")
    return " ".join(BRACKETED.sub(" ", text).split())


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    if raw["label"] not in ("0", "1", "2", "3"):
        raise ValueError(f"label is {raw['label']!r}; it must be the number of one of four endings")
    scene = clean(f"{raw['activity_label']}: {raw['ctx_a']} {raw['ctx_b'].capitalize()}")
    pairs = zip(LETTERS, raw["endings"], strict=True)
    choices = "\n".join(f"{letter}. {clean(ending)}" for letter, ending in pairs)
    return {
        "data_source": "Rowan/hellaswag",
        "prompt": [{"role": "user", "content": f"{scene}\n\n{choices}\n\n{INSTRUCTION}"}],
        "ability": "nlp",
        "reward_model": {"style": "rule", "ground_truth": LETTERS[int(raw["label"])]},
        "extra_info": {"split": split, "index": index},
    }


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/hellaswag").parse_args(), SOURCE, make_row)
