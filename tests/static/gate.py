"""What must never stand in the package, found in the syntax tree.

`violations(source)` gives one line per offence. There is no allow-list: code that needs an
exception to a rule is written differently.

`unpicklings(source)` gives the constructs that make objects, and so run code, out of bytes: those
by name, and those that the standard library, torch and others use behind their backs between
processes. Files that have some are listed with the reason in `test_gate.UNPICKLED`.
"""

import ast
import re
from collections.abc import Iterator
from re import _constants as regex_ops  # the standard library's own pattern parser
from re import _parser as regex_parser

FORBIDDEN_IMPORTS = {
    *("pickle", "_pickle", "cPickle", "pickle5", "cloudpickle", "dill", "marshal", "shelve"),
    *("joblib", "jsonpickle", "multiprocess", "pathos"),
}
FORBIDDEN_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "builtins.eval": "runs text as code",
    "builtins.exec": "runs text as code",
    "torch.load": "unpickles",
    "torch.save": "pickles; use safetensors",
    "torch.package": "unpickles",
    "torch.jit.load": "unpickles",
    "pd.read_pickle": "unpickles",
    "pandas.read_pickle": "unpickles",
    "yaml.load": "builds arbitrary objects; use yaml.safe_load",
    "yaml.unsafe_load": "builds arbitrary objects",
    "yaml.full_load": "builds arbitrary objects",
    "os.system": "goes through a shell",
    "os.popen": "goes through a shell",
    "sympify": "evaluates text",
    "sympy.sympify": "evaluates text",
    "parse_expr": "evaluates text",
    "instantiate": "calls whatever a config names",
    "hydra.utils.instantiate": "calls whatever a config names",
}
FORBIDDEN_TRUE_KEYWORDS = {"shell", "trust_remote_code", "allow_pickle"}
UNPICKLING_IMPORTS = re.compile(
    r"multiprocessing\.(reduction|managers|pool|queues|sharedctypes)\b.*|torch\.multiprocessing\b.*"
    r"|torch\.distributed\.(checkpoint(?!\.state_dict\.)|rpc)\b.*"
    r"|multiprocessing\.(Manager|Pool|Pipe|Queue|SimpleQueue|JoinableQueue)"
    r"|concurrent\.futures\.(process\b.*|ProcessPoolExecutor)"
)
UNPICKLING_CALLS = re.compile(
    r".*\b(Unpickler|ProcessPoolExecutor|unpickle)|.*[Pp]ickle\w*\.loads?|.*\.read_pickle"
    r"|.*\.(Manager|Pool|Pipe|JoinableQueue|imap|imap_unordered|starmap)"
    r"|(?!queue\.|asyncio\.).*\.(Queue|SimpleQueue)"
    r"|.*\b(all_gather|broadcast|gather|scatter|send|recv)_object(_list)?"
    r"|.*DataLoader"
)
"""Calls of these names, with what stands before the last dot."""
WAITS_WITHOUT_ARGUMENTS = {"join", "wait", "result", "get", "acquire", "communicate"}
CALLS_THAT_NEED_TIMEOUT = re.compile(
    r"(ray\.(get|wait)|subprocess\.(run|call|check_call|check_output)"
    r"|(requests|httpx)\.(get|post|put|delete|head|patch|request)|\w*\.?urlopen)"
)
ENVIRONMENT = ("os.environ", "os.getenv", "os.putenv")
LOGGING = re.compile(r"(print|warnings\.warn|(self\.)?_?(logger|logging|log)\.\w+)")


def violations(source: str, *, may_read_environment: bool = False) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        for offence in offences(node, may_read_environment=may_read_environment):
            yield f"line {node.lineno}: {offence}"


def offences(node: ast.AST, *, may_read_environment: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        yield from (f"imports {n}" for n in names if n.split(".")[0] in FORBIDDEN_IMPORTS)
    elif (
        isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_IMPORTS
    ):
        yield f"imports from {node.module}"
    elif isinstance(node, ast.Call):
        yield from call_offences(node)
    elif isinstance(node, ast.ExceptHandler) and is_broad(node) and swallows(node):
        yield "a broad except that swallows the error"
    elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "0.0.0.0" in node.value:
        yield "listens on every interface (0.0.0.0)"
    elif not may_read_environment and isinstance(node, ast.Attribute):
        is_read = ast.unparse(node) in ENVIRONMENT
        yield from ["reads the environment outside verl/utils/environment.py"] * is_read


def unpicklings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = []
        yield from (name for name in names if UNPICKLING_IMPORTS.fullmatch(name))
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if UNPICKLING_CALLS.fullmatch(name):
                yield name
            if name.endswith(".recv") and not node.args:  # a socket's says how many bytes
                yield name
            if "num_proc" in keywords:
                yield f"{name}(num_proc)"
            if not is_constant(keywords.get("allow_pickle", ast.Constant(False)), False):
                yield f"{name}(allow_pickle)"


def call_offences(node: ast.Call) -> Iterator[str]:
    name = ast.unparse(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if name in FORBIDDEN_CALLS:
        yield f"{name}: {FORBIDDEN_CALLS[name]}"
    for keyword in FORBIDDEN_TRUE_KEYWORDS & keywords.keys():
        if is_constant(keywords[keyword], True):
            yield f"{name}({keyword}=True)"
    if CALLS_THAT_NEED_TIMEOUT.fullmatch(name) and "timeout" not in keywords:
        yield f"{name} without a timeout"
    attribute = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    if attribute in WAITS_WITHOUT_ARGUMENTS and not node.args and not keywords:
        yield f"{name}() waits without a deadline"
    is_regex = re.fullmatch(
        r"re\.(compile|search|match|fullmatch|sub|split|findall|finditer)", name
    )
    pattern = node.args[0] if is_regex and node.args else None
    if isinstance(pattern, ast.Constant) and has_nested_repeat(str(pattern.value)):
        yield f"a regular expression with nested repeats: {pattern.value!r}"


def is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


def is_broad(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or ast.unparse(kind) in ("Exception", "BaseException") for kind in kinds
    )


def swallows(handler: ast.ExceptHandler) -> bool:
    """True unless the handler raises, or hands the caught error on to something besides a log."""
    nodes = [child for statement in handler.body for child in ast.walk(statement)]
    if any(isinstance(child, ast.Raise) for child in nodes):
        return False
    logged = {
        id(inner)
        for child in nodes
        if isinstance(child, ast.Call) and LOGGING.fullmatch(ast.unparse(child.func))
        for inner in ast.walk(child)
    }
    uses = (n for n in nodes if isinstance(n, ast.Name) and n.id == handler.name)
    return not any(id(use) not in logged for use in uses)


def has_nested_repeat(pattern: str) -> bool:
    """Whether an unbounded repeat holds another one, as in `(a+)*`: time may grow exponentially."""
    return _repeats(regex_parser.parse(pattern), inside=False)


def _repeats(tree: object, *, inside: bool) -> bool:
    if isinstance(tree, tuple) and len(tree) == 2 and tree[0] in REPEATS:
        low, high, body = tree[1]
        unbounded = high == regex_ops.MAXREPEAT and low != high
        if inside and unbounded:
            return True
        return any(_repeats(part, inside=inside or unbounded) for part in body)
    if isinstance(tree, (tuple, list, regex_parser.SubPattern)):
        return any(_repeats(part, inside=inside) for part in tree)
    return False


REPEATS = {regex_ops.MAX_REPEAT, regex_ops.MIN_REPEAT}
