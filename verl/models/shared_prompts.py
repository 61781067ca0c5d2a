"""Shared prompts: each prompt of a pass is computed once for all of its samples.

    rows      A a1   A a2   A a3   B b1          40 % of the tokens are prompts
    a pass    [ A | B | a1 | a2 | a3 | b1 ]      prompts first, then their samples in order

Every layer but attention treats tokens one by one, so it computes fewer of them; in attention a
sample attends to its prompt and itself. Log-probabilities and gradients are those of whole rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.attention import AttentionLayout, AttentionOptions
from verl.models.head import gather_rows


@dataclass(frozen=True)
class SharedPrompts:
    """Tokens of each prompt of a pass, and of each sample without its prompt."""

    prompts: list[int]
    owners: list[int]
    """The prompt of each sample, ascending: the samples of a prompt are neighbours."""

    samples: list[int]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(self.prompts)

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + sum(self.samples)

    def whole_lengths(self) -> list[int]:
        """Tokens of each sample with its prompt."""
        pairs = zip(self.owners, self.samples, strict=True)
        return [self.prompts[owner] + length for owner, length in pairs]

    def prompt_spans(self) -> list[tuple[int, int]]:
        """First token and length of each prompt in the pass."""
        return spans(self.prompts, 0)

    def sample_spans(self) -> list[tuple[int, int]]:
        """First token and length of each sample in the pass."""
        return spans(self.samples, self.num_prompt_tokens)

    def tokens_per_prompt(self) -> list[int]:
        """Tokens of all samples of each prompt."""
        totals = [0] * len(self.prompts)
        for owner, length in zip(self.owners, self.samples, strict=True):
            totals[owner] += length
        return totals


def spans(lengths: list[int], start: int) -> list[tuple[int, int]]:
    """First token and length of consecutive parts, the first of which begins at `start`."""
    result = []
    for length in lengths:
        result.append((start, length))
        start += length
    return result


class UnfoldedLayout(AttentionLayout):
    """Attention over shared prompts as attention over whole sequences, which `inner` computes.

    Plain torch: prompts are repeated for attention alone, and the output of one copy is kept.
    """

    def __init__(self, shared: SharedPrompts, inner: AttentionLayout, device: torch.device) -> None:
        self.inner = inner
        self.num_tokens = shared.num_tokens
        prompts, samples = shared.prompt_spans(), shared.sample_spans()
        whole: list[Tensor] = []
        for owner, (start, length) in zip(shared.owners, samples, strict=True):
            first, count = prompts[owner]
            whole += [torch.arange(first, first + count), torch.arange(start, start + length)]
        unfold = torch.cat(whole)
        fold = torch.empty(shared.num_tokens, dtype=torch.long)
        fold[unfold] = torch.arange(len(unfold))  # any copy of a prompt: all are equal
        self._unfold, self._fold = unfold.to(device), fold.to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions
    ) -> Tensor:
        query_, key_, value_ = (gather_rows(x, self._unfold) for x in (query, key, value))
        whole = self.inner.attend(layer, query_, key_, value_, options)
        output = whole.index_select(0, self._fold)
        padding = output.new_zeros(len(query) - self.num_tokens, *output.shape[1:])
        return torch.cat([output, padding]) if len(padding) else output
