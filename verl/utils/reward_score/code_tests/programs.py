"""The programs that call a solution's functions; they run inside a sandbox, next to the solution.

Code in the same process as the solution can be altered by it, so nothing here is trusted: these
programs only carry arguments in and a value out. What the solution prints meanwhile goes to
standard error.
"""

LOAD_SOLUTION = '''
import os, sys
_answers = os.dup(1)
os.dup2(2, 1)
_names = {"__name__": "solution"}
exec(
    """from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys""",
    _names,
)
exec(compile(SOLUTION, "solution.py", "exec"), _names)
'''

_CALL_FUNCTION = """
import json

def _find(name):
    if name in _names:
        return _names[name]
    return getattr(_names["Solution"](), name)

def _plain(value):
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value)

_arguments = [json.loads(line) for line in sys.stdin.read().splitlines() if line.strip()]
_answer = json.dumps(_find(FUNCTION)(*_arguments), default=_plain).encode()
while _answer:
    _answer = _answer[os.write(_answers, _answer):]
"""


def function_program(solution: str, function: str) -> str:
    """Calls `function`, or the method of `Solution`, with one JSON argument per line of standard
    input, and writes its value as JSON. Common modules are imported for the solution."""
    return f"SOLUTION = {solution!r}\nFUNCTION = {function!r}\n{LOAD_SOLUTION}{_CALL_FUNCTION}"


def asserting_program(solution: str, assertion: str, password: str) -> str:
    """The solution and a statement about it in one process, for services that can do no better.

    It prints `password` at the end: leaving early is not enough to pass. A solution that reads its
    own source can forge this; the pair in `judge.py` cannot be forged.
    """
    return f"{solution}\n\n{assertion}\n\nprint({password!r})\n"
