"""Simulated users answer turns without calls, score them, and are forgotten in every exit."""

import asyncio
import threading

import pytest
import yaml

from tests.agent_loop.scripted import END, ScriptedRollout, chatml_tokenizer, run_loop, turns_config
from tests.pace import pace
from tests.workers.reward_manager.judge_server import TOKEN, judge_server
from verl.agent_loop.tool_agent import ToolAgentLoop
from verl.interactions.base import BaseInteraction
from verl.interactions.gsm8k_interaction import CORRECT, INCORRECT
from verl.interactions.llm_user import LLMUserInteraction
from verl.interactions.registry import InteractionSet, initialize_interactions_from_config
from verl.protocol.trajectory import InfraFault
from verl.utils.environment import temp_env_var


class PickyInteraction(BaseInteraction):
    """Does what the row says; keeps what happened."""

    events: list = []

    async def start_interaction(self, instance_id=None, **kwargs):
        PickyInteraction.events.append("start")
        return await super().start_interaction(instance_id)

    def generate_response(self, instance_id, messages, mood="fine", **kwargs):
        assert threading.current_thread() is not threading.main_thread(), "it may block"
        if mood == "raises":
            raise KeyError("lost my notes")
        if mood == "hangs":
            threading.Event().wait()
        if mood == "mumbles":
            return "what?"
        spoken = [m["content"] for m in messages if m["role"] == "assistant"]
        return len(spoken) == 2, f"say more than {spoken[-1]}", 0.5 * len(spoken), {"mood": mood}

    async def finalize_interaction(self, instance_id, **kwargs):
        PickyInteraction.events.append("finalize")


@pytest.fixture
def users(tmp_path):
    PickyInteraction.events = []
    file = tmp_path / "users.yaml"
    items = [
        {"class_name": f"{__name__}.PickyInteraction"},
        {
            "name": "teacher",
            "class_name": "verl.interactions.gsm8k_interaction.Gsm8kInteraction",
            "config": {},
        },
        {"class_name": "verl.interactions.weather_interaction.WeatherInteraction"},
    ]
    file.write_text(yaml.safe_dump({"interaction": items}))
    return {"interaction_config_path": str(file)}


def text_of(output):
    return chatml_tokenizer().decode(output.response_ids)


def row(name, **kwargs):
    return {"extra_info": {"interaction_kwargs": {"name": name, **kwargs}}}


def test_a_user_answers_until_content(users):
    engine = ScriptedRollout("one" + END, "two" + END, "three" + END)
    output = run_loop(turns_config(**users), engine, **row("picky"))
    said = "<|im_start|>user\nsay more than one" + END + "\n<|im_start|>assistant\n<think>\n"
    assert text_of(output) == "one" + END + "\n" + said + "two" + END
    assert output.extra_fields["turn_scores"] == [0.5, 1.0]
    assert output.extra_fields["mood"] == "fine"
    assert output.num_turns == 4
    assert PickyInteraction.events == ["start", "finalize"]


def test_the_teacher_insists(users):
    engine = ScriptedRollout("#### 4" + END, "#### 5" + END, "more" + END)
    output = run_loop(turns_config(**users), engine, **row("teacher", ground_truth="5"))
    assert INCORRECT in text_of(output)
    assert CORRECT not in text_of(output)
    assert output.extra_fields["turn_scores"] == [0.0, 1.0]
    teacher = ToolAgentLoop._worlds[-1][1].interactions.users["teacher"]
    assert teacher._instance_dict == {}


def test_the_weather_is_asked_of_a_tool(users):
    engine = ScriptedRollout(*["it rains" + END] * 3)
    output = run_loop(turns_config(max_user_turns=2, **users), engine, **row("weather"))
    assert text_of(output).count("Please use the weather tool") == 2
    assert output.extra_fields["turn_scores"] == [0.0, 0.0]


