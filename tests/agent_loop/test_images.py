"""Images in conversations: in prompts, in replies of tools and environments, and in user loops."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import yaml

from tests.agent_loop.scripted import ScriptedRollout, call, make_loop, turns_config
from tests.tiny_vision import ID, picture, tiny_processor
from verl.agent_loop.base import AgentLoopBase, AgentLoopOutput, LoopSample
from verl.agent_loop.env_agent import with_images
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.protocol.trajectory import InfraFault, Trajectory
from verl.tools.base_tool import BaseTool
from verl.tools.outcomes import ToolOutcome
from verl.tools.schemas import ToolResponse
from verl.utils.images import as_png

PAD, END = ID["<|image_pad|>"], "<|im_end|>"


class Camera(BaseTool):
    """Replies with a picture, with something that is none, or with a strip of pixels."""

    async def execute(self, instance_id, parameters, **kwargs):
        number = int(parameters["n"])
        image = picture(number) if number > 0 else [b"no picture", picture(1, 2000, 2)][-number]
        return ToolResponse(text="Here.", image=[image]), 0.0, {}


@pytest.fixture
def tools(tmp_path):
    schema = {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look.",
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "description": "where"}},
                "required": ["n"],
            },
        },
    }
    entry = {
        "class_name": f"{__name__}.Camera",
        "config": {"type": "native"},
        "tool_schema": schema,
    }
    file = tmp_path / "tools.yaml"
    file.write_text(yaml.safe_dump({"tools": [entry]}))
    return {"tool_config_path": str(file)}


def run(tmp_path, tools, *script, prompt, config=None, **kwargs):
    processor = tiny_processor(tmp_path / "model")
    engine = ScriptedRollout(*script, tokenizer=processor.tokenizer)

    async def go():
        chosen = config or turns_config(**tools)
        loop = make_loop(chosen, engine, processor=processor, **kwargs)
        return await loop.run({"temperature": 1.0, "seed": 7}, raw_prompt=prompt)

    return asyncio.run(go()), engine


def shown(*pictures, text="Look."):
    images = [{"type": "image", "image": one} for one in pictures]
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def test_a_tool_may_reply_with_an_image(tmp_path, tools):
    turns = (call("look", '{"n": 2}') + END, "It is a square." + END)
    output, engine = run(tmp_path, tools, *turns, prompt=shown(picture(1)))
    ids = output.prompt_ids + output.response_ids
    assert [len(one.places) for one in output.media] == [6, 6]
    for one in output.media:
        assert all(ids[place] == PAD for place in one.places)
    second = output.media[1].places - len(output.prompt_ids)
    assert not np.array(output.response_mask)[second].any()
    assert output.media[1].content_hash != output.media[0].content_hash
    assert [len(request.media) for request in engine.requests] == [1, 2]
    assert engine.requests[1].media[0] is output.media[0]  # nothing is expanded twice
    assert ids[: len(engine.requests[1].prompt_ids)] == list(engine.requests[1].prompt_ids)


def test_a_broken_image_of_a_tool_is_a_broken_world(tmp_path, tools):
    with pytest.raises(InfraFault, match=r"look.*cannot be read"):
        run(tmp_path, tools, call("look", '{"n": 0}') + END, "No." + END, prompt=shown())


def test_an_image_of_a_tool_that_the_processor_refuses_is_a_broken_world(tmp_path, tools):
    with pytest.raises(InfraFault, match=r"refuses an image of \(2000, 2\)"):
        run(tmp_path, tools, call("look", '{"n": -1}') + END, "No." + END, prompt=shown())


def test_an_image_that_has_gone_since_the_data_was_opened_is_a_broken_world(tmp_path, tools):
    with pytest.raises(InfraFault, match="No such file"):
        run(tmp_path, tools, "No." + END, prompt=shown(str(tmp_path / "gone.png")))


def test_images_beyond_the_limit_end_the_conversation(tmp_path, tools):
    config = turns_config(**tools)
    section = config.actor_rollout_ref
    rollout = replace(section.rollout, limit_images=1)
    config = replace(config, actor_rollout_ref=replace(section, rollout=rollout))
    turns = (call("look", '{"n": 2}') + END, "It is a square." + END)
    output, engine = run(tmp_path, tools, *turns, prompt=shown(picture(1)), config=config)
    assert len(engine.requests) == 1
    assert len(output.media) == 1


def test_what_a_tool_showed_comes_back_from_the_journal_as_it_was():
    outcome = ToolOutcome(
        kind="reply", tool="look", response=ToolResponse(text="a", image=[picture(3)])
    )
    again = ToolOutcome.from_dict(outcome.as_dict())
    assert again.response.text == "a"
    assert again.response.image[0].tobytes() == picture(3).tobytes()


def test_an_environment_shows_its_images_before_its_words():
    message = with_images({"role": "user", "content": "go"}, [as_png(picture(1))])
    assert [part["type"] for part in message["content"]] == ["image", "text"]
    assert with_images({"role": "user", "content": "go"}, []) == {"role": "user", "content": "go"}


class OwnLoop(AgentLoopBase):
    """Keeps ids and images apart, as loops written for other frameworks do."""

    async def run(self, sampling_params, **kwargs):
        images = (await self.process_vision_info(kwargs["raw_prompt"]))["images"]
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"], images=images)
        self.server_manager.find_media = self.media.find
        output = await self.server_manager.generate(
            "a", prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=images
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=output.token_ids,
            response_mask=[1] * len(output.token_ids),
            multi_modal_data={"images": images},
        )


def test_loops_that_keep_ids_and_images_apart_get_them_joined(tmp_path):
    processor = tiny_processor(tmp_path / "model")
    engine = ScriptedRollout("yes" + END, tokenizer=processor.tokenizer)
    ended = []

    async def go():
        loop = make_loop(turns_config(), engine, processor=processor, cls=OwnLoop)
        row = {"raw_prompt": shown(picture(1), picture(2))}
        sample = LoopSample({"seed": 1}, row, lambda output, turns: ended.append(output))
        await sample.run_in(loop)

    asyncio.run(go())
    assert len(engine.requests[0].media) == len(ended[0].media) == 2
    assert all(ended[0].prompt_ids[place] == PAD for place in ended[0].media[1].places)


def test_samples_of_a_prompt_share_its_images(tmp_path):
    processor = tiny_processor(tmp_path / "model")
    engine = ScriptedRollout("yes" + END, tokenizer=processor.tokenizer)
    outputs = []

    async def go():
        def make():
            return make_loop(turns_config(), engine, processor=processor, cls=SingleTurnAgentLoop)

        samples = [
            LoopSample(
                {"seed": n},
                {"raw_prompt": shown(picture(1))},
                lambda output, turns: outputs.append(output),
            )
            for n in range(3)
        ]
        await SingleTurnAgentLoop.run_group(make, samples)

    asyncio.run(go())
    assert len(engine.requests) == 1
    assert len({id(output.media[0]) for output in outputs}) == 1
    assert Trajectory(uid="a", sample=0, row={}).media == ()
