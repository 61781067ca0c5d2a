"""Environments of the real package `verifiers`, in the interpreter that has it.

VERL_TEST_VERIFIERS_PYTHON names it: `make test-verifiers`.
"""

import os

import pytest

from tests.agent_loop.scripted import END, call
from tests.environments.test_env_agent import play as run_env_agent
from tests.environments.test_pool import leased, pool_of
from verl.environments.base import Action, BadEnvironment, ToolCall
from verl.environments.make_data import make_rows
from verl.environments.pool import EnvironmentSpec
from verl.environments.verifiers import check_version
from verl.protocol.trajectory import InfraFault

PYTHON = os.environ.get("VERL_TEST_VERIFIERS_PYTHON", "")
slow = pytest.mark.slow
needs_package = pytest.mark.skipif(not PYTHON, reason="set VERL_TEST_VERIFIERS_PYTHON")

WORLDS = '''
import asyncio

import verifiers as vf
from datasets import Dataset

DATA = Dataset.from_list(
    [{"question": f"What is {i} + {i}?", "answer": str(2 * i), "info": {"n": i}} for i in range(5)]
)


def is_right(completion, answer):
    return float(completion[-1]["content"].strip() == answer)


def was_tried(completion):
    return 1.0


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["num_guesses"] = 0

    async def env_response(self, messages, state, **kwargs):
        state["num_guesses"] += 1
        guess, wanted = int(messages[-1]["content"]), int(state["answer"])
        if guess == wanted:
            state["final_env_response"] = [{"role": "user", "content": "Yes."}]
            return []
        if guess == -1:
            raise vf.InfraError("the sandbox is gone")
        return [{"role": "user", "content": "higher" if guess < wanted else "lower"}]

    @vf.stop
    async def has_given_up(self, state):
        last = state["trajectory"][-1:]
        return bool(last) and "99" in last[0]["completion"][-1]["content"]

    @vf.cleanup
    async def note(self, state):
        if self.log:
            with open(self.log, "a") as file:
                file.write(f"{state['num_guesses']} guesses\\n")


class Forgetful(Guess):
    async def get_prompt_messages(self, state):
        return (await super().get_prompt_messages(state))[-1:]


class Hasty(Guess):
    async def setup_state(self, state):
        turns = [self.get_model_response(state, state["prompt"]) for _ in range(2)]
        await asyncio.gather(*turns)


def few_guesses(state):
    return 1.0 / max(1, state["num_guesses"])


def solved(state):
    return float(state["stop_condition"] == "has_final_env_response")


def double(number: int) -> int:
    """Twice the number.

    Args:
        number: what to double
    """
    return 2 * number


def together(completions):
    return [0.0 for _ in completions]


def load_environment(kind, log=""):
    rubric = vf.Rubric(funcs=[is_right, was_tried], weights=[1.0, 0.25])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=DATA, system_prompt="Add.", rubric=rubric)
    if kind == "tools":
        return vf.ToolEnv(dataset=DATA, tools=[double], rubric=rubric, max_turns=3)
    if kind == "group":
        return vf.SingleTurnEnv(dataset=DATA, rubric=vf.Rubric(funcs=[together]))
    guesses = vf.Rubric(funcs=[solved, few_guesses], weights=[1.0, 0.5])
    world = {"guess": Guess, "forgetful": Forgetful, "hasty": Hasty}[kind]
    return world(dataset=DATA, rubric=guesses, max_turns=4, log=log)
'''


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    file = tmp_path_factory.mktemp("verifiers") / "sums_and_guesses.py"
    file.write_text(WORLDS)
    return file


def spec_of(worlds, kind, **kwargs):
    return EnvironmentSpec(
        name=f"verifiers:{worlds}", kwargs={"kind": kind, **kwargs}, python=PYTHON
    )


async def play(pool, spec, seed, actions, row=None):
    async with leased(pool) as lease:
        first, tools = await lease.reset(spec, row or {}, seed)
        return first, tools, [await lease.step(action) for action in actions]


def user(text):
    return {"role": "user", "content": text}


