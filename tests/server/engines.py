"""Engines, models and a tokenizer for tests of the server."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.agent_loop.fakes import engine_loop
from tests.tiny_models import tiny_model
from verl.utils.dataset.prompts import CHATML
from verl.workers.rollout.base import (
    EngineLostError,
    GenerationRequest,
    OnEnd,
    StreamingRollout,
    TokenDelta,
    TokenOutput,
)
from verl.workers.rollout.native.sequence import EngineLimits
from verl.workers.rollout.process.client import EngineProcess, EngineSpec
from verl.workers.rollout.process.native import BUILD, native_options

MODEL = "tiny"
TOKEN = "a-token-for-the-tests"
MAX_MODEL_LEN = 2048
SPECIAL = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, behind five special ones."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number + len(SPECIAL) for number, letter in enumerate(letters)}
    vocabulary |= {token: number for number, token in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="</s>",
        chat_template=TOOLS + CHATML,
    )


def save_model(folder: Path) -> Path:
    """A small random model that takes `MAX_MODEL_LEN` tokens."""
    tokenizer = byte_tokenizer()
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": MAX_MODEL_LEN}
    tiny_model("llama", **shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class ScriptedRollout(StreamingRollout):
    """Says what `reply` gives for a request, `per_delta` tokens at a time.

    `pause` is awaited before each delta; `lose_after` deltas the engine is lost, once. While `hold`
    is true of the number of a token, that one does not come.
    """

    def __init__(
        self,
        reply: Callable[[GenerationRequest], Sequence[int]],
        *,
        per_delta: int = 1,
        pause: float = 0.0,
        lose_after: int | None = None,
        hold: Callable[[int], bool] = lambda number: False,
    ) -> None:
        self.reply = reply
        self.per_delta = per_delta
        self.pause = pause
        self.lose_after = lose_after
        self.hold = hold
        self.requests: list[GenerationRequest] = []
        self.running: set[str] = set()

    @property
    def policy_version(self) -> int:
        return 0

    async def stream(self, request: GenerationRequest) -> AsyncIterator[TokenDelta]:
        self.requests.append(request)
        self.running.add(request.request_id)
        try:
            ids = list(self.reply(request))[: request.params.max_tokens]
            reason = "length" if len(ids) == request.params.max_tokens else "stop"
            for start in range(0, max(1, len(ids)), self.per_delta):
                await asyncio.sleep(self.pause)
                while self.hold(start):
                    await asyncio.sleep(0.001)
                self._maybe_lost()
                for sample in range(request.num_samples):
                    part = tuple(ids[start : start + self.per_delta])
                    is_last = start + self.per_delta >= len(ids)
                    yield TokenDelta(
                        sample=sample,
                        token_ids=part,
                        log_probs=tuple(-0.5 for _ in part),
                        policy_versions=tuple(0 for _ in part),
                        stop_reason=reason if is_last else "",
                    )
        finally:
            self.running.discard(request.request_id)

    def _maybe_lost(self) -> None:
        if self.lose_after is None:
            return
        self.lose_after -= 1
        if self.lose_after < 0:
            self.lose_after = None
            raise EngineLostError("killed at 0x7f00dead in /secret/place")

    def submit(
        self, request: GenerationRequest, on_end: OnEnd | None = None
    ) -> Future[list[TokenOutput]]:
        return asyncio.run_coroutine_threadsafe(self._whole(request), engine_loop(os.getpid()))

    async def _whole(self, request: GenerationRequest) -> list[TokenOutput]:
        outputs = [TokenOutput() for _ in range(request.num_samples)]
        async for delta in self.stream(request):
            outputs[delta.sample].add(delta)
        return outputs

    def abort(self, request_id: str) -> None: ...

    def close_session(self, session_id: str) -> None: ...

    def sleep(self) -> None: ...

    def wake_up(self) -> None: ...


def saying(text: str) -> Callable[[GenerationRequest], list[int]]:
    """The same text for everybody."""
    ids = byte_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return lambda request: list(ids)


def engine_process(folder: Path) -> EngineProcess:
    """The built-in engine in a process of its own, not started."""
    limits = EngineLimits(
        max_num_seqs=64,
        max_prompt_tokens=MAX_MODEL_LEN // 2,
        max_response_tokens=MAX_MODEL_LEN // 2,
        max_session_bytes=1 << 20,
    )
    return EngineProcess(
        EngineSpec(
            build=BUILD,
            options=native_options(str(folder), limits),
            environment={"OMP_NUM_THREADS": "1", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"},
            has_weights=True,
        )
    )
