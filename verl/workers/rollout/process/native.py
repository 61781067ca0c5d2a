"""The built-in engine in a process of its own, with a copy of the policy loaded from a folder.

Needs nothing but our own environment. It gives the tokens that the same engine gives in the
trainer's process: sampling depends on seeds and weights alone.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from verl import __version__
from verl.models.exact import make_exact
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.models.vision import has_vision
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.base import GenerationRequest, TokenDelta
from verl.workers.rollout.native.cache import beside_weights
from verl.workers.rollout.native.core import EngineCore
from verl.workers.rollout.native.sequence import (
    EngineLimits,
    NewTokens,
    RunningRequest,
    end_tokens,
)
from verl.workers.rollout.process.hosted import EngineFacts, HostedEngine

BUILD = "verl.workers.rollout.process.native:build"


def native_options(
    model_path: str,
    limits: EngineLimits,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    tokenizer_path: str | None = None,
    trust_remote_code: bool = False,
    override_config: Mapping[str, Any] | None = None,
    exact: bool = False,
    keeps_cache: bool = False,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    records_routes: bool = False,
) -> dict[str, Any]:
    """Options of `build` as plain values; requests without a seed are seeded from `seed` on. With
    `exact` a token gets the same bits however it is computed."""
    return {
        "model_path": model_path,
        "limits": asdict(limits),
        "device": device,
        "dtype": dtype,
        "seed": seed,
        "tokenizer_path": tokenizer_path or model_path,
        "trust_remote_code": trust_remote_code,
        "override_config": dict(override_config or {}),
        "exact": exact,
        "keeps_cache": keeps_cache,
        "quantization": quantization,
        "kv_cache_dtype": kv_cache_dtype,
        "records_routes": records_routes,
    }


def build(options: Mapping[str, Any]) -> "HostedNativeEngine":
    """Build the engine; runs in the engine's process."""
    trusts = options["trust_remote_code"]
    module = load_causal_lm(
        options["model_path"],
        dtype=PrecisionType.to_dtype(options["dtype"]),
        device=options["device"],
        override_config=options["override_config"],
        trust_remote_code=trusts,
    )
    limits = EngineLimits(**options["limits"])
    if options["exact"]:
        make_exact(module, limits.max_prompt_tokens + limits.max_response_tokens)
    fuse_model(module)  # on a GPU; elsewhere it changes nothing
    tokenizer = hf_tokenizer(options["tokenizer_path"], trust_remote_code=trusts)
    engine = EngineCore(
        module.requires_grad_(False).eval(),
        beside_weights(limits, module),
        eos_token_ids=end_tokens(module, tokenizer),
        decode_text=lambda ids: str(tokenizer.decode(ids)),
        seed=options["seed"],
        keeps_cache=options["keeps_cache"],
        quantization=options["quantization"],
        kv_cache_dtype=options["kv_cache_dtype"],
        records_routes=options["records_routes"],
    )
    return HostedNativeEngine(engine)


class HostedNativeEngine(HostedEngine):
    """Tells after each step what the engine's samples have got."""

    def __init__(self, engine: EngineCore) -> None:
        self.engine = engine
        self._running: dict[int, tuple[RunningRequest, NewTokens]] = {}

    def facts(self) -> EngineFacts:
        limits = self.engine.limits
        return EngineFacts(
            name="native",
            version=__version__,
            log_probs="processed",
            can_sleep=True,
            max_model_len=limits.max_prompt_tokens + limits.max_response_tokens,
            can_pause=True,
            media="inputs" if has_vision(self.engine.runner.module.config) else "",
            keeps_cache=self.engine.keeps_cache,
        )

    def submit(self, number: int, request: GenerationRequest) -> None:
        # Names of callers may repeat; with the number they do not, so each is aborted alone.
        added = self.engine.add(replace(request, request_id=f"{request.request_id}#{number}"))
        self._running[number] = added, NewTokens(added)

    def abort(self, number: int) -> None:
        self.engine.abort_groups(self._running[number][0].groups)

    def has_work(self) -> bool:
        return bool(self._running)

    def step(self) -> Sequence[tuple[int, TokenDelta]]:
        if self.engine.has_unfinished:  # else all have been aborted
            self.engine.step()
        return self._deltas()

    def cache_usage(self) -> float:
        return self.engine.cache_usage

    def pause(self) -> Sequence[tuple[int, TokenDelta]]:
        self.engine.flush()
        return self._deltas()

    def resume(self) -> None:
        """The next step sees that the weights were written to."""

    def _deltas(self) -> list[tuple[int, TokenDelta]]:
        self.engine.take_ended()  # sent as deltas
        deltas: list[tuple[int, TokenDelta]] = []
        for number, (_, new) in list(self._running.items()):
            # The host knows which version of the weights it has applied; this engine does not.
            deltas += [(number, replace(delta, policy_versions=())) for delta in new.take()]
            if new.is_finished:
                del self._running[number]
        return deltas

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        missing = {name for name, _ in self.engine.runner.module.named_parameters()}

        def noted() -> Iterable[tuple[str, Tensor]]:
            for name, tensor in weights:
                missing.discard(name)
                yield name, tensor

        self.engine.update_weights(noted())
        if missing:
            raise ValueError(
                f"{len(missing)} weights were not in the update, such as {min(missing)!r}; every "
                "weight must be in every update"
            )

    def forget_cache(self) -> None:
        self.engine.sessions.clear()

    def close_session(self, session_id: str) -> None:
        self.engine.close_session(session_id)

    def sleep(self, level: int) -> None:
        """The weights stay at level 2 too: they are written in place."""
        self.engine.sleep()

    def wake_up(self) -> None:
        self.engine.wake_up()

    def close(self) -> None:
        self._running.clear()
