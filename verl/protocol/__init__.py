"""The batch protocol: `DataProto`, the one form in which data crosses a boundary.

Importing it makes TensorDict return real dictionaries from stacking and slicing, not lazy ones.
"""

from tensordict import set_lazy_legacy

from verl.protocol.data_proto import DataProto
from verl.protocol.ops import (
    DataProtoConfig,
    DataProtoItem,
    fold_batch_dim,
    list_of_dict_to_dict_of_list,
    unfold_batch_dim,
    union_numpy_dict,
)
from verl.protocol.serialization import (
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from verl.protocol.transport import (
    DataProtoFuture,
    all_gather_data_proto,
    collate_fn,
    pad_dataproto_to_divisor,
    unpad_dataproto,
)
from verl.utils.tensor_rows import BatchError
from verl.utils.tensordict_utils import union_tensor_dict

set_lazy_legacy(False).set()

__all__ = [
    "BatchError",
    "DataProto",
    "DataProtoConfig",
    "DataProtoFuture",
    "DataProtoItem",
    "all_gather_data_proto",
    "collate_fn",
    "deserialize_single_tensor",
    "deserialize_tensordict",
    "fold_batch_dim",
    "list_of_dict_to_dict_of_list",
    "pad_dataproto_to_divisor",
    "serialize_single_tensor",
    "serialize_tensordict",
    "unfold_batch_dim",
    "union_numpy_dict",
    "union_tensor_dict",
    "unpad_dataproto",
]
