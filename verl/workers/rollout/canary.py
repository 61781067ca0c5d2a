"""After every update: does the engine generate with the weights that were sent?

A fingerprint proves that the bytes arrived. The canary proves that they are in use: the engine
continues a fixed prompt, and the log-probabilities it reports are compared with those of the
trainer. A tensor that was copied but not taken over, keys and values of older weights in a prefix
cache, or another version of the weights show as a difference far beyond rounding.
"""

from collections.abc import Sequence

import torch

from verl.utils.scramble import uniform
from verl.workers.rollout.base import GenerationRequest, Rollout, SamplingParams, TokenOutput
from verl.workers.rollout.trained import Answer, TrainedPolicy

PROMPT_TOKENS = 144
"""More than a block of any engine's cache (128 at most), so that a cached prefix can be used."""

NUM_TOKENS = 8
"""That it is continued with."""

TOLERANCES = {
    "float32": 0.05,
    "float16": 0.05,
    "bfloat16": 0.25,
    "fp8": 1.0,
    "torchao": 1.0,
}
"""Largest difference of a log-probability that can be rounding, by number format.

In fp32 engines agree to about 1e-4; 0.05 leaves room for other kernels. bf16 has 8 significant
bits: a logit between 16 and 32 is off by up to 1/16 when it is rounded, on both sides, and once
more by what was rounded before it: 4/16. fp16 has 11 bits, an eighth of that. With weights in 8
bits or fewer only a wrong model can be told from a right one. A stale tensor is far beyond all of
these: it gives other tokens."""

SPELLINGS = {
    "fp32": "float32",
    "float": "float32",
    "32": "float32",
    "fp16": "float16",
    "half": "float16",
    "16": "float16",
    "bf16": "bfloat16",
}

METRIC = "rollout/canary_max_diff"


class StaleEngineError(RuntimeError):
    """An engine does not generate with the weights it was sent."""


def default_tolerance(*formats: str | None) -> float:
    """For a comparison in which these number formats take part; None stands for none."""
    names = [SPELLINGS.get(name, name) for name in formats if name is not None]
    unknown = [name for name in names if name not in TOLERANCES]
    if unknown:
        raise ValueError(
            f"no tolerance is known for the number format {unknown[0]!r} "
            f"(known: {', '.join(TOLERANCES)}); set actor_rollout_ref.rollout.canary_tolerance"
        )
    return max((TOLERANCES[name] for name in names), default=TOLERANCES["float32"])


class Canary:
    """Compares an engine, whose sequences have `max_model_len` tokens at most, with the trainer."""

    def __init__(self, *, vocabulary: int, max_model_len: int, tolerance: float) -> None:
        self.num_tokens, num_prompt_tokens = canary_lengths(max_model_len, NUM_TOKENS)
        self.prompt_ids = canary_prompt(vocabulary, num_prompt_tokens)
        self.tolerance = tolerance

    def check(self, rollout: Rollout | None, trained: TrainedPolicy) -> dict[str, float]:
        """The metric `rollout/canary_max_diff`; StaleEngineError when it says that the engine is
        stale. A rank without an engine, which only helps to score, has no metric."""
        request = canary_request(self.prompt_ids, max_tokens=self.num_tokens)
        (answer,) = continue_prompts(rollout, [request])
        (expected,) = trained.log_probs([answer], temperature=1.0)
        if rollout is None:
            return {}
        difference = largest_difference(answer, expected)
        versions = sorted(set(answer.output.policy_versions))
        if versions != [trained.version] or not difference <= self.tolerance:
            raise StaleEngineError(
                f"the engine says it generated with version {versions} of the weights, the trainer "
                f"has version {trained.version}; on {len(expected)} canary tokens their "
                f"log-probabilities differ by up to {difference:.3g}, rounding explains "
                f"{self.tolerance}. The engine does not use what it was sent, so nothing it "
                "generates can be trained on: restart it. If it is known to round more than that, "
                "raise actor_rollout_ref.rollout.canary_tolerance"
            )
        return {METRIC: difference}


def canary_lengths(max_model_len: int, num_tokens: int) -> tuple[int, int]:
    """Tokens of the response, `num_tokens` if they fit, and of the prompt."""
    num_tokens = max(1, min(num_tokens, max_model_len // 2))
    return num_tokens, max(1, min(PROMPT_TOKENS, max_model_len - num_tokens))


def canary_prompt(vocabulary: int, num_tokens: int, number: int = 0) -> list[int]:
    """Token ids that look random; another prompt for each number.

    From the middle half of the vocabulary: special tokens are at its ends, and some of them (a
    place for an image) may not stand alone.
    """
    draws = uniform(torch.full((num_tokens,), number), torch.arange(num_tokens))
    first, size = vocabulary // 4, max(1, vocabulary // 2)
    return [first + int(draw * size) for draw in draws.tolist()]


def canary_request(
    prompt_ids: Sequence[int], request_id: str = "canary", **options: float
) -> GenerationRequest:
    """The likeliest continuation, unless `options` of `SamplingParams` say otherwise."""
    chosen = {"temperature": 0.0, "ignore_eos": True, **options}
    params = SamplingParams(**chosen)  # pyright: ignore[reportArgumentType]
    return GenerationRequest(request_id=request_id, prompt_ids=list(prompt_ids), params=params)


def continue_prompts(
    rollout: Rollout | None, requests: Sequence[GenerationRequest]
) -> list[Answer]:
    """One answer to each; without an engine something of the right shape that can be scored."""
    if rollout is None:
        return [Answer(r.prompt_ids, _any_output(r)) for r in requests]
    outputs = rollout.generate_batch(requests)
    return [Answer(r.prompt_ids, output) for r, (output,) in zip(requests, outputs, strict=True)]


def largest_difference(answer: Answer, expected: torch.Tensor) -> float:
    """Between what the engine reported and `expected`; infinite if either is not finite."""
    difference = (torch.tensor(answer.output.log_probs) - expected).abs()
    return float(difference.nan_to_num(nan=torch.inf).max())


def _any_output(request: GenerationRequest) -> TokenOutput:
    num_tokens = request.params.max_tokens
    return TokenOutput(token_ids=[int(request.prompt_ids[0])] * num_tokens)
