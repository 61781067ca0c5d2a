"""Commands on pages name modules, files, targets, flags and options that exist.

What needs a model or minutes is run elsewhere (docs/gsm8k.md whole, the quickstart, examples of
pages by doctest); here each command is read by the parser or the schema that would read it.
"""

import re
import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
from omegaconf import OmegaConf

from verl.cli import COMMANDS
from verl.config.load import load_config
from verl.config.schema import FILE_ROOTS

ROOT = Path(__file__).parents[2]
STARTS = re.compile(
    r"^(?: {4}|\t)?(?:\$ )?(?:[A-Z_]+=\S+ )*(?=python3? |verl |make |bash |examples/)"
)
CONFIGURED = {
    "verl.trainer.main_ppo": "ppo_trainer",
    "verl.trainer.fsdp_sft_trainer": "sft_trainer",
    "verl.trainer.sft_trainer": "sft_trainer_engine",
    "verl.trainer.sft_trainer_ray": "sft_trainer_engine",
    "verl.trainer.main_rm": "rm_trainer",
    "verl.trainer.main_generation": "generation",
    "verl.trainer.main_generation_server": "ppo_trainer",
    "verl.trainer.main_eval": "evaluation",
    "verl.experimental.fully_async_policy.fully_async_main": "fully_async_ppo_trainer",
}
RECIPE = re.compile(r"recipe\.(\w+)\.main_\1")
OPTION = re.compile(r"^\+{0,2}[a-z_]+(\.[\w-]+)+=")


def pages() -> list[Path]:
    folders = ("docs", "examples", "recipe", "benchmarks")
    below = [page for folder in folders for page in sorted((ROOT / folder).rglob("*.md"))]
    return [*sorted(ROOT.glob("*.md")), *below]


def commands(page: Path) -> list[list[str]]:
    """The words of every command on a page; what a reader is to fill in (`...`) is left out."""
    found = []
    for line in page.read_text().replace("\\\n", " ").splitlines():
        if STARTS.match(line):
            text = STARTS.sub("", line).partition(" #")[0].partition(" |")[0].partition(" >")[0]
            words = [word for word in shlex.split(text) if word not in ("...", "[...]", "&")]
            found.append(words)
    return found


def faults(page: Path, words: list[str]) -> list[str]:
    program, *rest = words
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return [f"no target {word}" for word in rest[:1] if "=" not in word and word not in targets]
    if program.startswith("examples/") or program == "bash":
        script = rest[0] if program == "bash" else program
        return [] if (ROOT / script).exists() else [f"no file {script}"]
    if program == "verl":
        return [] if rest and rest[0] in COMMANDS else [f"no command {rest[:1]}"]
    if rest[:1] == ["-m"]:
        return module_faults(rest[1], rest[2:])
    if rest and rest[0].endswith(".py"):
        places = (ROOT / rest[0], page.parent / rest[0])
        is_made_there = rest[0].rpartition("/")[2] in page.read_text().replace(
            f"python {rest[0]}", ""
        )
        return [] if any(map(Path.exists, places)) or is_made_there else [f"no file {rest[0]}"]
    return []


def module_faults(name: str, words: list[str]) -> list[str]:
    if not name.startswith(("verl", "recipe")):
        return []
    if find_spec(name) is None:
        return [f"no module {name}"]
    if root := CONFIGURED.get(name) or (RECIPE.fullmatch(name) and "ppo_trainer"):
        options = [
            word for word in words if OPTION.match(word) and not re.search(r"<|=\.\.\.", word)
        ]
        config = OmegaConf.from_dotlist([option.lstrip("+") for option in options])
        loaded = load_config(config, FILE_ROOTS[root])
        return [str(fault) for fault in loaded.faults if "unknown option" in str(fault)]
    return flag_faults(import_module(name), words)


def flag_faults(module: ModuleType, words: list[str]) -> list[str]:
    parser = vars(module).get("parser")
    if parser is None:
        return []
    try:
        parser().parse_intermixed_args(words)
    except SystemExit as error:
        return [f"{shlex.join(words)} is refused"] if error.code else []
    return []


def test_pages_have_commands():
    assert sum(len(commands(page)) for page in pages()) > 80


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_one_that_exists(page):
    found = [
        f"{shlex.join(words)[:80]}: {fault}"
        for words in commands(page)
        for fault in faults(page, words)
    ]
    assert found == []


def test_a_mistake_on_a_page_would_be_found():
    page = ROOT / "README.md"
    for text in (
        "make tset",
        "verl trian",
        "python -m verl.trainer.main_pop",
        "python examples/nowhere.py",
        "bash examples/nowhere.sh",
        "examples/nowhere.sh trainer.dry_run=True",
        "python -m recipe.dapo.main_dapo actor_rollout_ref.actor.clip_ration=0.1",
        "python -m verl.trainer.main_ppo actor_rollout_ref.actor.clip_ration=0.1",
        "python -m verl.replay runs/x --stpe 3",
    ):
        assert faults(page, shlex.split(text)), text
