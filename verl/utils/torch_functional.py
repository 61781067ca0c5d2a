"""The tensor helpers, under the path users import them from.

Each family has a file of its own: `masked`, `logprobs`, `padding`, `schedules`, `collectives`.
"""

import torch
from torch import Tensor

from verl.utils.collectives import (
    allgather_dict_tensors,
    broadcast_dict_tensor,
    distributed_masked_mean,
    distributed_mean_max_min_std,
    split_dict_tensor_into_batches,
)
from verl.utils.logprobs import (
    calculate_sum_pi_squared_from_logits,
    entropy_from_logits,
    entropy_from_logits_with_chunking,
    log_probs_from_logits_all_rmpad,
    log_probs_from_logits_response,
    log_probs_from_logits_response_rmpad,
    logprobs_from_logits,
)
from verl.utils.masked import masked_mean, masked_sum, masked_var, masked_whiten
from verl.utils.padding import (
    expand_as_nested,
    get_eos_mask,
    get_response_mask,
    pad_2d_list_to_length,
    pad_sequence_to_length,
    postprocess_data,
    remove_pad_token,
    tokenize_and_postprocess_data,
)
from verl.utils.schedules import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
    get_wsd_schedule_with_warmup,
)

__all__ = [
    "allgather_dict_tensors",
    "broadcast_dict_tensor",
    "calculate_sum_pi_squared_from_logits",
    "clip_by_value",
    "distributed_masked_mean",
    "distributed_mean_max_min_std",
    "entropy_from_logits",
    "entropy_from_logits_with_chunking",
    "expand_as_nested",
    "get_constant_schedule_with_warmup",
    "get_cosine_schedule_with_warmup",
    "get_eos_mask",
    "get_linear_schedule_with_warmup",
    "get_response_mask",
    "get_wsd_schedule_with_warmup",
    "log_probs_from_logits_all_rmpad",
    "log_probs_from_logits_response",
    "log_probs_from_logits_response_rmpad",
    "logprobs_from_logits",
    "masked_mean",
    "masked_sum",
    "masked_var",
    "masked_whiten",
    "pad_2d_list_to_length",
    "pad_sequence_to_length",
    "postprocess_data",
    "remove_pad_token",
    "split_dict_tensor_into_batches",
    "tokenize_and_postprocess_data",
]


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Element by element into [`tensor_min`, `tensor_max`]; the limits may be tensors."""
    return torch.clamp(x, tensor_min, tensor_max)
