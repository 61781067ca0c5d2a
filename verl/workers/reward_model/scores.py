"""The input of a reward model, and its score of whole token sequences.

A value model has an output at the token *before* every response token. A sequence therefore becomes
a row with one column more, whose token is never read: the output before it is the one at the last
token of the sequence. Training a reward model and using one go through the same rows, so any engine
that has values can do both.

`RewardTemplate` makes the sequence where the reward model's tokenizer or chat template is not the
policy's: the response is decoded with the policy's tokenizer and becomes the assistant's turn in
the reward model's own template. A response stays text: it cannot write the tokens with which the
template ends a turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import encode_prompt, holds_special_tokens, render, shield
from verl.utils.model import compute_position_id_with_mask
from verl.workers.engine.base import BaseEngine, MicroBatching


def as_rows(sequences: Sequence[Sequence[int]]) -> TensorDict:
    """[padding, tokens, one column more] for the engine; its `values` (B, 1) are the scores."""
    empty = [row for row, tokens in enumerate(sequences) if not len(tokens)]
    if empty:
        raise ValueError(f"sequence {empty[0]} has no tokens; a score is read at the last one")
    B, L = len(sequences), max(map(len, sequences))
    ids = torch.zeros(B, L + 1, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(sequences):
        ids[row, L - len(tokens) : L] = torch.tensor(tokens)
        mask[row, L - len(tokens) :] = 1
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": compute_position_id_with_mask(mask),
        "responses": ids[:, L:],
    }
    return TensorDict(columns, batch_size=B)  # pyright: ignore[reportArgumentType]


def sequence_scores(
    engine: BaseEngine, sequences: Sequence[Sequence[int]], *, micro_batching: MicroBatching
) -> Tensor:
    """(B,) scores in fp32; they depend neither on the neighbours nor on the cut."""
    values = engine.infer_batch(as_rows(sequences), micro_batching=micro_batching)["values"]
    return values[:, 0]


def cut(tokens: list[int], max_length: int | None, truncation: str) -> list[int]:
    """At most `max_length` tokens; None sets no limit. `truncation` says where the others go."""
    if max_length is None or len(tokens) <= max_length:
        return tokens
    if truncation == "left":
        return tokens[-max_length:]
    if truncation == "right":
        return tokens[:max_length]
    raise ValueError(
        f"the reward model is given {len(tokens)} tokens; reward_model.max_length is {max_length} "
        "and reward_model.truncation is 'error': raise the limit, or cut with left or right"
    )


Prompt = str | Sequence[Mapping[str, Any]]


class RewardTemplate:
    """From a prompt and the policy's tokens to the reward model's tokens."""

    def __init__(
        self, policy_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self.policy_tokenizer = policy_tokenizer
        self.tokenizer = tokenizer

    def encode(self, prompt: Prompt, response_ids: Sequence[int]) -> list[int]:
        """The whole conversation, the response as its last turn."""
        response = str(self.policy_tokenizer.decode(list(response_ids), skip_special_tokens=True))
        if self.tokenizer.chat_template is None:
            return self._plain(prompt, response, is_finished=self._is_finished(response_ids))
        turns = [*self._messages(prompt), {"role": "assistant", "content": response}]
        shielded, marks = shield(turns, self.tokenizer)
        text = render(shielded, self.tokenizer, add_generation_prompt=False)
        return marks.encode(text, self.tokenizer)

    def _plain(self, prompt: Prompt, response: str, *, is_finished: bool) -> list[int]:
        """Without a template the prompt is a text, and its continuation ends as the policy's."""
        if not isinstance(prompt, str):
            raise ValueError(
                f"the prompt is a list of messages, but the reward model's tokenizer "
                f"{self.tokenizer.name_or_path!r} has no chat template; add one to its folder, or "
                "set reward_model.model.input_tokenizer=null to give it the policy's own tokens"
            )
        tokens = encode_prompt(prompt, self.tokenizer)
        tokens += self.tokenizer(response, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]  # pyright: ignore[reportOperatorIssue]
        eos = self.tokenizer.eos_token_id
        return [*tokens, eos] if is_finished and isinstance(eos, int) else tokens

    def _messages(self, prompt: Prompt) -> list[Mapping[str, Any]]:
        if not isinstance(prompt, str):
            return list(prompt)
        if holds_special_tokens(prompt, self.policy_tokenizer):
            raise ValueError(
                f"the prompt {prompt[:80]!r} has been through the policy's chat template; the "
                "reward model's template needs messages: write prompts as messages, or set "
                "reward_model.model.input_tokenizer=null if both share one template"
            )
        return [{"role": "user", "content": prompt}]

    def _is_finished(self, response_ids: Sequence[int]) -> bool:
        return len(response_ids) > 0 and response_ids[-1] == self.policy_tokenizer.eos_token_id
