"""The example with an MCP server: what it prepares, what it rewards, and a step of it."""

import importlib.util
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parents[2] / "examples" / "guess_number"


@pytest.fixture
def example(monkeypatch):
    """A module of the example by name."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"guess_number_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    yield load
    sys.modules.pop("guess_tool", None)


def written(*guesses):
    call = '<tool_call>\n{{"name": "guess", "arguments": {{"n": {}}}}}\n</tool_call>'
    return "\ntool\nlow\nassistant\n".join(call.format(n) for n in guesses)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        (written(8), 1.0),
        (written(4, 6, 8), 0.84),
        (written(1, 2, 3, 4, 5, 6, 8), 0.0),  # the seventh guess is too late
        ("win\ntool\nwin", 0.0),
        (written(7) + "\ntool\nwin\nassistant\nDone.", 0.0),
        ("", 0.0),
    ],
)
def test_the_reward_counts_guesses_and_not_words(example, text, score):
    assert example("reward").compute_score("guess_number", text, "8")["score"] == score


def test_a_turn_of_the_model_and_what_the_template_writes_share_no_token(example, tmp_path):
    prepare = example("prepare")
    prepare.prepare(tmp_path, seed=0)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "model")
    game = prepare.play(11, True, prepare.random.Random(0))
    assert game[-2]["content"] == "win"

    def ids(count, with_prompt):
        text = tokenizer.apply_chat_template(
            game[:count], tools=[prepare.TOOL], add_generation_prompt=with_prompt, tokenize=False
        )
        return tokenizer(text).input_ids

    for turn in range(1, len(game), 2):
        before, after = ids(turn, True), ids(turn + 1, False)
        assert after[: len(before)] == before
        said = after[len(before) :]
        assert len(said) == (5 if "guess" in game[turn]["content"] else 3)
