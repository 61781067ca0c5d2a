"""Our sampling parameters in vLLM's words, one set for each sample of a request."""

from collections.abc import Sequence

from vllm import SamplingParams as VllmSamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.sequence import seeds_of_continuations

SMALLEST_TEMPERATURE = 0.01
LARGEST_SEED = 2**63 - 1


def sampling_of_samples(
    request: GenerationRequest, end_tokens: Sequence[int]
) -> list[VllmSamplingParams]:
    """They differ in their seeds; a request without a seed leaves it to vLLM."""
    params = request.params
    seeds: list[int | None] = [None] * request.num_samples
    if request.seeds is not None or params.seed is not None:
        seeds = [seed & LARGEST_SEED for seed in seeds_of_continuations(request, params.seed or 0)]
    return [vllm_sampling(params, seed, end_tokens) for seed in seeds]


def vllm_sampling(
    params: SamplingParams, seed: int | None, end_tokens: Sequence[int]
) -> VllmSamplingParams:
    if 0 < params.temperature < SMALLEST_TEMPERATURE:
        raise ValueError(
            f"temperature is {params.temperature}; vLLM would silently use {SMALLEST_TEMPERATURE} "
            "instead: take that, or 0 for the likeliest token"
        )
    ends = params.stop_token_ids if params.ignore_eos else (*params.stop_token_ids, *end_tokens)
    return VllmSamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        max_tokens=params.max_tokens,
        stop_token_ids=list(ends),
        ignore_eos=params.ignore_eos,
        seed=seed,
        logprobs=0,  # the drawn token's alone
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
