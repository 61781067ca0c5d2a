"""vLLM as a `HostedEngine`: stepped in this process, token ids in, ids and log-probabilities out.

A request for n samples becomes n requests of vLLM, each with its own seed; its prefix cache
computes their prompt once. vLLM is given no tokenizer. The few requests that end at a text are
watched here, by the rule that the built-in engine has. With several devices vLLM starts workers of
its own; `worker_extension` brings weights into each of them.

This runs in vLLM's environment: it must not import what only the trainer has.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import vllm
from torch import Tensor
from transformers import AutoTokenizer
from vllm import EngineArgs, LLMEngine
from vllm import SamplingParams as VllmSamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind

from verl.utils.images import open_image
from verl.utils.media import unexpanded
from verl.workers.rollout.adapter_names import without_adapters
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenDelta
from verl.workers.rollout.native.sequence import (
    EngineLimits,
    refuse_what_cannot_run,
    seeds_of_continuations,
    tokens_until_stop,
)
from verl.workers.rollout.process.hosted import EngineFacts, HostedEngine
from verl.workers.rollout.vllm_rollout.adapters import AdapterFolder, published_form
from verl.workers.rollout.vllm_rollout.arguments import merged_arguments
from verl.workers.rollout.vllm_rollout.compatibility import CAN_PAUSE, REFUSED_REQUEST

SMALLEST_TEMPERATURE = 0.01
LARGEST_SEED = 2**63 - 1
PART_BYTES = 64 << 20
"""Weights that travel to vLLM's workers at a time, where there are several."""

UPDATE_SECONDS = 600.0
STEPS_AHEAD = 4
"""On a GPU vLLM schedules a step or two before it has seen the tokens of the last."""

LOG_PROBS = {"processed_logprobs": "processed", "raw_logprobs": "raw"}


@dataclass
class RunningSample:
    """One sample of a request, which is a request of its own to vLLM."""

    number: int
    index: int
    stop: tuple[str, ...]
    token_ids: list[int] = field(default_factory=list)
    """The response so far, in earlier requests too; kept only where a text may end it."""

    prompt: list[int] | None = None
    """What vLLM must have made of a prompt with images; None without these."""


