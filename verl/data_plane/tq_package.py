"""The data plane over the package TransferQueue: its storage units hold the columns.

The metadata actor of `on_ray` keeps the book, because the package has no call that waits for keys;
what it tells of an entry is the same as everywhere. Of the package its key-value verbs are used:
`kv_put`, `kv_batch_get` and `kv_clear`, one partition of it per plane.

Every column travels as a dense tensor: arrays and plain data as the bytes of `codec.dumps`. So the
package never meets a value for which it would fall back to pickle. Its own messages do carry
pickled shapes and types, on ports that it opens: it belongs on a network of one's own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torch import Tensor

from verl.data_plane.on_ray import RayPlane
from verl.data_plane.plane import Column, Columns, Receipt, RowsLost, partition_of
from verl.protocol import codec

TENSOR, PLAIN = "tensor:", "plain:"


class TransferQueuePlane(RayPlane):
    backend = "transfer_queue"
    _opened: ClassVar[set[str]] = set()
    """Planes of this process; the package has one controller and ends with the last of them."""

    @staticmethod
    def client() -> Any:
        """The package's own client, connected to the controller of this cluster."""
        tq.init()
        return tq.get_client()

    def _open(self, options: Mapping[str, Any]) -> None:
        """`options` are those of `transfer_queue.init`: `backend`, `metrics`, `controller`."""
        tq.init(OmegaConf.create(dict(options)))
        self._opened.add(self.name)

    def _join(self) -> None:
        tq.init()

    def _stored(
        self, receipt: Receipt, columns: Mapping[str, Column]
    ) -> tuple[dict[str, int], list[Any]]:
        fields = dict(as_tensor(name, column) for name, column in columns.items())
        # The book is asked first: the package would overwrite a key that is there.
        self._call("claim", receipt)
        try:
            tq.kv_put(key=receipt.key, partition_id=self._partition(receipt.key), fields=fields)
        except BaseException:
            self._call("give_up", receipt.key)
            raise
        return {}, []

    def _fetched(
        self,
        receipt: Receipt,
        object_of: dict[str, int],
        references: dict[int, Any],
        fields: Sequence[str] | None,
    ) -> Columns:
        names = list(receipt.fields) if fields is None else list(fields)
        stored = [stored_name(name, receipt.fields[name]) for name in names]
        try:
            rows = tq.kv_batch_get(
                keys=[receipt.key], partition_id=self._partition(receipt.key), select_fields=stored
            )
        except (ValueError, RuntimeError, KeyError) as error:
            raise RowsLost(
                f"data plane {self.name!r}: TransferQueue cannot give the columns of "
                f"{receipt.key!r}, put by {receipt.producer}: {error}"
            ) from error
        return {
            name: from_tensor(rows[column][0], column)
            for name, column in zip(names, stored, strict=True)
        }

    def _discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            tq.kv_clear(keys=[key], partition_id=self._partition(key))

    def close(self) -> None:
        super().close()
        self._opened.discard(self.name)
        if not self._opened:
            tq.close()

    def _partition(self, key: str) -> str:
        return f"{self.name}/{partition_of(key)}"


def as_tensor(name: str, column: Column) -> tuple[str, Tensor]:
    if isinstance(column, Tensor):
        return TENSOR + name, column.detach().cpu().contiguous()
    octets = np.frombuffer(codec.dumps(column, f"column {name!r}"), dtype=np.uint8)
    return PLAIN + name, torch.from_numpy(octets.copy())


def stored_name(name: str, kind: str) -> str:
    return (PLAIN if kind.startswith(("numpy.", "objects[")) else TENSOR) + name


def from_tensor(tensor: Tensor, column: str) -> Column:
    return tensor if column.startswith(TENSOR) else codec.loads(tensor.numpy().tobytes())
