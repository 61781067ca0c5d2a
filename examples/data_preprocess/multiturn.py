"""A few conversations of several turns, to try multi-turn supervised fine-tuning with.

    python examples/data_preprocess/multiturn.py --local_save_dir ~/data/multiturn

Needs no raw data: the conversations are arithmetic, made here. Rows have `messages`; some begin
with a system message. Every fifth conversation goes to `test.parquet`.
"""

import random
from typing import Any

from preparation import command_line, write

from verl.utils.import_utils import require

NUM_CONVERSATIONS = 50
SYSTEM = "You are a helpful assistant who counts."


def conversation(number: int) -> dict[str, Any]:
    """Two questions; the second one needs the answer to the first."""
    rng = random.Random(number)
    apples, more, eaten = rng.randint(1, 20), rng.randint(1, 20), rng.randint(1, 2)
    have = apples + more
    turns = [
        ("user", f"I have {apples} apples and buy {more}. How many do I have?"),
        ("assistant", f"You have {apples} + {more} = {have} apples."),
        ("user", f"I eat {eaten}. How many are left?"),
        ("assistant", f"{have} - {eaten} = {have - eaten} are left."),
    ]
    opening = [("system", SYSTEM)] if number % 2 else []
    messages = [{"role": role, "content": text} for role, text in opening + turns]
    return {"messages": messages}


def main() -> None:
    arguments = command_line(__doc__, "~/data/multiturn").parse_args()
    rows = [conversation(number) for number in range(NUM_CONVERSATIONS)]
    parts = {
        "train": [row for number, row in enumerate(rows) if number % 5],
        "test": [row for number, row in enumerate(rows) if not number % 5],
    }
    dataset = require("datasets", extra="data").Dataset
    write({name: dataset.from_list(part) for name, part in parts.items()}, arguments)


if __name__ == "__main__":
    main()
