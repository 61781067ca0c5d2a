"""The reward functions of docs/reward_models.md do what they show."""

import re
from pathlib import Path

import pytest

from tests.workers.reward_model.models import TEMPLATE, character_tokenizer
from verl.workers.reward_model.server import RewardModelServer

DOCUMENT = Path(__file__).parents[3] / "docs" / "reward_models.md"


def documented_functions():
    functions = []
    for block in re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL):
        names = {}
        exec(block, names)
        functions.append(names["compute_score"])
    return functions


def test_a_function_combines_its_own_verdict_with_the_models():
    combined, _ = documented_functions()
    assert combined("sums", "it is 4", "4", {"rm_score": -2.0}) == {"score": 0.8, "acc": True}
    assert combined("sums", "it is 5", "4", {"rm_score": 3.0})["score"] == pytest.approx(0.3)


def test_a_function_asks_the_model_about_a_text():
    _, asking = documented_functions()
    seen = []
    server = RewardModelServer()
    server.score_texts = lambda texts: seen.extend(texts) or [0.25]
    try:
        score = asking(
            "sums",
            "<think>hm</think>4",
            "4",
            {"question": "2+2?"},
            reward_router_address=server.address,
            reward_model_tokenizer=character_tokenizer(template=TEMPLATE),
        )
    finally:
        server.close()
    assert score == 0.25
    assert seen == ["<s><turn>u:2+2?</turn><turn>a:4</turn>"]
