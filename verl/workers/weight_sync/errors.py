"""What can go wrong while weights travel; each error names the bucket, the tensor or the peer."""


class WeightSyncError(RuntimeError):
    """Weights did not arrive as they were sent. The receiver serves nothing it is not sure of."""


class DamagedBucketError(WeightSyncError):
    """A bucket is not what its checksum says, or cannot be read."""


class StaleBucketError(WeightSyncError):
    """A bucket belongs to an update that is over: an old version, or an earlier attempt."""


class RepeatedBucketError(WeightSyncError):
    """A bucket of the running update came twice; the second one changed nothing."""


class LostBucketError(WeightSyncError):
    """A bucket came before its predecessor, which is late or lost."""


class WrongWeightsError(WeightSyncError):
    """Names, shapes or number formats differ between the two sides."""


class FingerprintError(WeightSyncError):
    """All buckets were applied, and the receiver still holds something else than was sent."""


class WeightsNotReadyError(WeightSyncError):
    """The receiver holds no complete version, or not the one that was asked for."""


class SyncRefusedError(WeightSyncError):
    """The sender's view: one or more receivers do not hold the version that was sent."""


class ChannelError(WeightSyncError):
    """The way between the two sides failed: closed, too slow, or a peer without the token."""
