"""Programs that run inside a sandbox next to a solution, to call its functions or to judge it.

Code in the same process as the solution can be altered by it, so nothing there is trusted: such
programs only carry arguments in and a value out. What the solution prints meanwhile goes to
standard error.

Statements about a solution are judged outside its process: two programs for two sandboxes, joined
by pipes. `serving_program` has the solution and answers calls; `judge_program` has the statements,
the libraries they use, imported or not, and stand-ins for the names that are left: those the
solution must define. Only plain data crosses.
"""

LOAD_SOLUTION = '''
import builtins, os, sys
_answers = os.dup(1)
os.dup2(2, 1)
_common = dict(vars(builtins))
exec(
    """from bisect import *
from collections import *
from functools import *
from heapq import *
from itertools import *
from math import *
from typing import *
import bisect, collections, functools, heapq, itertools, math, random, re, string, sys""",
    _common,
)
_names = {"__name__": "solution", "__builtins__": _common}
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
    input, and writes its value as JSON. The solution finds common modules among its builtins, so
    that its own names are only those it defines."""
    return f"SOLUTION = {solution!r}\nFUNCTION = {function!r}\n{LOAD_SOLUTION}{_CALL_FUNCTION}"


def asserting_program(solution: str, assertion: str, password: str) -> str:
    """The solution and a statement about it in one process, for services that can do no better.

    It prints `password` at the end: leaving early is not enough to pass. A solution that reads its
    own source can forge this; the pair in `judge.py` cannot be forged.
    """
    return f"{solution}\n\n{assertion}\n\nprint({password!r})\n"


# Plain data as JSON: scalars as they are, anything else as [kind, ...]. Values of a few library
# types cross as what they are made of, functions of libraries (only towards the solution) by name.
# What is no data is kept where it is, and crosses as ["handle", number].
_CODEC = """
import importlib, json

PARTS = {
    ("collections", "deque"): lambda v: [list(v), v.maxlen],
    ("collections", "Counter"): lambda v: [dict(v)],
    ("collections", "OrderedDict"): lambda v: [[list(item) for item in v.items()]],
    ("datetime", "date"): lambda v: [v.year, v.month, v.day],
    ("datetime", "datetime"): lambda v: [
        v.year, v.month, v.day, v.hour, v.minute, v.second, v.microsecond
    ],
    ("datetime", "time"): lambda v: [v.hour, v.minute, v.second, v.microsecond],
    ("datetime", "timedelta"): lambda v: [v.days, v.seconds, v.microseconds],
    ("decimal", "Decimal"): lambda v: [str(v)],
    ("fractions", "Fraction"): lambda v: [v.numerator, v.denominator],
    ("builtins", "range"): lambda v: [v.start, v.stop, v.step],
}

def encode(value, keep):
    if value is None or type(value) in (bool, int, float, str):
        return value
    source = (type(value).__module__, type(value).__qualname__)
    if source in PARTS and type(value) is library(*source):
        return ["made", *source, [encode(part, keep) for part in PARTS[source](value)]]
    for kind, types in (("list", list), ("tuple", tuple), ("set", (set, frozenset))):
        if isinstance(value, types):
            return [kind, [encode(entry, keep) for entry in value]]
    if isinstance(value, dict):
        return ["dict", [[encode(k, keep), encode(v, keep)] for k, v in value.items()]]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    if isinstance(value, complex):
        return ["complex", value.real, value.imag]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    if type(value).__module__ == "numpy" and ARRAYS_AS_LISTS:
        return encode(value.tolist(), keep)
    return ["handle", keep(value)]

def decode(tree, find):
    if not isinstance(tree, list):
        return tree
    kind, *rest = tree
    if kind == "handle":
        return find(rest[0])
    if kind == "made" and tuple(rest[:2]) in PARTS:
        return library(*rest[:2])(*[decode(part, find) for part in rest[2]])
    if kind == "bytes":
        return bytes.fromhex(rest[0])
    if kind == "complex":
        return complex(*rest)
    if kind == "dict":
        return {decode(k, find): decode(v, find) for k, v in rest[0]}
    build = {"list": list, "tuple": tuple, "set": set}[kind]
    return build(decode(entry, find) for entry in rest[0])

def library(module, name):
    return getattr(importlib.import_module(module), name)
"""

_SERVE_SOLUTION = """
_requests = os.fdopen(os.dup(0), "rb")
_objects = []

def _keep(value):
    _objects.append(value)
    return len(_objects) - 1

def _find(handle):
    if isinstance(handle, int):
        return _objects[handle]
    module, name, *elements = handle
    function = library(module, name)
    return function(*elements) if elements else function

def _answer(request):
    try:
        target = _names[request["name"]] if "name" in request else _objects[request["handle"]]
        for attribute in request["path"]:
            target = getattr(target, attribute)
        if "arguments" in request:
            arguments = decode(request["arguments"], _find)
            keywords = decode(request["keywords"], _find)
            target = target(*arguments, **keywords)
        return {"value": encode(target, _keep)}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)[:1000]}

for _line in _requests:
    _reply = json.dumps(_answer(json.loads(_line))).encode() + b"\\n"
    while _reply:
        _reply = _reply[os.write(_answers, _reply):]
"""


def serving_program(solution: str) -> str:
    """Answers calls of the solution's functions, one JSON document per line, until input ends."""
    constants = f"SOLUTION = {solution!r}\nARRAYS_AS_LISTS = True\n"
    return f"{constants}{LOAD_SOLUTION}{_CODEC}{_SERVE_SOLUTION}"


PASSED, FAILED, NOT_JUDGED = 0, 1, 3
"""Exit codes of `judge_program`; the last means that the statement itself is at fault."""

_JUDGE = '''
import ast, builtins, os, sys

