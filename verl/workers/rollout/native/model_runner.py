"""Forward passes of the engine: sequences in, or one more token for every running row.

The module is the trainer's own, or a copy that ranks hold together. What comes out are the logits
that decide the next token, through the same head as in training.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.exact import exact_capacity, is_exact
from verl.models.forward import hidden_states, packed_layout
from verl.models.head import OutputHead, scaled_logits
from verl.models.routing import generation_pass
from verl.models.vision import FeatureCache, PlacedFeatures, PlacedMedia
from verl.utils.media import rope_positions
from verl.workers.rollout.native.attention import DecodeLayout, PrefillSequence
from verl.workers.rollout.native.cache import CacheShape, HeadShape, KVCache
from verl.workers.rollout.native.rows import RowTable, in_one_copy
from verl.workers.rollout.native.sequence import EngineLimits, Sample

ROW_TILE = 16
"""Matrix products with fewer rows take other paths on a CPU and round differently; rows are padded
to a multiple of this, so on one thread a row's numbers do not depend on how many run beside it."""

COLUMN_TILE = 16
"""Columns of attention come in multiples of this, for the same reason."""

FEWEST_ROWS = 8
FEWEST_TOKENS = 64
MANY_TOKENS = 4096
"""From here on wasted tokens cost more than further graphs."""


class ModelRunner:
    """Runs the shared module on the engine's cache."""

    def __init__(
        self, module: PreTrainedModel, tp_group: torch.distributed.ProcessGroup | None = None
    ) -> None:
        self.module = module
        self.tp_group = tp_group
        self.device = next(module.parameters()).device
        self.cache_dtype = next(module.parameters()).dtype
        """Number format of keys and values."""

        self.recorder: RouteKeeper | None = None
        """What keeps the expert routes of each pass, if somebody asks for them."""

        self.vocabulary = int(module.config.get_text_config().vocab_size)
        self.features = FeatureCache(module)

    @property
    def exact_capacity(self) -> int | None:
        """The longest sequence of an exact model; None for one that is not exact."""
        return exact_capacity(self.module)

    @property
    def num_weight_writes(self) -> int:
        """Grows whenever a weight is written in place, whoever did it; torch counts."""
        return sum(parameter._version for parameter in self.module.parameters())

    def head_shapes(self) -> list[HeadShape]:
        """What each layer keeps of a token, found by running one."""
        probe = _ShapeProbe()
        self.run_one_token(probe)
        layers = sorted(probe.shapes)
        if layers != list(range(self.module.config.get_text_config().num_hidden_layers)):
            raise ValueError(
                f"{type(self.module).__name__} used attention in layers {layers} only; the "
                "built-in engine keeps keys and values, nothing else: use rollout.name=hf or vllm"
            )
        return [probe.shapes[layer] for layer in layers]

    def slot_shape(self, limits: EngineLimits) -> CacheShape:
        """The shape of a prompt slot and a response slot."""
        prompt_tokens, response_tokens = limits.max_prompt_tokens, limits.max_response_tokens
        capacity = self.exact_capacity
        if capacity is not None:
            if capacity < prompt_tokens + response_tokens:
                raise ValueError(
                    f"the exact model has capacity {capacity}, but prompt and response may have "
                    f"{prompt_tokens + response_tokens} tokens; give make_exact at least that much"
                )
            # Exact attention runs over whole sequences of one length, so they do not share prompts.
            prompt_tokens, response_tokens = 0, capacity
        return CacheShape(
            layers=self.head_shapes(),
            max_prompt_tokens=prompt_tokens,
            max_response_tokens=response_tokens,
            dtype=self.cache_dtype,
            device=self.device,
        )

    @torch.no_grad()
    def run_one_token(self, layout: AttentionLayout) -> Tensor:
        """Run one token, for a `layout` that records its inputs; the hidden state, (1, hidden)."""
        zero = torch.zeros(1, dtype=torch.long, device=self.device)
        with generation_pass():
            return hidden_states(self.module, zero, zero, layout)

    @torch.no_grad()
    def run_tokens(self, ids: Tensor) -> Tensor:
        """The hidden states of one sequence, (n, hidden); nothing is kept."""
        positions = torch.arange(len(ids), device=ids.device)
        return self._hidden_states(ids, positions, packed_layout(self.module, [len(ids)]))

    def prefill(self, layout: AttentionLayout, sequences: Sequence[PrefillSequence]) -> Tensor:
        """Bring sequences into the cache; the hidden state of the last token of each."""
        columns = [torch.from_numpy(column) for column in packed_tokens(sequences)]
        features = self._features_of(sequences)
        ids, positions, last = in_one_copy(columns, self.device)
        return self.last_hidden(layout, ids, positions, last, features)

    @torch.no_grad()
    def last_hidden(
        self,
        layout: AttentionLayout,
        ids: Tensor,
        positions: Tensor,
        last: Tensor,
        features: PlacedFeatures | None = None,
    ) -> Tensor:
        """Run tokens end to end; the hidden states of some of them, whose indices are `last`."""
        return self._hidden_states(ids, positions, layout, features)[last]

    @torch.no_grad()
    def _features_of(self, sequences: Sequence[PrefillSequence]) -> PlacedFeatures | None:
        """Features of the images among the new tokens; the tower runs once per content."""
        placed: list[PlacedMedia] = []
        start = 0
        for sequence in sequences:
            for one in sequence.media:
                (rows,) = np.nonzero(one.places >= sequence.num_known)
                if len(rows):
                    placed.append((one, rows, one.places[rows] - sequence.num_known + start))
            start += sequence.num_new
        return self.features.placed(placed, one_by_one=is_exact(self.module))

    def decode_layout(
        self, cache: KVCache, samples: Sequence[Sample], rows: RowTable, num_steps: int
    ) -> DecodeLayout:
        """Attention for the next `num_steps` tokens of the samples, whose rows these are."""
        longest_prompt = max(sample.group.num_shared for sample in samples)
        longest = max(sample.num_own for sample in samples)
        return DecodeLayout(
            cache,
            rows,
            [sample.group.slot for sample in samples],
            num_prompt_columns=min(round_up(longest_prompt), cache.shape.max_prompt_tokens),
            num_own_columns=min(round_up(longest + num_steps), cache.shape.max_response_tokens),
            is_exact=self.exact_capacity is not None,
        )

    @torch.no_grad()
    def decode(self, layout: DecodeLayout, rows: RowTable) -> Tensor:
        """Logits after the newest token of each row, (B, V); its keys and values are kept."""
        layout.begin_step()
        return self.logits(self.decode_hidden(layout, rows))

    @torch.no_grad()
    def decode_hidden(self, layout: AttentionLayout, rows: RowTable) -> Tensor:
        """The hidden state of the newest token of each row, (B, hidden)."""
        return self._hidden_states(rows.newest, rows.positions, layout)

    def _hidden_states(
        self,
        ids: Tensor,
        positions: Tensor,
        layout: AttentionLayout,
        features: PlacedFeatures | None = None,
    ) -> Tensor:
        num_rows = len(ids)
        num_missing = -num_rows % ROW_TILE
        if num_missing:
            ids, positions = (F.pad(x, (0, num_missing)) for x in (ids, positions))
        with generation_pass(self.recorder):
            return hidden_states(self.module, ids, positions, layout, features)[:num_rows]

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        num_rows = len(hidden)
        hidden = F.pad(hidden, (0, 0, 0, -num_rows % ROW_TILE))
        return scaled_logits(hidden, OutputHead.of(self.module), 1.0)[:num_rows]


