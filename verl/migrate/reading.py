"""Settings in files of other programs, found in the text alone: nothing is run or imported.

A shell script has assignments, which are put in where they are used, and one command; a Python file
has a call of `GRPOConfig` with literals; a YAML file has keys. A page (Markdown) has
blocks of these kinds.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from verl.migrate.plan import Expression

MAX_BYTES = 1_000_000
MAX_ROUNDS = 10
MODULE = re.compile(r"(?:-m\s+|/)((?:verl|recipe|openrlhf)[./][\w./]+)")
ASSIGNMENT = re.compile(r"^\s*(?:export\s+|local\s+)?([A-Za-z_]\w*)=(.*)$", re.DOTALL)
ARRAY = re.compile(r"^\s*([A-Za-z_]\w*)=\(([^)]*)\)", re.MULTILINE)
END = re.compile(r"\||&|;|\d*>")
VARIABLE = re.compile(r"\$\{(\w+)(?:\[@\])?(?::-([^}]*))?\}|\$(\w+)")
TRL_KEYS = {"num_generations", "max_completion_length", "per_device_train_batch_size", "beta"}
OBJECTS = (None, "args", "processing_class", "callbacks", "peft_config")
LORA = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "target_modules": "lora_target_modules",
}
VERL_KEYS = {"actor_rollout_ref", "data", "algorithm", "trainer", "model", "defaults"}


BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"\.\.\.$|.*<[\w.]+>")


class Unreadable(ValueError):
    """A file in which no run of a known program was found."""


@dataclass
class Found:
    """A run: of which `program` (verl, trl, openrlhf), with which settings."""

    program: str
    module: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


def read(path: Path) -> dict[str, Found]:
    """The runs of a file, each under the place where it stands: several on a page, else one."""
    if path.stat().st_size > MAX_BYTES:
        raise Unreadable(f"{path} has more than {MAX_BYTES} bytes; that is no script")
    text = path.read_text()
    if path.suffix == ".py":
        return {str(path): read_python(text, path)}
    if path.suffix in (".yaml", ".yml"):
        return {str(path): read_yaml(text, path)}
    if BLOCK.search(text) or path.suffix == ".md":
        return read_page(text, path)
    return {str(path): read_shell(text, path)}


def read_page(text: str, path: Path) -> dict[str, Found]:
    """The blocks that hold a run; others are about something else."""
    readers = {"python": read_python, "py": read_python, "yaml": read_yaml, "yml": read_yaml}
    runs = {}
    for block in BLOCK.finditer(text):
        place = f"{path}:{text.count(chr(10), 0, block.start()) + 1}"
        try:
            found = readers.get(block[1].lower(), read_shell)(block[2], Path(place))
        except Unreadable:
            continue
        found.arguments = [word for word in found.arguments if not PLACEHOLDER.match(word)]
        if not found.module.endswith("."):  # `python -m verl.trainer.<command>`
            runs[place] = found
    if not runs:
        raise Unreadable(
            f"{path} is a page, and none of its blocks (```) has a run of verl, TRL or OpenRLHF"
        )
    return runs


# ---- shell ---------------------------------------------------------------------------------------


def read_shell(text: str, path: Path) -> Found:
    variables = dict(arrays(text))
    for line in logical_lines(ARRAY.sub("", text)):
        name = TRL_COMMAND.search(line)
        module = MODULE.search(line)
        assignment = ASSIGNMENT.match(line)
        if module is None and name is None and assignment is not None:
            variables[assignment[1]] = first_word(substituted(assignment[2], variables))
        elif module is not None or name is not None:
            match = module or name
            assert match is not None
            words = split(substituted(line[match.end() :], variables))
            return command(match, module is not None, words)
    raise Unreadable(
        f"{path} has no command of a known program (python -m verl..., python -m openrlhf..., "
        "trl grpo ...)"
    )


TRL_COMMAND = re.compile(r"\btrl\s+grpo\b")


def command(match: "re.Match[str]", has_module: bool, words: list[str]) -> Found:
    if not has_module:
        return Found("trl", "trl grpo", flags(words))
    module = match[1].replace("/", ".").removesuffix(".py")
    if module.startswith("openrlhf"):
        return Found("openrlhf", module, flags(words))
    return Found("verl", module, arguments=words)


def logical_lines(text: str) -> Iterator[str]:
    """Lines without comments, those that end with a backslash joined."""
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    yield from "\n".join(lines).replace("\\\n", " ").splitlines()


def arrays(text: str) -> Iterator[tuple[str, str]]:
    """`NAME=( ... )`, as `"${NAME[@]}"` puts it in."""
    for name, body in ARRAY.findall(text):
        lines = (line.partition(" #")[0].rstrip("\\ ") for line in body.splitlines())
        yield name, " ".join(line for line in lines if not line.lstrip().startswith("#"))


def first_word(text: str) -> str:
    words = split(text)
    return words[0] if words else ""


def split(text: str) -> list[str]:
    """The words up to a pipe, a redirection or the next command."""
    try:
        every = shlex.split(text, comments=True)
    except ValueError as error:
        raise Unreadable(f"a quote is not closed in: {text[:80]}") from error
    ends = [place for place, word in enumerate(every) if END.match(word)]
    words = every[: ends[0]] if ends else every
    return [word for word in words if word.strip() not in ("", "$@", "${@}", "$*")]


def substituted(text: str, variables: Mapping[str, str]) -> str:
    """The script's own variables in place; those of the environment stay (`$HOME`)."""

    def value(match: "re.Match[str]") -> str:
        name, default = match[1] or match[3], match[2]
        return variables.get(name, match[0] if default is None else default)

    for name, words in variables.items():
        text = text.replace(f'"${{{name}[@]}}"', words)
    for _ in range(MAX_ROUNDS):
        before, text = text, VARIABLE.sub(value, text)
        if text == before:
            break
    return text


