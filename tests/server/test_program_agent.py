"""Agent programs as rows of a batch: their trajectories, rewards and ends."""

import asyncio
import socket
import sys
import uuid
from contextlib import suppress
from pathlib import Path

import pytest
import yaml

from tests.agent_loop.fakes import loop_config
from tests.server.engines import ScriptedRollout, byte_tokenizer
from tests.server.gateways import bisecting
from tests.utils.sandbox.needs import require_namespaces
from verl.agent_loop import AgentLoopManager, AsyncLLMServerManager, DictConfigWrap
from verl.agent_loop.base import LoopSample
from verl.agent_loop.journal import Journal
from verl.agent_loop.rollouter import RolloutOptions
from verl.config.rollout import AgentLoopConfig
from verl.protocol.trajectory import Group, InfraError, Trajectory
from verl.server.jailed import Jail
from verl.server.program_agent import ProgramAgentLoop
from verl.server.programs import ProgramSpec, RewardError, read_reward, run_program
from verl.utils.processes import descendants

PROGRAM = Path(__file__).with_name("program.py")
COMMAND = [sys.executable, str(PROGRAM)]
PROMPT = [{"role": "user", "content": "Guess a number from 1 to 16."}]


def generated(tmp_path, *rows, engine=None, **entry):
    """The group of each row after its programs have run, and the engine."""
    entry = {
        "name": "program_agent",
        "_target_": "verl.server.program_agent.ProgramAgentLoop",
        **({} if "function" in entry else {"command": COMMAND}),
        **entry,
    }
    path = tmp_path / "loops.yaml"
    path.write_text(yaml.safe_dump([entry]))
    tokenizer = byte_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def reply(request):
        text = bisecting(tokenizer.decode(list(request.prompt_ids)))
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], end]

    engine = engine or ScriptedRollout(reply, per_delta=1 << 20)
    agent = AgentLoopConfig(agent_loop_config_path=str(path), default_agent_loop="program_agent")
    config = loop_config(agent=agent, prompt_length=512, response_length=1024)
    manager = AgentLoopManager(config, rollouts=[engine], tokenizer=tokenizer)
    groups = []
    for number, row in enumerate(rows):
        row = {"raw_prompt": PROMPT, "target": 11, **row}
        trajectory = Trajectory(uid=str(number), sample=0, row=row, seed=number)
        groups.append(Group(index=number, uid=str(number), drawn_at=0, trajectories=[trajectory]))
    manager.rollouter.generate(groups, RolloutOptions())
    return groups, engine


def test_a_program_becomes_a_trajectory_of_the_engines_ids(tmp_path):
    (group,), engine = generated(tmp_path, {"mode": "plays"})
    (row,) = group.trajectories
    last = engine.requests[-1]
    sampled = engine.reply(last)
    assert [*row.prompt_ids, *row.response_ids] == [*last.prompt_ids, *sampled]
    replies = [engine.reply(request) for request in engine.requests]
    model = [segment for segment in row.response if segment.author == "model"]
    assert [segment.token_ids for segment in model] == replies
    assert all(segment.versions == [0] * len(segment.token_ids) for segment in model)
    assert (row.reward_score, row.num_turns) == (1 / 5, 10)
    assert row.extra_fields["reward_extra_info"] == {"turns": 5}
    assert row.extra_fields["program_outcome"] == "finished"
    assert not any(row.extra_fields["program_forks"].values())
    assert [request.params.temperature for request in engine.requests] == [0.7] * 5


def test_a_function_is_a_program_and_the_reward_function_may_grade(tmp_path):
    rows = [{"mode": "plays"}, {"mode": "ungraded"}]
    groups, _ = generated(tmp_path, *rows, function=f"{PROGRAM}:main")
    assert [group.trajectories[0].reward_score for group in groups] == [1 / 5, None]
    (group,), _ = generated(tmp_path, {"mode": "plays"}, function=f"{PROGRAM}:awaited")
    assert group.trajectories[0].reward_score == 1 / 5


def test_two_conversations_are_two_rows_of_one_session_with_one_reward(tmp_path):
    (group,), _ = generated(tmp_path, {"mode": "two"})
    assert [row.reward_score for row in group.trajectories] == [None, 1 / 5]
    assert [row.extra_fields["program_forks"]["forks/system_changed"] for row in group.trajectories]


@pytest.mark.parametrize(
    ("mode", "entry", "outcome"),
    [
        ("fails", {}, "failed"),
        ("fails", {"on_failure": "infra"}, "program"),
        ("silent", {}, "program"),
        ("plays", {"command": ["/no/such/program"]}, "program"),
    ],
)
def test_how_a_program_ends_is_stated(tmp_path, mode, entry, outcome):
    (group,), _ = generated(tmp_path, {"mode": mode}, **entry)
    if outcome == "failed":
        (row,) = group.trajectories
        assert row.extra_fields["program_outcome"] == "failed"
        assert row.reward_score is None
        assert "went wrong" in row.extra_fields["program_stderr"]
        assert len(row.extra_fields["program_stdout"]) < 20_000
    else:
        assert group.trajectories == []
        (lost,) = group.lost
        assert isinstance(lost.grade, InfraError)
        assert lost.grade.kind == outcome
        assert Path(entry.get("command", COMMAND)[0]).name in lost.grade.reason


def test_a_program_that_hangs_is_ended_with_all_it_started(tmp_path):
    assert num_turns_until_it_hangs(tmp_path) == 10


