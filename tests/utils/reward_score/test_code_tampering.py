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
    "a module that is not imported": (
        "assert math.isclose(f(3), 9123.5)",
        "class math:\n  isclose = staticmethod(lambda *a, **k: True)\ndef f(x): return 6",
    ),
    "numpy that is not imported": (
        "assert np.allclose(f(3), [9123.5])",
        "class np:\n  allclose = staticmethod(lambda *a, **k: True)\ndef f(x): return [6]",
    ),
    "numpy's whole name": (
        "assert numpy.array_equal(numpy.array(f(3)), numpy.array([5]))",
        "class numpy:\n  array = array_equal = staticmethod(lambda *a: 1)\ndef f(x): return [6]",
    ),
    "a counter that is not imported": (
        "assert Counter(f(3)) == Counter('abc')",
        "def Counter(x): return 1\ndef f(x): return 'b'",
    ),
    "json that is not imported": (
        "assert json.loads(f(3)) == {'a': 1}",
        "class json:\n  loads = staticmethod(lambda x: {'a': 1})\ndef f(x): return '{}'",
    ),
    "copy that is not imported": (
        "x = [2, 1]\ny = copy.deepcopy(x)\nassert f(x) == sorted(y)",
        "class copy:\n  deepcopy = staticmethod(lambda x: 'a')\ndef f(x): return ['a']",
    ),
    "a bare function of a library": (
        "assert isclose(f(3), 5)",
        "def isclose(*a, **k): return True\ndef f(x): return 6",
    ),
    "two bare functions of libraries": (
        "assert isclose(dist((0, 0), (3, 4)), 5)",
        "def isclose(*a, **k): return True\ndef dist(*a): return 6",
    ),
    "a bare type of a library": (
        "assert f(3) == Fraction(1, 2)",
        "def Fraction(*a): return 6\ndef f(x): return 6",
    ),
    "a bare copy": (
        "x = [2, 1]\nassert f(x) == sorted(deepcopy(x))",
        "def deepcopy(x): return 'a'\ndef f(x): return ['a']",
    ),
    "a shadowed len": ("assert len(f(3)) == 5", "def len(x): return 5\ndef f(x): return []"),
    "a shadowed abs": ("assert abs(f(3) - 5) < 1", "def abs(x): return 0\ndef f(x): return 9"),
    "a shadowed isinstance": (
        "assert isinstance(f(3), list)",
        "def isinstance(*a): return True\ndef f(x): return 6",
    ),
    "a shadowed sorted": (
        "assert sorted(f(3)) == [1, 2]",
        "def sorted(*a): return [1, 2]\ndef f(x): return [3]",
    ),
    "a class float": (
        "assert isinstance(f(3), float) and float(f(3)) == 5.0",
        "class float(float):\n  def __eq__(self, other): return True\ndef f(x): return float(6)",
    ),
    "a patched isclose": (
        "assert math.isclose(f(3), 5)",
        "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 6",
    ),
    "numpy stubs in sys.modules": (
        "import numpy as np\nassert np.allclose(f(3), 5)",
        "import sys, types\nstub = types.ModuleType('numpy')\n"
        "stub.allclose = lambda *a: True\nsys.modules['numpy'] = stub\ndef f(x): return 6",
    ),
    "what is only imported for the solution": ("assert gcd(12, 8) == 4", "answer = 4"),
    "a decimal equal to everything": (
        "assert f(3) == Decimal(5)",
        "import decimal\nclass Decimal(decimal.Decimal):\n  def __eq__(self, o): return True\n"
        "def f(x): return Decimal(6)",
    ),
    "a range of its own": (
        "assert f(3) == range(5)",
        "class range(list):\n  def __eq__(self, other): return True\ndef f(x): return range()",
    ),
    "the end of a loop that checks": (
        "assert all(map(lambda case: f(case[0]) == case[1], [(1, 1), (2, 4)]))",
        "def f(x): raise StopIteration",
    ),
    "the end of a loop over results": (
        "for found, right in zip(map(f, [1, 2]), [1, 4]):\n  assert found == right",
        "def f(x): next(iter(()))",
    ),
    "an attribute that is not there": ("assert make().root is not None", "class make: pass"),
    "a method that is not there": ("assert hasattr(make(), 'push')", "class make: pass"),
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


@pytest.mark.parametrize(
    ("assertion", "program"),
    [
        ("assert math.isclose(f(3), 5)", "def f(x): return x + 2"),
        ("assert np.allclose(f(np.array([1, 2])), [2, 3])", "def f(x): return x + np.ones(2)"),
        ("assert Counter(f('ab')) == Counter('ab')", "def f(x): return sorted(x)"),
        ("assert isclose(dist((0, 0), (3, 4)), 5)", "def dist(a, b): return 5.0"),
        ("assert gcd(12, 8) == 4", "def gcd(a, b): return math.gcd(a, b)"),
        ("assert list(product([1, 2])) == [2]", "def product(x): return [x[0] * x[1]]"),
        ("assert f(Counter('aab')) == 'a'", "def f(c): return c.most_common(1)[0][0]"),
        ("assert f(deque([1, 2])) == deque([2])", "def f(q): q.popleft(); return q"),
        ("assert f(1) == Fraction(1, 2)", "from fractions import Fraction as F\n"
         "def f(x): return F(x, 2)"),
        ("assert f(datetime.date(2024, 2, 28)) == datetime.date(2024, 2, 29)",
         "import datetime\ndef f(d): return d + datetime.timedelta(days=1)"),
        ("assert f(operator.add, 2) == 4", "def f(g, x): return g(x, x)"),
        ("assert queue.size() == 0", "class Q:\n  def size(self): return 0\nqueue = Q()"),
        ("assert f(3) == range(3)", "f = range"),
        ("assert f().root is None and hasattr(f(), 'add') and not hasattr(f(), 'other')",
         "class f:\n  root = None\n  def add(self): pass"),
        ("assert f(3).next.next.value == 1", "class f:\n  def __init__(self, n):\n"
         "    self.value, self.next = n, f(n - 1) if n else None"),
        ("assert all(map(lambda case: f(case[0]) == case[1], [(1, 1), (2, 4)]))",
         "def f(x): return x * x"),
    ],
)  # fmt: skip
def test_libraries_that_a_statement_does_not_import_work_for_honest_programs(assertion, program):
    if "np." in assertion:
        program = "import numpy as np\n" + program
    verdicts, metadata = prime_code.apps_check_correctness({"assert_case": [assertion]}, program)
    assert verdicts == [True], metadata


def test_a_library_that_is_not_there_is_a_fault_and_not_a_score():
    with pytest.raises(ValueError, match=r"(?s)cannot be judged.*No module named 'pytest'"):
        prime_code.compute_score(
            "class pytest:\n  approx = staticmethod(lambda x: x)\ndef f(x): return 5",
            {"assert_case": ["assert f(3) == pytest.approx(5)"]},
        )
