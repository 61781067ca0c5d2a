"""What a reward model reads, when its tokenizer or its chat template is not the policy's.

The response becomes text with the policy's tokenizer. Behind the messages of the prompt it is the
assistant's turn, and the reward model's own template and tokenizer make tokens of it all. Whatever
a response says stays text: it cannot write the tokens with which the template ends a turn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.dataset.prompts import encode_prompt, holds_special_tokens, render, shield

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