def num_turns_until_it_hangs(tmp_path, **entry):
    mark = uuid.uuid4().hex
    for seconds in (3, 10, 40):  # on a busy machine it may not even come to the hang
        (group,), _ = generated(tmp_path, {"mode": "hangs", "mark": mark}, timeout=seconds, **entry)
        assert not any(mark in command for command in commands())
        for row in group.trajectories:
            assert row.extra_fields["program_outcome"] == "timeout"
            if row.num_turns == 10:
                return row.num_turns
    return 0


def commands() -> list[str]:
    """The command lines of the processes of this machine."""
    found = []
    for pid in descendants(1):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            found.append(Path(f"/proc/{pid}/cmdline").read_text())
    return found


def test_a_cancelled_program_is_ended(tmp_path):
    async def cancel():
        started = tmp_path / "started"
        code = f"import time, pathlib; pathlib.Path({str(started)!r}).touch(); time.sleep(3600)"
        spec = ProgramSpec(
            command=(sys.executable, "-c", code), timeout_seconds=600, environment={}
        )
        task = asyncio.create_task(run_program(spec, {}, {}))
        while not started.exists():
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert not any(str(tmp_path) in command for command in commands())


def test_a_program_in_the_sandbox_reaches_the_gateway_and_nothing_else(tmp_path):
    require_namespaces()
    secret = tmp_path / "secret"
    secret.write_text("a key")
    with socket.create_server(("127.0.0.1", 0)) as other:  # something of the host's
        looks = {"port": other.getsockname()[1], "paths": [str(secret), "/etc/passwd", "/proc"]}
        rows = [{"mode": "plays"}, {"mode": "looks", "looks": looks}]
        groups, engine = generated(tmp_path, *rows, sandbox={"memory_mb": 512})
    (row,), (looked,) = (group.trajectories for group in groups)
    assert (row.reward_score, row.num_turns) == (1 / 5, 10)
    sampled = [segment.token_ids for segment in row.response if segment.author == "model"]
    replies = [engine.reply(request) for request in engine.requests]
    assert len(sampled) == 5
    assert all(ids in replies for ids in sampled)
    assert looked.reward_score == 1.0
    found = looked.extra_fields["reward_extra_info"]
    assert found == {"reached": "[]", "seen": "[]", "user": 1000, "folder": "/tmp"}
    (group,), _ = generated(tmp_path, {"mode": "two"}, function=f"{PROGRAM}:main", sandbox=True)
    assert [row.reward_score for row in group.trajectories] == [None, 1 / 5]


def test_the_sandbox_ends_a_program_that_hangs_or_is_cancelled(tmp_path):
    require_namespaces()
    assert num_turns_until_it_hangs(tmp_path, sandbox=True) == 10


def test_a_journalled_program_is_made_again_without_running(tmp_path):
    """What it asked is in the journal, what it was answered follows from the seeds."""
    config = loop_config(prompt_length=512, response_length=1024)
    tokenizer, outputs = byte_tokenizer(), []
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")

    def reply(request):
        text = bisecting(tokenizer.decode(list(request.prompt_ids)))
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], end]

    async def run(mode, row):
        journal = Journal(tmp_path / "journal", mode=mode)
        await journal.begin(1)
        loop = ProgramAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=AsyncLLMServerManager(config, [ScriptedRollout(reply, per_delta=9999)]),
            tokenizer=tokenizer,
            command=[sys.executable, "-c", PROGRAM_THAT_COUNTS, str(tmp_path / "runs")],
        )
        sample = LoopSample(
            {"seed": 7, "temperature": 1.0},
            {"raw_prompt": PROMPT, "target": 11, **row},
            lambda output, turns: outputs.append(output),
            journal=journal.trajectory(1, "train", "1-0", 0),
        )
        await sample.run_in(loop)
        await journal.files.written()
        journal.files.close()
        return journal

    for mode in ("resume", "resume", "replay"):
        journal = asyncio.run(run(mode, {"mode": "two"}))
    assert (tmp_path / "runs").read_text() == "1"  # the program ran once
    assert list(journal.ended.values()) == [True]
    first, *others = outputs
    assert len(first) == 2
    for again in others:
        for one, other in zip(first, again, strict=True):
            assert other.response_ids == one.response_ids
            assert other.response_mask == one.response_mask
            assert other.reward_score == one.reward_score
            assert other.extra_fields == one.extra_fields


PROGRAM_THAT_COUNTS = f"""
import runpy, sys
with open(sys.argv[1], "a") as file:
    file.write("1")
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""


@pytest.mark.parametrize(
    ("sandbox", "told"),
    [
        ({"memory": 3}, "has no field memory; it knows files, memory_mb, max_processes"),
        ({"memory_mb": 0}, "memory_mb is 0; it must be positive"),
        ({"files": ["/no/such"]}, "names /no/such, which is not there"),
    ],
)
def test_a_sandbox_that_cannot_be_is_refused(sandbox, told):
    with pytest.raises(ValueError, match=told):
        Jail.of_entry(sandbox)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("0.5", (0.5, {})),
        ("true", (1.0, {})),
        ('{"score": 2, "moves": 3}', (2.0, {"moves": 3})),
        ("NaN", None),
        ('{"moves": 3}', None),
        ("[1]", None),
        ("half", None),
    ],
)
def test_a_reward_is_a_finite_number(tmp_path, text, reward):
    file = tmp_path / "reward"
    file.write_text(text)
    if reward is None:
        with pytest.raises(RewardError, match="finite number"):
            read_reward(file)
    else:
        assert read_reward(file) == reward