MAX_LINE = 1 << 20
PACKAGES = {
    "np": "numpy", "pd": "pandas", "nx": "networkx", "numpy": "numpy", "pandas": "pandas",
    "pytest": "pytest", "scipy": "scipy", "sympy": "sympy", "torch": "torch",
}
SHARED = (
    "bisect", "collections", "copy", "datetime", "decimal", "fractions", "functools", "heapq",
    "itertools", "math", "statistics", "typing",
)

class Unsuitable(BaseException):
    pass

class Remote:
    """Something that lives in the solution's process: it can be called, and its value and its
    attributes asked for. What is no data is true, and equal to itself only."""

    def __init__(self, root):
        self._root = root

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return ask({**self._root, "path": [name]})

    def __call__(self, *arguments, **keywords):
        request = {**self._root, "path": []}
        request["arguments"] = encode(arguments, hand_over)
        request["keywords"] = encode(keywords, hand_over)
        return ask(request)

    def __eq__(self, other):
        value = self._value()
        return value is other if isinstance(value, Remote) else value == other

    def __bool__(self):
        value = self._value()
        return isinstance(value, Remote) or bool(value)

    def _value(self):
        return self if "handle" in self._root else ask({**self._root, "path": []})

def hand_over(value):
    if isinstance(value, Remote):
        value = value._value()
        if isinstance(value, Remote):
            return value._root["handle"]
    if type(value).__module__ == "numpy" and value.dtype.kind in "biufU":
        return ["numpy", "array", value.tolist(), value.dtype.str]
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(module, str) and module in sys.modules and callable(value):
        if vars(sys.modules[module]).get(name) is value:
            return [module, name]
    raise Unsuitable(f"an argument of the solution is {type(value).__name__}, which is not data")

def ask(request):
    state["has_asked"] = True
    sys.stdout.write(json.dumps(request) + "\\n")
    sys.stdout.flush()
    reply = json.loads(sys.stdin.buffer.readline(MAX_LINE))
    if "error" in reply:
        kind = vars(builtins).get(str(reply["error"]))
        is_error = isinstance(kind, type) and issubclass(kind, Exception)
        # These end a loop of the statement, which would have checked nothing then.
        is_error = is_error and not issubclass(kind, (StopIteration, StopAsyncIteration))
        state["raised"] = (kind if is_error else RuntimeError)(str(reply["text"]))
        raise state["raised"]
    return decode(reply["value"], lambda number: Remote({"handle": int(number)}))

def library_names(tree):
    """What the statement uses of libraries without importing it, by name.

    A module is one whose attribute is used. math.sqrt, Counter and the like may be meant without
    their module, or be what the solution must define: they are ours where the statement also
    speaks of a name that can only be the solution's, or where they are called on the result of
    another of their kind.
    """
    nodes = list(ast.walk(tree))
    bound = {n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    bound |= {n.name for n in nodes if isinstance(n, (ast.FunctionDef, ast.ClassDef))}
    bound |= {n.arg for n in nodes if isinstance(n, ast.arg)}
    bound |= {(n.asname or n.name).partition(".")[0] for n in nodes if isinstance(n, ast.alias)}
    bound |= {n.name for n in nodes if isinstance(n, ast.ExceptHandler) and n.name}
    free = {n.id for n in nodes if isinstance(n, ast.Name)} - bound - vars(builtins).keys()
    ours = {}
    for node in nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = node.value.id
            if name in free and (name in PACKAGES or name in sys.stdlib_module_names):
                module = importlib.import_module(PACKAGES.get(name, name))
                if name in PACKAGES or node.attr in dir(module):
                    ours[name] = module
    shared = {}
    for module in map(importlib.import_module, SHARED):
        public = vars(module).get("__all__", [n for n in vars(module) if n[0] != "_"])
        shared.update((n, vars(module)[n]) for n in public if n in free and n not in ours)
    if shared.keys() == free - ours.keys():  # no name that is only the solution's
        calls = {n for n in nodes if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        calls = {call for call in calls if call.func.id in shared}
        inner = {
            part.func.id
            for call in calls
            for part in ast.walk(call)
            if part is not call and part in calls
        }
        shared = {n: v for n, v in shared.items() if inner and n not in inner}
    return ours | shared

class Names(dict):
    """What the statement does not define, and Python and its libraries neither, is the
    solution's."""

    def __missing__(self, name):
        if name in vars(builtins):
            raise KeyError(name)
        return Remote({"name": name})

state = {"has_asked": False, "raised": None}
status, reason = FAILED, "it says nothing about the solution"
try:
    tree = ast.parse(STATEMENT, "assertion")
    names = Names({"__name__": "__main__", **library_names(tree)})
    exec(compile(tree, "assertion", "exec"), names)
    status = PASSED
except BaseException as error:
    reason = f"{type(error).__name__}: {error}"
    is_unfit = isinstance(error, (SyntaxError, ImportError, Unsuitable))
    status = NOT_JUDGED if is_unfit and error is not state["raised"] else FAILED
if not state["has_asked"]:
    status = NOT_JUDGED
print(reason[:1000], file=sys.stderr, flush=True)
os._exit(status)
'''


def judge_program(assertion: str) -> str:
    """Runs statements about a solution that is somewhere else: its functions are called over
    standard output and input, and only data comes back. Objects that claim to equal everything,
    patched builtins or an early exit therefore stay in the solution's process."""
    constants = (
        f"STATEMENT = {assertion!r}\n"
        f"PASSED, FAILED, NOT_JUDGED = {PASSED}, {FAILED}, {NOT_JUDGED}\n"
        "ARRAYS_AS_LISTS = False\n"
    )
    return f"{constants}{_CODEC}{_JUDGE}"