@slow
@needs_package
async def test_rollouts_are_played_turn_by_turn_and_scored_by_their_rubric(worlds, tmp_path):
    log = tmp_path / "log"
    async with pool_of() as pool:
        single = spec_of(worlds, "single")
        prompt = [{"role": "system", "content": "Add."}, user("What is 3 + 3?")]
        for seed, row in ((8, {}), (0, {"extra_info": {"example": 3}})):
            first, tools, seen = await play(pool, single, seed, [Action("6")], row)
            assert (first.messages, tools) == (prompt, [])
            assert (seen[0].reward, seen[0].done, seen[0].messages) == (1.25, True, [])
            assert seen[0].info["metrics"] == {"is_right": 1, "was_tried": 1, "num_turns": 1}
        _, _, seen = await play(pool, single, 3, [Action("7")])
        assert (seen[0].reward, seen[0].done) == (0.25, True)

        guess = spec_of(worlds, "guess", log=str(log))
        _, _, seen = await play(pool, guess, 4, [Action("3"), Action("9"), Action("8")])
        assert [one.messages for one in seen] == [[user("higher")], [user("lower")], [user("Yes.")]]
        assert [(one.reward, one.done) for one in seen[:2]] == [(0.0, False)] * 2
        assert (seen[2].reward, seen[2].done) == (pytest.approx(1 + 0.5 / 3), True)
        _, _, seen = await play(pool, guess, 4, [Action("1")] * 4)  # `max_turns` of its own
        assert (seen[3].reward, seen[3].info["stop_condition"]) == (
            pytest.approx(0.5 / 3),
            "max_turns_reached",
        )
        _, _, seen = await play(pool, guess, 4, [Action("99")])
        assert (seen[0].done, seen[0].info["stop_condition"]) == (True, "has_given_up")
        await play(pool, guess, 4, [Action("1")])  # left: cleaned up by the release
        assert log.read_text().splitlines() == [f"{n} guesses" for n in (3, 3, 0, 1)]

        asking = Action("I use a tool.", [ToolCall("double", {"number": 2})])
        spoilt = Action("", [ToolCall("double", {}, "The arguments are no JSON.")])
        first, tools, seen = await play(
            pool, spec_of(worlds, "tools"), 2, [spoilt, asking, Action("4")]
        )
        assert tools[0]["function"]["name"] == "double"
        assert "number" in tools[0]["function"]["parameters"]["properties"]
        assert (seen[0].text, seen[0].done) == ("The arguments are no JSON.", False)
        assert [(one["role"], one["content"]) for one in seen[1].messages] == [("tool", "4")]
        assert (seen[2].reward, seen[2].done) == (1.25, True)
        assert seen[2].info["metrics"]["double_calls"] == 1


@slow
@needs_package
def test_the_agent_loop_plays_them_with_and_without_tools(worlds):
    row = {"extra_info": {"seed": 4}}
    for kind, script, shown, score in (
        ("guess", ["3", "8"], ["What is 4 + 4?", "higher"], 1 + 0.5 / 2),
        ("tools", [call("double", '{"number": 4}'), "8"], ["What is 4 + 4?", "tool", "8"], 1.25),
    ):
        turns = [turn + END for turn in script]
        output, text = run_env_agent(*turns, env=vars(spec_of(worlds, kind)), **row)
        places = [text.index(part) for part in shown]
        assert places == sorted(places)
        assert output.reward_score == pytest.approx(score)
        assert output.extra_fields["env_info"]["metrics"]["num_turns"] == 2


@slow
@needs_package
async def test_what_cannot_be_played_is_said_and_a_broken_world_is_no_reward(worlds):
    async with pool_of() as pool:
        for spec, sentence in (
            (spec_of(worlds, "group"), "scores a group of rollouts together"),
            (spec_of(worlds, "single", size=3), "unexpected keyword argument 'size'"),
            (EnvironmentSpec(name="verifiers:no-such", python=PYTHON), "no-such"),
            (EnvironmentSpec(name="verifiers:no_such.py", python=PYTHON), "there is no file"),
        ):
            with pytest.raises(BadEnvironment, match=sentence):
                await play(pool, spec, 0, [])
        with pytest.raises(BadEnvironment, match="changed what was said before"):
            await play(pool, spec_of(worlds, "forgetful"), 1, [Action("0")])
        with pytest.raises(BadEnvironment, match="two turns at the same time"):
            await play(pool, spec_of(worlds, "hasty"), 1, [Action("0")])
        missing = {"extra_info": {"example": 5}}
        with pytest.raises(BadEnvironment, match="has 5 examples"):
            await play(pool, spec_of(worlds, "single"), 1, [], missing)
        with pytest.raises(InfraFault, match="the sandbox is gone"):
            await play(pool, spec_of(worlds, "guess"), 1, [Action("-1")])


@slow
@needs_package
async def test_rows_of_the_data_script_name_the_interpreter(worlds):
    rows = await make_rows(spec_of(worlds, "single"), [1, 2])
    assert [row["prompt"][-1] for row in rows] == [user("What is 1 + 1?"), user("What is 2 + 2?")]
    assert EnvironmentSpec.of(rows[0]["env"]) == spec_of(worlds, "single")


def test_other_versions_are_refused_with_the_supported_ones():
    for version in ("0.1.14", "0.2.1", "0.2.1.post1"):
        check_version(version)
    for version in ("0.1.9.post3", "0.3.1", "0.4.0", "unknown"):
        with pytest.raises(ValueError, match=rf"has verifiers {version}; supported are 0\.1\.14"):
            check_version(version)
