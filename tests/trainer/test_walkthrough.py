"""The tour from a prompt to a gradient names every function of ours that is really on the way."""

import ast
import re
import sys
import threading
from pathlib import Path

import pytest

from tests.toy import toy_run
from verl.agent_loop.rollouter import rollout_loop
from verl.trainer.ppo.trainer import PPOTrainer

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "walkthrough.md").read_text()
HOPS = re.findall(r"`([\w/.-]+\.py)::([\w.]+)`", PAGE)
MILESTONES = (
    "RLHFDataset.__getitem__",
    "encode_prompt",
    "NativeEngine.submit",
    "ModelRunner.prefill",
    "ModelRunner.decode",
    "compute_score",
    "padded_columns",
    "compute_grpo_outcome_advantage",
    "compute_policy_loss_vanilla",
    "MasterOptimizer.step",
)
"""Where a prompt is read, encoded, continued, graded, padded, compared, and trained on."""

MAX_FUNCTIONS = 45
MAX_FRAMES = 14
"""From `fit` to the loss, both counted."""

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name")


def definition(file: str, symbol: str) -> ast.AST | None:
    node = ast.parse((ROOT / file).read_text())
    for name in symbol.split("."):
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = [child for child in node.body if isinstance(child, kinds) and child.name == name]
        if not found:
            return None
        node = found[0]
    return node


@pytest.mark.parametrize(("file", "symbol"), HOPS, ids=[symbol for _, symbol in HOPS])
def test_every_hop_exists(file, symbol):
    assert definition(file, symbol) is not None


class Milestones:
    """Notes our frames on the stack whenever a milestone is called, on any thread."""

    def __init__(self):
        self.stacks: dict[str, list[tuple[str, str]]] = {}

    def __call__(self, frame, event, argument):
        if event != "call" or frame.f_code.co_qualname not in MILESTONES:
            return
        stack = []
        walk = frame
        while walk is not None:
            path = Path(walk.f_code.co_filename)
            if path.is_relative_to(ROOT / "verl"):
                name = walk.f_code.co_qualname.partition(".<locals>")[0]
                stack.append((str(path.relative_to(ROOT)), name))
            walk = walk.f_back
        self.stacks[frame.f_code.co_qualname] = stack[::-1]


@pytest.fixture(scope="module")
def stacks(toy, tmp_path_factory):
    milestones = Milestones()

    class Watched(PPOTrainer):
        def fit(self):
            threading.setprofile(milestones)
            sys.setprofile(milestones)
            try:
                super().fit()
            finally:
                sys.setprofile(None)
                threading.setprofile(None)

    rollout_loop.cache_clear()  # a thread of an earlier test would not be watched
    output = tmp_path_factory.mktemp("walk")
    toy_run(toy, output, "trainer.total_training_steps=1", trainer_class=Watched)
    return milestones.stacks


def after_fit(stack: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The frames from `fit` on; all of them on threads that the step wakes."""
    names = [name for _, name in stack]
    return stack[names.index("PPOTrainer.fit") :] if "PPOTrainer.fit" in names else stack


def test_every_milestone_is_passed(stacks):
    assert set(stacks) == set(MILESTONES)


def test_the_page_names_what_is_on_the_way(stacks):
    on_the_way = {hop for stack in stacks.values() for hop in after_fit(stack)}
    assert on_the_way - set(HOPS) == set(), "not on the page"
    assert len(on_the_way) <= MAX_FUNCTIONS


def test_few_frames_lie_between_the_loop_and_the_loss(stacks):
    assert len(after_fit(stacks["compute_policy_loss_vanilla"])) <= MAX_FRAMES
