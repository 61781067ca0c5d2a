"""Our options and requests in SGLang's words: its command line, and the body of `/generate`.

`engine_kwargs.sglang` may set any argument of the server, under the name of its flag with
underscores, except those on which the protocol rests. Whether a name exists only the installed
SGLang knows: its parser refuses some, and its own list of arguments, asked after the start, shows
the rest (a parser takes `--mem-frac` for `--mem-fraction-static`, and a switch that is on by
default stays on when it is left out).

A request for n samples is one call with the prompt n times: each sample has its own seed and its
own name, under which it can be aborted. SGLang takes a name for the beginning of longer ones, so
every name ends with a mark that occurs nowhere else in it.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from random import Random
from typing import Any

from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.sequence import seeds_of_continuations

RESERVED = {
    "model_path": "actor_rollout_ref.model.path",
    "tp_size": "rollout.tensor_model_parallel_size",
    "tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "pp_size": "rollout.pipeline_model_parallel_size",
    "pipeline_parallel_size": "rollout.pipeline_model_parallel_size",
    "context_length": "rollout.max_model_len",
    "enable_lora": "actor_rollout_ref.model.lora_rank",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
}
"""Arguments that follow options of ours, and which."""

FIXED = {
    "skip_tokenizer_init": True,
    "incremental_streaming_output": True,
    "host": "127.0.0.1",
    "weight_version": "0",
}
"""Arguments that are as they must be: token ids in, only new ones out, for this machine alone."""

PRIVATE = ("port", "api_key", "config")
"""Arguments that are chosen anew at every start."""

_UNRECOGNIZED = re.compile(r"unrecognized arguments: (.*)")


def server_arguments(derived: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """`own`, the user's, win over `derived`."""
    for name in own:
        if name in FIXED or name in PRIVATE:
            always = f"it is always {FIXED[name]!r}" if name in FIXED else "it is chosen"
            raise ValueError(
                f"rollout.engine_kwargs.sglang.{name} cannot be set: {always} here; remove it"
            )
        if name in RESERVED:
            raise ValueError(
                f"rollout.engine_kwargs.sglang.{name} cannot be set: it follows {RESERVED[name]}; "
                "set that"
            )
    return {**derived, **own, **FIXED}


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    return [word for name, value in arguments.items() for word in words(name, value)]


def words(name: str, value: Any) -> Iterator[str]:
    if value is False or value is None:
        return
    yield "--" + name.replace("_", "-")
    if isinstance(value, Mapping):
        yield json.dumps(value)
    elif isinstance(value, list | tuple):
        yield from map(str, value)
    elif value is not True:
        yield str(value)


def refuse_what_the_server_did_not_take(
    own: Mapping[str, Any], in_effect: Mapping[str, Any]
) -> None:
    """`in_effect` are the arguments that the running server says it has."""
    for name, value in own.items():
        if name not in in_effect:
            raise ValueError(unknown(name, list(in_effect)))
        if value is False and in_effect[name] is True:
            raise ValueError(
                f"rollout.engine_kwargs.sglang.{name} is false, but this SGLang has it on and its "
                "command line cannot switch it off; remove it"
            )


def unknown_arguments(output: str) -> str | None:
    """What the server's parser refused, in terms of our options; None if it did not."""
    refused = _UNRECOGNIZED.search(output)
    if refused is None:
        return None
    names = [word[2:] for word in refused[1].split() if word.startswith("--")]
    return "; ".join(unknown(name.replace("-", "_"), []) for name in names)


def unknown(name: str, known: list[str]) -> str:
    close = get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"rollout.engine_kwargs.sglang.{name} is no argument of this SGLang's server{hint}"


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
        own_seeds = seeds_of_continuations(request, request.params.seed or 0)
        seeds = [seed & LARGEST_SEED for seed in own_seeds]
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
