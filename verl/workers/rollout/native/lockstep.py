"""What ranks that hold one model together must agree on.

Each of them runs a whole engine: the same requests, the same scheduler, the same seeds. Their steps
therefore meet in the same collectives, as long as they decide alike. All decisions follow from two
things, how many sequences fit and which tokens were drawn, and these are settled here.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from verl.utils.distributed import all_reduce_


def smallest_of_all(number: int, group: dist.ProcessGroup | None) -> int:
    if group is None:
        return number
    return int(all_reduce_(torch.tensor(number), dist.ReduceOp.MIN, group))


def as_on_first_rank(
    tokens: Tensor, log_probs: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Token ids and log-probabilities, (B,) each, as the first rank of the group drew them."""
    if group is None:
        return tokens, log_probs
    drawn = torch.stack([tokens.double(), log_probs.double()])  # exact, and one trip
    dist.broadcast(drawn, group=group, group_src=0)
    return drawn[0].to(tokens.dtype), drawn[1].to(log_probs.dtype)
