"""New weights from the trainer to the engines that generate, and the proof that they arrived.

    sender = WeightSender(bucket_bytes)
    receiver = WeightReceiver(dict(module.named_parameters()))
    published = copy_weights(sender, engine.get_per_tensor_param(), version, receiver)

`WeightSender` cuts named tensors into buckets, `WeightReceiver` checks and applies them, and both
sides compare a fingerprint of the content. Between processes a channel carries the buckets:
`shared_memory` and `cuda_ipc` (one machine) or `tcp`. Each side needs the memory of two buckets at
most, whatever the size of the model.
"""

from verl.workers.weight_sync.bucket import Bucket, Published, WeightsNotReadyError, WeightSyncError
from verl.workers.weight_sync.channel import (
    ReceivingChannel,
    SendingChannel,
    WeightSender,
    copy_weights,
    receive_weights,
    send_weights,
)
from verl.workers.weight_sync.receiver import WeightReceiver

__all__ = [
    "Bucket",
    "Published",
    "ReceivingChannel",
    "SendingChannel",
    "WeightReceiver",
    "WeightSender",
    "WeightSyncError",
    "WeightsNotReadyError",
    "copy_weights",
    "receive_weights",
    "send_weights",
]