FAULTS = {
    "raises": "lost my notes",
    "hangs": "took longer than",
    "mumbles": "generate_response returns",
}


@pytest.mark.parametrize("mood", FAULTS)
def test_a_user_who_fails_is_a_broken_world(users, mood):
    config = turns_config(**users)
    world = ToolAgentLoop.world_of(config, chatml_tokenizer())
    seconds = 1.0 * pace() if mood == "hangs" else 60.0
    world.interactions.users["picky"].config["timeout"] = seconds
    with pytest.raises(InfraFault, match=FAULTS[mood]):
        run_loop(config, ScriptedRollout("one" + END), **row("picky", mood=mood))
    assert PickyInteraction.events == ["start", "finalize"]
    assert world.interactions.num_open == 0


@pytest.mark.parametrize(
    ("extra_info", "reason"),
    [({}, "interaction_kwargs.name of a row is None"), (row("nobody")["extra_info"], "'nobody'")],
)
def test_a_row_must_name_its_user(users, extra_info, reason):
    with pytest.raises(ValueError, match=reason):
        run_loop(turns_config(**users), ScriptedRollout("x"), extra_info=extra_info)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"interactions": []}, "must hold `interaction:`"),
        ({"interaction": [{"name": "x"}]}, "needs class_name"),
        ({"interaction": [{"class_name": f"{__name__}.PickyInteraction", "cfg": 1}]}, "'cfg'"),
        (
            {"interaction": [{"class_name": f"{__name__}.PickyInteraction"}] * 2},
            "Duplicate interaction",
        ),
    ],
)
def test_a_file_that_says_something_else_is_refused(tmp_path, content, reason):
    file = tmp_path / "users.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(ValueError, match=reason):
        initialize_interactions_from_config(str(file))


KEY = "TEST_USER_KEY"


@pytest.fixture(autouse=True)
def _key():
    with temp_env_var(KEY, TOKEN):
        yield


def llm_user(server, **config):
    options = {"url": server.url, "model": "user", "first_pause_seconds": 0.01, "max_attempts": 2}
    options["api_key_env"] = KEY
    return LLMUserInteraction({"name": "customer", **options, **config})


def answer(user, messages, **kwargs):
    async def ask():
        lease = await InteractionSet({"customer": user}).start({"name": "customer", **kwargs})
        try:
            return await lease.reply(messages)
        finally:
            await lease.finalize()

    return asyncio.run(ask())


TALK = [
    {"role": "user", "content": "My cat is stuck."},
    {"role": "tool", "content": "secret"},
    {"role": "assistant", "content": "Where?"},
]


def test_a_model_plays_the_user():
    with judge_server(lambda request: "On the roof.") as server:
        user = llm_user(server, sampling={"temperature": 0.5})
        reply = answer(user, TALK, persona="You own a cat.")
    (request,) = server.requests
    assert "You own a cat." in request["messages"][0]["content"]
    assert [(m["role"], m["content"]) for m in request["messages"][1:]] == [
        ("assistant", "My cat is stuck."),
        ("user", "Where?"),
    ]
    assert request["temperature"] == 0.5
    assert (reply.should_terminate, reply.text, reply.score) == (False, "On the roof.", None)
    assert user._personas == {}


def test_a_model_that_plays_the_user_may_end_the_conversation():
    with judge_server(lambda request: "Thanks! [END]") as server:
        reply = answer(llm_user(server, persona="You own a cat."), TALK)
    assert (reply.should_terminate, reply.text) == (True, "Thanks!")


def test_a_service_that_is_gone_is_a_broken_world():
    with judge_server(lambda request: (500, "no")) as server:
        with pytest.raises(InfraFault, match="gave no answer in 2 attempts"):
            answer(llm_user(server, persona="x"), TALK)
        with pytest.raises(ValueError, match="needs a persona"):
            answer(llm_user(server), TALK)
        with pytest.raises(ValueError, match="'temprature'"):
            llm_user(server, temprature=1)
