"""A request of ours as one call of SGLang's `/generate`.

A request for n samples is one call with the prompt n times: each sample has its own seed and its
own name, under which it can be aborted. SGLang takes a name for the beginning of longer ones, so
every name ends with a mark that occurs nowhere else in it.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.sequence import seeds_of_samples

LARGEST_SEED = 2**63 - 1
LARGEST_PENALTY = 2.0


def generate_body(
    number: int,
    request: GenerationRequest,
    *,
    max_tokens: int,
    end_tokens: Sequence[int],
    fresh_seeds: Random,
    adapter: str | None,
) -> dict[str, Any]:
    """`fresh_seeds` serves requests without seeds: SGLang would give all samples the same one."""
    if request.seeds is None and request.params.seed is None:
        seeds = [fresh_seeds.getrandbits(63) for _ in range(request.num_samples)]
    else:
        seeds = [s & LARGEST_SEED for s in seeds_of_samples(request, request.params.seed or 0)]
    prompt = [int(token) for token in request.prompt_ids]
    body: dict[str, Any] = {
        "rid": [sample_name(number, sample) for sample in range(request.num_samples)],
        "input_ids": [prompt] * request.num_samples,
        "sampling_params": [
            sampling_params(request.params, seed, max_tokens, end_tokens) for seed in seeds
        ],
        "return_logprob": True,
        "stream": True,
    }
    if adapter is not None:
        body["lora_path"] = [adapter] * request.num_samples
    return body


def sampling_params(
    params: SamplingParams, seed: int, max_tokens: int, end_tokens: Sequence[int]
) -> dict[str, Any]:
    if params.repetition_penalty > LARGEST_PENALTY:
        raise ValueError(
            f"repetition_penalty is {params.repetition_penalty}; SGLang takes {LARGEST_PENALTY} "
            "at most"
        )
    return {
        "temperature": params.temperature,
        "top_k": params.top_k or -1,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repetition_penalty": params.repetition_penalty,
        "max_new_tokens": max_tokens,
        "stop_token_ids": sorted({*params.stop_token_ids, *end_tokens}),
        "ignore_eos": params.ignore_eos,
        "sampling_seed": seed,
    }


def sample_name(number: int, sample: int) -> str:
    return f"{number}-{sample}."
