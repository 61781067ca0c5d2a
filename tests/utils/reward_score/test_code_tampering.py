"""No program passes a test whose answer it cannot know."""

import json
import secrets

import pytest

from tests.utils.reward_score.tampering import ATTACKS
from tests.utils.sandbox.needs import require_namespaces
from verl.utils.reward_score import prime_code

MODES = ("text", "function", "assertion")


@pytest.fixture(autouse=True)
def _needs_a_sandbox() -> None:
    require_namespaces()


def unknowable(mode: str) -> dict[str, list[str] | str]:
    """A test that only who knows the secret can pass."""
    secret = secrets.randbits(60)
    if mode == "assertion":
        return {"assert_case": [f"assert f(1) == {secret}"]}
    table: dict[str, list[str] | str] = {"inputs": ["1"], "outputs": [str(secret)]}
    return table | {"fn_name": "f"} if mode == "function" else table


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attack", ATTACKS)
def test_tampering_never_passes(attack, mode):
    completion = f"```python\n{ATTACKS[attack]}\n```"
    score, metadata = prime_code.compute_score(completion, json.dumps(unknowable(mode)))
    assert score == 0.0
    assert [record["status"] for record in metadata] != ["success"]


def test_the_corpus_has_sixty_cases():
    assert len(ATTACKS) * len(MODES) >= 60


@pytest.mark.parametrize("mode", MODES)
def test_who_knows_the_secret_passes(mode):
    table = unknowable(mode)
    if mode == "assertion":
        secret = table["assert_case"][0].split()[-1]
    else:
        secret = table["outputs"][0]
    program = f"def f(x): return {secret}\nif __name__ == '__main__': print({secret})"
    assert prime_code.compute_score(program, table)[0] == 1.0


ASSERTION_ATTACKS = {
    "truth of an attribute": ("assert make().is_valid == 5", "class A: is_valid = 6\nmake = A"),
    "a shadowed builtin": (
        "assert set(f(1)) == {5}",
        "def set(x): return {5}\nsorted = set\ndef f(x): return [6]",
    ),
    "a replaced module": (
        "import math\nassert math.isclose(f(1), 5)",
        "class math:\n  isclose = staticmethod(lambda *a: True)\ndef f(x): return 6",
    ),
    "objects in a list": (
        "assert f(1) == [5]",
        "class Yes:\n  def __eq__(self, other): return True\ndef f(x): return [Yes()]",
    ),
    "keys of a mapping": (
        "assert f(1) == {'a': 5}",
        "class D(dict):\n  def __eq__(self, other): return True\ndef f(x): return D()",
    ),
}


@pytest.mark.parametrize("attack", ASSERTION_ATTACKS)
def test_an_assertion_is_judged_on_data_with_our_own_functions(attack):
    assertion, program = ASSERTION_ATTACKS[attack]
    verdicts, _ = prime_code.apps_check_correctness({"assert_case": [assertion]}, program)
    assert verdicts == [False]
