"""Pictures with descriptions as conversations, for supervised fine-tuning of vision models.

    python examples/data_preprocess/pokemon.py --local_dataset_path raw/pokemon

Raw rows have `conversations`, turns of `from` (human or gpt) and `value`, and `images`. The rows
written have `messages` and `images`; `<image>` stands where a picture belongs. The dataset has no
test split.
"""

from typing import Any

from preparation import Source, command_line, prepare

SOURCE = Source("llamafactory/pokemon-gpt4o-captions", splits={"train": "train"})
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}


def make_row(raw: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    turns = raw["conversations"]
    messages = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in turns]
    num_places = sum(message["content"].count("<image>") for message in messages)
    if num_places != len(raw["images"]):
        raise ValueError(f"there are {num_places} places for {len(raw['images'])} images")
    return {"messages": messages, "images": raw["images"]}


if __name__ == "__main__":
    prepare(command_line(__doc__, "~/data/pokemon").parse_args(), SOURCE, make_row)
