"""An engine that says what it is told, turn by turn, and a loop with tools over it."""

import asyncio

from tests.agent_loop.fakes import FakeRollout
from tests.templates import TEMPLATES, template_tokenizer
from verl.agent_loop import AsyncLLMServerManager, DictConfigWrap
from verl.agent_loop.tool_agent import ToolAgentLoop
from verl.config.data import DataConfig
from verl.config.ppo import ActorRolloutRefConfig, PPOConfig
from verl.config.rollout import MultiTurnConfig, RolloutConfig
from verl.workers.rollout.base import TokenOutput

END = "<|im_end|>"


def call(name="guess", arguments='{"n": 3}'):
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def chatml_tokenizer():
    return template_tokenizer("drops_thinking", TEMPLATES["drops_thinking"])


class ScriptedRollout(FakeRollout):
    """Says the texts of a script, one per turn of a session; a turn is cut at the token limit."""

    def __init__(self, *script, tokenizer=None, **kwargs):
        super().__init__(**kwargs)
        self.script = script
        self.tokenizer = tokenizer or chatml_tokenizer()
        self.num_turns = {}

    async def generate(self, request):
        await super().generate(request)
        return [self._turn(request, session) for session in request.session_ids or ("",)]

    def _turn(self, request, session):
        number = self.num_turns.get(session, 0)
        self.num_turns[session] = number + 1
        ids = self.tokenizer.encode(self.script[number], add_special_tokens=False)
        kept = ids[: request.params.max_tokens]
        return TokenOutput(
            token_ids=kept,
            log_probs=[-0.5 - number] * len(kept),
            policy_versions=[0] * len(kept),
            stop_reason="stop" if kept == ids else "length",
        )


def turns_config(response_length=400, **multi_turn):
    return PPOConfig(
        data=DataConfig(max_prompt_length=512, max_response_length=response_length),
        actor_rollout_ref=ActorRolloutRefConfig(
            rollout=RolloutConfig(
                prompt_length=512,
                response_length=response_length,
                max_num_seqs=8,
                multi_turn=MultiTurnConfig(enable=True, **multi_turn),
            )
        ),
    )


def make_loop(config, engine, tokenizer=None, cls=ToolAgentLoop, **kwargs):
    return cls(
        trainer_config=DictConfigWrap(config),
        server_manager=AsyncLLMServerManager(config, [engine]),
        tokenizer=tokenizer or engine.tokenizer,
        **kwargs,
    )


def run_loop(config, engine, prompt="Guess!", *, cls=ToolAgentLoop, **row):
    async def run():
        loop = make_loop(config, engine, cls=cls)
        prompts = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        return await loop.run({"temperature": 1.0, "seed": 7}, raw_prompt=prompts, **row)

    return asyncio.run(run())
