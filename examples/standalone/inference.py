"""Generation: the built-in rollout engine over the very weights that are being trained."""

import itertools

from env import END, NUM_ANSWERS

from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenOutput
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine


class Sampler:
    def __init__(self, engine: OneDeviceEngine, max_num_seqs: int = 512) -> None:
        limits = EngineLimits(
            max_num_seqs=max_num_seqs, max_prompt_tokens=8, max_response_tokens=NUM_ANSWERS
        )
        self.rollout = NativeEngine(
            engine.module, limits, eos_token_ids=[END], version=lambda: engine.policy_version
        )
        self.numbers = itertools.count()

    def generate(
        self, prompts: list[list[int]], *, num_samples: int = 1, temperature: float = 1.0
    ) -> list[list[TokenOutput]]:
        """Several answers to each prompt; the prompt itself is computed once."""
        requests = []
        for prompt in prompts:
            number = next(self.numbers)
            params = SamplingParams(temperature=temperature, max_tokens=NUM_ANSWERS, seed=number)
            requests.append(
                GenerationRequest(
                    request_id=str(number),
                    prompt_ids=prompt,
                    params=params,
                    num_samples=num_samples,
                )
            )
        return self.rollout.generate_batch(requests)
