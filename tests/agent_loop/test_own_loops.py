"""Loops that users wrote by hand, and conversations on the real engine."""

import asyncio
import json
import time
import uuid

import pytest
import yaml

from tests.agent_loop.scripted import (
    END,
    ScriptedRollout,
    call,
    chatml_tokenizer,
    make_loop,
    run_loop,
    turns_config,
)
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer
from verl.agent_loop import AgentLoopBase, AgentLoopManager, AgentLoopOutput
from verl.agent_loop.base import LoopSample
from verl.agent_loop.conversation import Conversation
from verl.agent_loop.single_turn import SingleTurnAgentLoop
from verl.agent_loop.tool_agent import ToolAgentLoop
from verl.protocol import DataProto
from verl.tools.base_tool import BaseTool
from verl.tools.parsers import FunctionCall, ToolParser
from verl.tools.schemas import ToolResponse
from verl.utils.dataset.tables import DataError
from verl.workers.rollout.native.engine import NativeEngine
from verl.workers.rollout.native.sequence import EngineLimits


class ReActLoop(AgentLoopBase):
    """As recipes write it: prompt ids that grow, one request id, tools called by hand."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.rollout_config.response_length
        self.tool_parser = ToolParser.get_tool_parser("hermes", self.tokenizer)

    async def run(self, sampling_params, **kwargs):
        messages = list(kwargs["raw_prompt"])
        assert await self.process_vision_info(messages) == {}
        prompt_ids = await self.apply_chat_template(messages)
        num_prompt, mask, log_probs, request_id = len(prompt_ids), [], [], uuid.uuid4().hex
        for _ in range(5):
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
            prompt_ids = prompt_ids + output.token_ids
            mask += [1] * len(output.token_ids)
            log_probs += output.log_probs
            _, calls = await self.tool_parser.extract_tool_calls(output.token_ids)
            if not calls:
                break
            replies = [
                {"role": "tool", "content": str(json.loads(one.arguments)["n"] + 1)}
                for one in calls
            ]
            ids = await self.apply_chat_template(replies, remove_system_prompt=True)
            prompt_ids, mask, log_probs = (
                prompt_ids + ids, mask + [0] * len(ids), log_probs + [0.0] * len(ids),
            )  # fmt: skip
        return AgentLoopOutput(
            prompt_ids=prompt_ids[:num_prompt],
            response_ids=prompt_ids[num_prompt:],
            response_mask=mask,
            response_logprobs=log_probs,
            num_turns=4,
        )


class TalkingLoop(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        return "four"


def test_a_loop_that_returns_no_output_is_named_with_the_rule():
    config, engine = turns_config(), ScriptedRollout(END)
    sample = LoopSample(row={}, params={}, end=lambda *_: None)
    rule = r"TalkingLoop\.run returned str: four; it must return an AgentLoopOutput"

    async def run():
        await sample.run_in(make_loop(config, engine, cls=TalkingLoop))

    with pytest.raises(TypeError, match=rule):
        asyncio.run(run())


@pytest.mark.parametrize("cls", [SingleTurnAgentLoop, ToolAgentLoop])
def test_a_row_without_raw_prompt_is_told_what_a_dataset_must_give(cls):
    async def run():
        await make_loop(turns_config(), ScriptedRollout(END), cls=cls).run({}, prompt="2+2=")

    with pytest.raises(DataError, match=r"no raw_prompt.*columns are \['prompt'\].*subclass it"):
        asyncio.run(run())


@pytest.mark.parametrize("name", ["dataset_config", "data_config"])
def test_a_loop_that_calls_tools_by_hand_runs(name):
    engine = ScriptedRollout(call() + END, "four" + END)
    config = turns_config()

    async def run():
        loop = make_loop(
            config, engine, cls=ReActLoop, hf_model_type="qwen2", **{name: config.data}
        )
        assert loop.data_config is config.data
        assert loop.system_prompt == []
        assert loop.mm_processor_kwargs == {}
        return await loop.run({}, raw_prompt=[{"role": "user", "content": "Add!"}])

    output = asyncio.run(run())
    text = chatml_tokenizer().decode(output.prompt_ids + output.response_ids)
    assert text == (
        "<|im_start|>user\nAdd!" + END + "\n<|im_start|>assistant\n<think>\n" + call() + END
        + "\n<|im_start|>tool\n4" + END + "\n<|im_start|>assistant\n<think>\nfour" + END
    )  # fmt: skip
    assert len({request.session_ids for request in engine.requests}) == 1


def test_a_turn_that_was_cut_is_ended_for_the_model():
    engine = ScriptedRollout("a long story" + END, "short" + END)

    class Cut(AgentLoopBase):
        async def run(self, sampling_params, **kwargs):
            ids = await self.apply_chat_template(kwargs["raw_prompt"])
            with Conversation(self, ids, sampling_params) as talk:
                await talk.generate(max_tokens=3)
                assert talk.append_messages([{"role": "user", "content": "Shorter!"}])
                await talk.generate()
                return talk.output(reward_score=1.0)

    output = run_loop(turns_config(), engine, cls=Cut)
    tokenizer = chatml_tokenizer()
    said = tokenizer.encode("a long story", add_special_tokens=False)[:3]
    assert output.response_ids[:3] == said
    rest = tokenizer.decode(output.response_ids[3:])
    assert rest.startswith(END + "\n<|im_start|>user\nShorter!" + END)
    assert output.response_mask[:4] == [1, 1, 1, 0]
    assert engine.closed_sessions
    assert (output.num_turns, output.reward_score, output.stop_reason) == (4, 1.0, "stop")


@ToolParser.register("every_turn_for_tests")
class EveryTurn(ToolParser):
    """Whatever a tiny random model says is a call; many of its tokens end a turn."""

    stop_token_ids = tuple(range(3, 20))

    async def extract_tool_calls(self, responses_ids, tools=None):
        return "", [FunctionCall(name="echo", arguments=json.dumps({"n": responses_ids[0]}))]


class EchoTool(BaseTool):
    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="ok:" + "x" * (parameters["n"] % 7)), 1.0, {}


def test_turns_on_the_real_engine_compute_new_tokens_only(tmp_path):
    file = tmp_path / "tools.yaml"
    schema = {"type": "function", "function": {"name": "echo", "description": "d"}}
    item = {"class_name": f"{__name__}.EchoTool", "config": {}, "tool_schema": schema}
    file.write_text(yaml.safe_dump({"tools": [item]}))
    config = turns_config(
        response_length=120,
        tool_config_path=str(file),
        format="every_turn_for_tests",
        max_assistant_turns=6,
    )
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    engine = NativeEngine(
        tiny_model("llama"),
        EngineLimits(max_num_seqs=8, max_prompt_tokens=24, max_response_tokens=120),
        eos_token_ids=[2],
    )
    manager = AgentLoopManager(config, rollouts=[engine], tokenizer=tokenizer)
    prompts = [[{"role": "user", "content": text}] for text in ("abc", "defgh", "ij")]
    batch = DataProto.from_dict(non_tensors={"raw_prompt": prompts, "uid": ["a", "b", "c"]})
    made = manager.generate_sequences(batch)
    turns = made.non_tensor_batch["__num_turns__"]
    assert max(turns) > 4, "several turns were taken"
    mask, ids = made.batch["response_mask"].bool(), made.batch["responses"]
    width = ids.shape[1]
    attended = made.batch["attention_mask"]
    num_new = int(attended[:, :-width].sum() + (attended[:, -width:].bool() & ~mask).sum())
    num_new += sum(int(number) // 2 - 1 for number in turns)  # the token that ended a turn
    assert engine.core.num_prefilled_tokens <= 1.02 * num_new
    assert engine.core.num_prefilled_tokens >= 0.9 * num_new, "or the count means something else"
    while len(engine.core.sessions):  # the engine's thread closes them when it comes to it
        time.sleep(0.001)
    for row in range(3):
        said = ids[row][mask[row]]
        assert (made.batch["rollout_log_probs"][row][mask[row]] < 0).all()
        assert len(said) > 0
    engine.close()
