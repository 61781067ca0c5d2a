"""One mini-batch for the policy and the critic: uneven rows, shared prompts, tokens of a tool."""

from collections.abc import Sequence

import torch
from tensordict import TensorDict
from torch import Tensor

from tests.tiny_models import VOCABULARY

PROMPT, RESPONSE = 7, 6
LONGEST_ROW = PROMPT + RESPONSE

# (which prompt, tokens of the response); prompt p has PROMPT_TOKENS[p] tokens
PROMPT_TOKENS = (5, 2, 7, 1)
MANY_PROMPTS = ((0, 6), (1, 1), (0, 3), (2, 6), (1, 0), (0, 2), (3, 4))
ONE_PROMPT = ((0, 6), (0, 1), (0, 3))
OF_A_TOOL = (0, slice(2, 4))  # row and response tokens that the model did not write

ROWS = {"many prompts": MANY_PROMPTS, "one prompt": ONE_PROMPT}
"""With one prompt, whose rows stay together, all ranks but one have no rows."""


def batch(name: str) -> TensorDict:
    generator = torch.Generator().manual_seed(11)
    ids, mask = ids_and_mask(ROWS[name], generator)
    response_mask = mask[:, PROMPT:].clone()
    response_mask[OF_A_TOOL] = 0
    shape = response_mask.shape
    columns = {
        "advantages": torch.randn(shape, generator=generator),
        "old_log_probs": noise_around(-5.5, shape, generator),
        "ref_log_prob": noise_around(-5.5, shape, generator),
        "values": noise_around(0.0, shape, generator),
        "returns": noise_around(0.5, shape, generator),
        "ce_weights": some_weights(mask[:, PROMPT:], generator),
        "positive_weights": some_weights(response_mask, generator),
    }
    if name == "one prompt":
        columns["kl_weights"] = some_weights(response_mask, generator)
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, PROMPT:],
            "response_mask": response_mask,
            **columns,
        },
        batch_size=len(ids),
    )


def ids_and_mask(
    rows: Sequence[tuple[int, int]], generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Prompts end where responses begin; padding is on both sides."""
    prompts = [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in PROMPT_TOKENS]
    ids = torch.zeros(len(rows), LONGEST_ROW, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(rows):
        first, end = PROMPT - len(prompts[prompt]), PROMPT + length
        response = torch.randint(3, VOCABULARY, (length,), generator=generator)
        ids[row, first:end] = torch.cat([prompts[prompt], response])
        mask[row, first:end] = 1
    return ids, mask


def some_weights(present: Tensor, generator: torch.Generator) -> Tensor:
    """A weight for about half of the tokens, those of the tool included."""
    is_chosen = torch.rand(present.shape, generator=generator) < 0.5
    return torch.rand(present.shape, generator=generator) * is_chosen * present


def noise_around(mean: float, shape: torch.Size, generator: torch.Generator) -> Tensor:
    return mean + 0.5 * torch.randn(shape, generator=generator)