class RouteKeeper:
    """The expert routes of the last pass."""

    def __init__(self, num_layers: int) -> None:
        self._layers: list[Tensor] = [torch.empty(0)] * num_layers

    def keep_routes(self, number: int, routes: Tensor) -> None:
        self._layers[number] = routes

    def routes(self, num_tokens: int) -> Tensor:
        """(tokens, layers, k) on the host, without those of padding."""
        return torch.stack([x[:num_tokens] for x in self._layers], 1).to("cpu", torch.int16)


def packed_tokens(
    sequences: Sequence[PrefillSequence],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and positions of new tokens end to end, and the index of the last of each sequence."""
    known = np.array([s.num_known for s in sequences])
    lengths = np.array([s.num_new for s in sequences])
    ends = lengths.cumsum()
    new_ids = (s.token_ids[s.num_known :] if s.num_known else s.token_ids for s in sequences)
    ids = np.fromiter(itertools.chain.from_iterable(new_ids), dtype=np.int64, count=ends[-1])
    positions = np.arange(ends[-1]) + (known - ends + lengths).repeat(lengths)
    if any(one.grid is not None for s in sequences for one in s.media):
        positions = np.concatenate([positions_of(s) for s in sequences], axis=1)
    return ids, positions, ends - 1


def positions_of(sequence: PrefillSequence) -> np.ndarray:
    """(3, new tokens) positions in time, height and width."""
    num_tokens = len(sequence.token_ids)
    found = rope_positions(num_tokens, sequence.media)
    if found is None:
        found = np.broadcast_to(np.arange(num_tokens), (3, num_tokens))
    return found[:, sequence.num_known :]


def batch_sizes(max_rows: int) -> list[int]:
    """8, 12, 16, 24, 32, 48, ... up to the most rows there are: at most a third runs in vain."""
    sizes, size = [], FEWEST_ROWS
    while size < max_rows:
        sizes += [size, size * 3 // 2]
        size *= 2
    return [size for size in sizes if size < max_rows] + [max_rows]


def prefill_sizes(max_tokens: int) -> list[int]:
    """64, 96, 128, 192, ... 4096, 4608, 5120, ... up to `max_tokens`.

    At most a third runs in vain below 4096 tokens, an eighth above; fewer than 64 count as 64.
    """
    sizes, size = [], FEWEST_TOKENS
    while size < max_tokens:
        sizes += range(size, 2 * size, size // (2 if size < MANY_TOKENS else 8))
        size *= 2
    return [size for size in sizes if size < max_tokens] + [max_tokens]


def round_up(num_columns: int) -> int:
    return num_columns + -num_columns % COLUMN_TILE


class _ShapeProbe(AttentionLayout):
    """Writes down what each layer hands to attention."""

    def __init__(self) -> None:
        self.shapes: dict[int, HeadShape] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        self.shapes[layer] = HeadShape(key.shape[1], key.shape[2], value.shape[2])
        return query.new_zeros(*query.shape[:2], value.shape[2])