class VLLMEngine(HostedEngine):
    """Over vLLM's `LLMEngine`; `options` are what `vllm_options` made."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        known = [argument.name for argument in fields(EngineArgs)]
        arguments = merged_arguments(
            options["arguments"], options["engine_kwargs"], known, sees=options["sees"]
        )
        self._returns_routes = bool(arguments.get("enable_return_routed_experts"))
        self._engine = engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._end_tokens = list(options["end_tokens"])
        max_response_tokens = engine.model_config.max_model_len - options["prompt_length"]
        self._limits = EngineLimits(
            max_prompt_tokens=options["prompt_length"],
            max_response_tokens=max(1, max_response_tokens),
        )
        self._adapter = AdapterFolder(options["adapter"]) if options["adapter"] else None
        self._samples: dict[str, RunningSample] = {}
        self._has_served = False  # since the prefix cache was cleared
        self._aborted: list[tuple[int, TokenDelta]] = []
        self._is_paused = False

    def facts(self) -> EngineFacts:
        return EngineFacts(
            name="vllm",
            version=vllm.__version__,
            log_probs=LOG_PROBS[self._engine.model_config.logprobs_mode],
            can_sleep=self._engine.model_config.enable_sleep_mode,
            max_model_len=self._engine.model_config.max_model_len,
            can_pause=CAN_PAUSE and self._adapter is None,
            media="files" if self._engine.model_config.is_multimodal_model else "",
        )

    # ---- requests ----------------------------------------------------------------------------

    def submit(self, number: int, request: GenerationRequest) -> None:
        vocabulary = self._engine.model_config.get_vocab_size()
        refuse_what_cannot_run(request, self._limits, vocabulary, can_decode_text=True)
        if self._returns_routes and request.params.stop:
            raise ValueError(
                f"request {request.request_id} ends at a text ({request.params.stop[0]!r}), where "
                "vLLM is stopped before it returns expert routes: use stop_token_ids with "
                "rollout.enable_rollout_routing_replay"
            )
        lora = None if self._adapter is None else self._adapter.request()
        prompt = [int(token) for token in request.prompt_ids]
        self._has_served = True
        try:
            for index, sampling in enumerate(sampling_of_samples(request, self._end_tokens)):
                name = f"{number}.{index}"
                given = tokens_input(prompt) if not request.media else input_with_images(request)
                self._engine.add_request(name, given, sampling, lora_request=lora)
                sampled = prompt[len(prompt) - request.num_sampled :]
                sample = RunningSample(number, index, request.params.stop, sampled)
                sample.prompt = prompt if request.media else None
                self._samples[name] = sample
        except REFUSED_REQUEST as refusal:
            raise ValueError(f"request {request.request_id}: {refusal}") from refusal

    def abort(self, number: int) -> None:
        for name, sample in list(self._samples.items()):
            if sample.number == number:
                self._engine.abort_request([name])
                del self._samples[name]
                self._aborted.append((number, last_delta(sample.index, "abort")))

    def has_work(self) -> bool:
        return bool(self._samples or self._aborted)

    def step(self) -> Sequence[tuple[int, TokenDelta]]:
        deltas, self._aborted = self._aborted, []
        if self._samples:
            deltas += self._new_deltas()
        return deltas

    def _new_deltas(self) -> list[tuple[int, TokenDelta]]:
        outputs = self._engine.step()
        return [self._delta(one) for one in outputs if one.request_id in self._samples]

    def _delta(self, output: Any) -> tuple[int, TokenDelta]:
        sample, new = self._samples[output.request_id], output.outputs[0]
        if sample.prompt is not None and list(output.prompt_token_ids) != sample.prompt:
            raise RuntimeError(
                f"vLLM makes {len(output.prompt_token_ids)} tokens of a prompt with images that "
                f"has {len(sample.prompt)} in training; set rollout.engine_kwargs.vllm."
                "mm_processor_kwargs to what data.mm_processor_kwargs says"
            )
        token_ids, stop_reason = list(new.token_ids), new.finish_reason or ""
        if sample.stop:
            sample.token_ids += token_ids
            end = tokens_until_stop(
                sample.token_ids, len(token_ids), sample.stop, self._decode_text
            )
            if end is not None:
                del token_ids[len(token_ids) - (len(sample.token_ids) - end) :]
                if not stop_reason:
                    self._engine.abort_request([output.request_id])
                stop_reason = "stop"
        if stop_reason:
            del self._samples[output.request_id]
        log_probs = [new.logprobs[index][token].logprob for index, token in enumerate(token_ids)]
        delta = TokenDelta(
            sample=sample.index,
            token_ids=tuple(token_ids),
            log_probs=tuple(log_probs),
            policy_versions=(),
            stop_reason=stop_reason,
            routed_experts=new.routed_experts if self._returns_routes else None,
        )
        return sample.number, delta

    def cache_usage(self) -> float:
        return self._engine.engine_core.engine_core.scheduler.kv_cache_manager.usage

    @cached_property
    def _decode_text(self) -> Callable[[list[int]], str]:
        """Loaded for the first request that a text may end; most runs have none."""
        model = self._engine.model_config
        tokenizer = AutoTokenizer.from_pretrained(
            model.tokenizer, trust_remote_code=model.trust_remote_code
        )
        return lambda ids: str(tokenizer.decode(ids))

    # ---- weights and memory ------------------------------------------------------------------

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        assert not self._samples or self._is_paused  # else the host ends all requests before
        if self._adapter is None:
            self._load_base(weights)
        else:
            self._adapter.replace(weights, self._engine)
        if self._engine.model_config.is_multimodal_model:
            self._engine.reset_encoder_cache()  # of the scheduler too, or it would not ask again
        if not self._is_paused:
            self.forget_cache()

    def pause(self) -> Sequence[tuple[int, TokenDelta]]:
        """As `pause_generation(mode="keep")` of vLLM's server: requests stay, nothing new is
        scheduled. Steps that were scheduled ahead are brought to their end."""
        core = self._engine.engine_core.engine_core
        core.pause_scheduler(mode="keep", clear_cache=False)
        self._is_paused = True
        deltas, self._aborted = self._aborted, []
        for _ in range(STEPS_AHEAD):
            if core.batch_queue and self._samples:
                deltas += self._new_deltas()
        return deltas

    def resume(self) -> None:
        """All keys and values are computed anew: running requests are preempted for it."""
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.engine_core.engine_core.resume_scheduler()
        self._is_paused = False

    def _load_base(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self._call_workers("begin_weights")
        try:
            for part in self._parts(self._published(without_adapters(weights))):
                self._call_workers("take_weights", part)
        finally:
            # Also after a failure: layers left open would add the next update to this one.
            unloaded = self._call_workers("end_weights")
        absent = sorted({name for names in unloaded for name in names})
        if absent:
            raise ValueError(
                f"the update left {len(absent)} parameters of vLLM's model as they were, or did "
                f"not fill them: {', '.join(absent[:5])}; send every weight of the model under "
                "its Hugging Face name"
            )

    def _parts(
        self, weights: Iterator[tuple[str, Tensor]]
    ) -> Iterator[Iterable[tuple[str, Tensor]]]:
        if self._engine.vllm_config.parallel_config.world_size == 1:
            yield weights  # the worker is in this process and takes them one by one
            return
        part, num_bytes = [], 0
        for name, tensor in weights:
            part.append((name, tensor.cpu()))
            num_bytes += tensor.nbytes
            if num_bytes >= PART_BYTES:
                yield part
                part, num_bytes = [], 0
        yield part

    @cached_property
    def _published(self) -> Callable[..., Iterator[tuple[str, Tensor]]]:
        model = self._engine.model_config
        return published_form(model.model, trust_remote_code=model.trust_remote_code)

    def _call_workers(self, method: str, *arguments: Any) -> list[Any]:
        return self._engine.collective_rpc(method, timeout=UPDATE_SECONDS, args=arguments)

    def forget_cache(self) -> None:
        if not self._has_served:  # vLLM visits every block, which takes 0.1 s for a million
            return
        for _ in range(STEPS_AHEAD):
            if self._engine.reset_prefix_cache():
                self._has_served = False
                return
            self._engine.step()  # what it had scheduled ahead for requests that have ended
        raise RuntimeError(
            "vLLM holds keys and values although no request runs, and could not clear its prefix "
            "cache; what it generates next might mix old and new weights"
        )

    def sleep(self, level: int) -> None:
        self.forget_cache()
        self._engine.sleep(level=level)

    def wake_up(self) -> None:
        self._engine.wake_up()

    def close(self) -> None:
        self._engine.engine_core.shutdown()


def last_delta(sample: int, stop_reason: str) -> TokenDelta:
    return TokenDelta(
        sample=sample, token_ids=(), log_probs=(), policy_versions=(), stop_reason=stop_reason
    )


def input_with_images(request: GenerationRequest) -> Any:
    """vLLM expands placeholders itself, with the processor of its own."""
    return {
        "prompt_token_ids": unexpanded(request.prompt_ids, request.media),
        "multi_modal_data": {"image": [open_image(one.source) for one in request.media]},
    }


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
