"""Batches that travel between processes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.protocol.batches import (
    assert_same,
    jagged_rows,
    numbered,
    octets,
    only_arrays,
    only_tensors,
    rows_of,
)
from verl.protocol import (
    DataProto,
    deserialize_single_tensor,
    deserialize_tensordict,
    serialize_single_tensor,
    serialize_tensordict,
)
from verl.protocol.serialization import landing_device

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


class Point:
    """Something that only pickle can carry."""

    def __init__(self, x: int) -> None:
        self.x = x


def sent(data: DataProto, protocol: int = 5) -> DataProto:
    return pickle.loads(pickle.dumps(data, protocol=protocol))


def sent_out_of_band(data: DataProto) -> tuple[DataProto, list[pickle.PickleBuffer]]:
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return pickle.loads(frame, buffers=buffers), buffers


# ---- pickle --------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize(
    "data",
    [
        numbered(3),
        numbered(0),
        only_arrays(3),
        only_tensors(3),
        DataProto(meta_info={"x": 1}),
        jagged_rows(),
    ],
)
def test_a_pickled_batch_arrives_unchanged(data, protocol):
    assert_same(sent(data, protocol), data)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_of_tensor_arrives_bit_for_bit(dtype):
    bits = torch.randint(0, 256, (5, 16), dtype=torch.uint8)
    tensor = bits.bool() if dtype == torch.bool else bits.view(dtype)
    arrived = sent(DataProto.from_dict({"t": tensor})).batch["t"]
    assert arrived.dtype == dtype
    assert arrived.shape == tensor.shape
    assert torch.equal(octets(arrived), octets(tensor))


def test_a_pickled_batch_is_hardly_larger_than_its_tensors():
    data = DataProto.from_dict({f"c{i}": torch.zeros(1000, 64) for i in range(4)})
    raw = 4 * 1000 * 64 * 4
    assert raw < len(pickle.dumps(data)) < raw + 1500


def test_a_slice_travels_without_the_rest_of_its_storage():
    data = only_tensors(100_000)[:10]
    assert len(pickle.dumps(data)) < 1500
    column = DataProto.from_dict({"t": torch.zeros(10, 10_000)[:, 0]})
    assert len(pickle.dumps(column)) < 1500


def test_out_of_band_buffers_are_the_memory_of_the_tensors():
    data = only_tensors(1000)
    arrived, buffers = sent_out_of_band(data)
    assert len(buffers) == 1
    data.batch["number"][0] = 77
    assert buffers[0].raw()[0] == 77
    assert arrived.batch["number"][0] == 77


def test_tensors_from_a_read_only_buffer_can_be_written_to():
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(only_tensors(4), protocol=5, buffer_callback=buffers.append)
    stored = [bytes(buffer.raw()) for buffer in buffers]
    arrived = pickle.loads(frame, buffers=stored)
    arrived.batch["number"] += 1
    assert arrived.batch["number"].tolist() == [1, 2, 3, 4]
    assert np.frombuffer(stored[0], dtype=np.int64).tolist() == [0, 1, 2, 3]


def test_objects_and_meta_info_travel_by_ordinary_pickle():
    data = DataProto.from_dict(non_tensors={"x": [Point(1)]}, meta_info={"y": Point(2)})
    arrived = sent(data)
    assert arrived.non_tensor_batch["x"][0].x == 1
    assert arrived.meta_info["y"].x == 2


def test_what_travels_is_data_not_a_graph():
    tensor = torch.ones(2, requires_grad=True) * 2
    arrived = sent(DataProto.from_dict({"t": tensor}))
    assert arrived.batch["t"].requires_grad is False
    assert arrived.batch["t"].tolist() == [2.0, 2.0]


def test_jagged_columns_that_share_offsets_share_them_on_arrival():
    arrived = sent(jagged_rows())
    product = arrived.batch["ids"] * arrived.batch["mask"]  # torch refuses unless they share
    assert rows_of(product) == [[0, 1, 0], [3, 0], [5, 0, 7, 0]]


def test_columns_of_tables_and_objects_inside_the_tensordict_travel():
    data = DataProto(
        TensorDict(
            {
                "inner": TensorDict({"x": torch.arange(2)}, batch_size=[2]),
                "stack": NonTensorStack(NonTensorData([1]), NonTensorData([2])),
                "single": NonTensorData("text"),
            },
            batch_size=[2],
        )
    )
    arrived = sent(data)
    assert arrived.batch["inner", "x"].tolist() == [0, 1]
    assert arrived.batch.get("stack").tolist() == [[1], [2]]
    assert arrived.batch["single"] == "text"


def test_a_subclass_travels_with_its_own_attributes():
    data = numbered(2)
    data.note = "mine"
    assert sent(data).note == "mine"


@pytest.mark.parametrize("method", ["numpy", "torch", "anything"])
def test_the_serialization_method_of_the_environment_makes_no_difference(monkeypatch, method):
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    assert_same(sent(numbered(3)), numbered(3))


def test_copies_are_deep_or_shallow_as_asked_for():
    data = numbered(2)
    deep, shallow = copy.deepcopy(data), copy.copy(data)
    data.batch["number"][0] = 77
    assert deep.batch["number"][0] == 0
    assert shallow.batch["number"][0] == 77


def test_a_tensor_lands_on_the_cpu_when_its_device_is_not_here():
    assert landing_device("cpu").type == "cpu"
    assert landing_device("cuda:1000").type == "cpu"
    assert landing_device("xpu").type == "cpu"
    dtype, shape, buffer = serialize_single_tensor(torch.arange(3))
    arrived = deserialize_tensordict(
        ((3,), "cuda:1000", {"t": (dtype, shape, buffer, "cuda:1000")})
    )
    assert arrived["t"].device.type == "cpu"
    assert arrived["t"].tolist() == [0, 1, 2]


# ---- tensors and tensordicts ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.zeros(0),
        torch.zeros(0, 3),
        torch.arange(12).view(3, 4).T,
        torch.arange(10)[::2],
        torch.ones(1, 3).expand(2, 3),
        torch.arange(4.0).view(1, 4)[:, 2],
        torch.tensor([1 + 2j]).conj(),
        torch.imag(torch.tensor([1 + 2j]).conj()),
    ],
)
def test_tensors_of_any_shape_and_stride_are_restored(tensor):
    dtype, shape, buffer = serialize_single_tensor(tensor)
    assert isinstance(dtype, str)
    assert shape == tuple(tensor.shape)
    assert len(bytes(buffer)) == tensor.numel() * tensor.element_size()
    restored = deserialize_single_tensor((dtype, shape, buffer))
    assert restored.dtype == tensor.dtype
    assert restored.tolist() == tensor.tolist()


def test_a_buffer_may_be_bytes_at_any_address():
    dtype, shape, buffer = serialize_single_tensor(torch.arange(4))
    shifted = memoryview(bytearray(b"x" + buffer.tobytes()))[1:]
    assert deserialize_single_tensor((dtype, shape, shifted)).tolist() == [0, 1, 2, 3]
    assert deserialize_single_tensor((dtype, shape, buffer.tobytes())).tolist() == [0, 1, 2, 3]


def test_tensors_without_bytes_of_their_own_are_refused():
    with pytest.raises(ValueError, match="sparse"):
        serialize_single_tensor(torch.eye(2).to_sparse())
    with pytest.raises(ValueError, match="meta"):
        serialize_single_tensor(torch.zeros(2, device="meta"))
    with pytest.raises(ValueError, match="nonsense"):
        deserialize_single_tensor(("nonsense", (1,), b"1234"))


def test_a_tensordict_is_its_batch_size_its_device_and_its_items():
    batch = TensorDict({"t": torch.arange(2)}, batch_size=[2], device="cpu")
    batch_size, device, items = serialize_tensordict(batch)
    assert batch_size == (2,)
    assert device == "cpu"
    assert items["t"][:2] == ("int64", (2,))
    restored = deserialize_tensordict((batch_size, device, items))
    assert restored.device == torch.device("cpu")
    assert restored["t"].tolist() == [0, 1]


def test_jagged_tensors_are_serialized_as_layout_and_list():
    batch = jagged_rows().batch
    _, device, items = serialize_tensordict(batch)
    assert device is None
    layout, parts, dim = items["positions"]
    assert (layout, len(parts), dim) == ("jagged", 2, 2)
    restored = deserialize_tensordict(serialize_tensordict(batch))
    for key in ("ids", "mask", "positions"):
        assert rows_of(restored[key]) == rows_of(batch[key])


def test_a_jagged_tensor_with_holes_is_restored_without_them():
    holes = torch.nested.nested_tensor_from_jagged(
        torch.arange(9), torch.tensor([0, 3, 5, 9]), torch.tensor([2, 1, 4])
    )
    restored = deserialize_tensordict(
        serialize_tensordict(TensorDict({"t": holes}, batch_size=[3]))
    )
    assert rows_of(restored["t"]) == [[0, 1], [3], [5, 6, 7, 8]]
    assert restored["t"].is_contiguous()