def flags(words: list[str]) -> dict[str, Any]:
    """`--name value`, `--name=value`, `--name` and `--name a b` as settings."""
    settings: dict[str, Any] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, is_assigned, value = word[2:].partition("=")
            name = name.replace("-", "_")
            settings[name] = plain(value) if is_assigned else True
        elif name is not None:
            earlier = settings[name]
            settings[name] = plain(word) if earlier is True else f"{earlier} {word}"
    return settings


def plain(text: str) -> Any:
    """A value as YAML reads it; what holds a variable stays text, and so does 1e-6 as a number."""
    if "$" in text:
        return text
    value = yaml.safe_load(text) if text else ""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


# ---- Python and YAML -----------------------------------------------------------------------------


def read_python(text: str, path: Path) -> Found:
    settings: dict[str, Any] = {}
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise Unreadable(f"{path} is no Python: {error}") from error
    constants = {
        target.id: node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and called(node) in ("GRPOConfig", "GRPOTrainer"):
            for keyword in node.keywords:
                if keyword.arg not in OBJECTS:
                    settings[str(keyword.arg)] = literal(keyword.value, constants)
        if isinstance(node, ast.Call) and called(node) == "LoraConfig":
            for keyword in node.keywords:
                if keyword.arg in LORA:
                    settings[LORA[keyword.arg]] = literal(keyword.value, constants)
    if not settings:
        raise Unreadable(f"{path} has no call of GRPOConfig or GRPOTrainer")
    return Found("trl", "GRPOTrainer", settings)


def called(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def literal(node: ast.expr, constants: Mapping[str, ast.expr]) -> Any:
    if isinstance(node, ast.Name) and node.id in constants:
        node = constants[node.id]
    try:
        return ast.literal_eval(node)
    except ValueError:
        return Expression(ast.unparse(node))


def read_yaml(text: str, path: Path) -> Found:
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Unreadable(f"{path} is no YAML: {error}") from error
    if not isinstance(tree, dict):
        raise Unreadable(f"{path} holds no mapping of settings")
    if set(tree) & VERL_KEYS:
        return Found("verl", "", tree)
    if set(tree) & TRL_KEYS:
        return Found("trl", "trl grpo --config", {key: from_yaml(one) for key, one in tree.items()})
    raise Unreadable(f"{path} has keys of no known program: {', '.join(map(str, tree))[:200]}")


def from_yaml(value: Any) -> Any:
    """YAML reads 1e-6 as text."""
    return plain(value) if isinstance(value, str) else value
