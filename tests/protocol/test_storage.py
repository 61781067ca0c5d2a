"""Batches on disk: one safetensors file, no pickle."""

import json
import math
import pickle
from collections import OrderedDict, namedtuple
from enum import IntEnum
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tensordict import NonTensorData, TensorDict

from tests.protocol.batches import (
    assert_same,
    jagged_rows,
    numbered,
    octets,
    only_arrays,
    only_tensors,
    rows_of,
)
from tests.protocol.test_serialization import DTYPES
from verl.protocol import DataProto


class Color(IntEnum):
    RED = 1


Pair = namedtuple("Pair", ["a", "b"])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "batch.safetensors"


def stored(data: DataProto, path: Path) -> DataProto:
    data.save_to_disk(path)
    return DataProto.load_from_disk(path)


def stored_value(value: object, path: Path) -> object:
    """The value after a round trip, checked to be the same in an array and in meta_info."""
    arrived = stored(DataProto.from_dict(non_tensors={"x": [value]}, meta_info={"x": value}), path)
    assert repr(arrived.meta_info["x"]) == repr(arrived.non_tensor_batch["x"][0])
    return arrived.meta_info["x"]


# ---- what survives -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        numbered(3),
        numbered(0),
        only_arrays(3),
        only_tensors(3),
        jagged_rows(),
        DataProto(),
        DataProto(meta_info={"x": 1}),
    ],
)
def test_a_stored_batch_is_read_unchanged(data, path):
    assert_same(stored(data, path), data)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.complex128])
def test_every_type_of_tensor_is_read_bit_for_bit(dtype, path):
    bits = torch.randint(0, 256, (5, 16), dtype=torch.uint8)
    tensor = bits.bool() if dtype == torch.bool else bits.view(dtype)
    arrived = stored(DataProto.from_dict({"t": tensor}, meta_info={"t": tensor}), path)
    for restored in (arrived.batch["t"], arrived.meta_info["t"]):
        assert restored.dtype == dtype
        assert restored.shape == tensor.shape
        assert torch.equal(octets(restored), octets(tensor))


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        -(2**100),
        1.5,
        -0.0,
        0.1,
        5e-324,
        math.inf,
        -math.inf,
        math.nan,
        "",
        "naïve 😀 \x00 \ud800",
        b"",
        b"\x00\xff",
        [],
        (),
        {},
        [1, [2.5, [None, (3, [4])]]],
        (1, (2,), [3], {}),
        {"a": {"b": [1, {"c": (2, math.nan)}]}},
        {"$tuple": [1], "$": 2},
        {"$float": "nan"},
        {1: "one", None: 2, (3, 4): 5, 2.5: 6},
        np.int8(-3),
        np.float32(0.1),
        np.float64("nan"),
        np.bool_(True),
        np.str_("text"),
        np.bytes_(b"ab"),
        np.complex64(1 + 2j),
        np.datetime64("2026-01-29T12:00", "ns"),
    ],
)
def test_a_value_is_read_with_its_type(value, path):
    restored = stored_value(value, path)
    assert type(restored) is type(value)
    assert repr(restored) == repr(value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.zeros((0, 4), dtype=np.float32),
        np.array(2.5),
        np.array([np.nan, np.inf, -0.0]),
        np.array(["a", "longer"]),
        np.array([b"a", b"bc"]),
        np.array([1, 2], dtype=">i4"),
        np.arange(6).reshape(2, 3).T,
        np.array([1, 2], dtype="timedelta64[s]"),
        np.array([[1, "a"], [None, [2]]], dtype=object),
    ],
)
def test_an_array_is_read_with_type_and_shape(array, path):
    for value in (array, [{"deep": array}]):
        restored = stored_value(value, path)
        restored = restored if value is array else restored[0]["deep"]
        assert isinstance(restored, np.ndarray)
        assert restored.dtype == array.dtype
        assert restored.shape == array.shape
        assert repr(restored.tolist()) == repr(array.tolist())
        assert restored.flags.writeable


def test_tensors_inside_objects_are_read_as_tensors(path):
    pixels = torch.randn(2, 3)
    data = DataProto.from_dict(non_tensors={"multi_modal_inputs": [{"pixel_values": pixels}, {}]})
    restored = stored(data, path).non_tensor_batch["multi_modal_inputs"]
    assert torch.equal(restored[0]["pixel_values"], pixels)
    assert restored[1] == {}
    restored[0]["pixel_values"] += 1


def test_numeric_columns_keep_their_type(path):
    data = DataProto.from_dict(
        non_tensors={"x": np.arange(3, dtype=np.uint16), "s": np.array(list("abc"))}
    )
    assert_same(stored(data, path), data)


def test_columns_that_are_views_of_each_other_are_stored_separately(path):
    base = torch.arange(12).view(3, 4)
    data = DataProto.from_dict({"all": base, "same": base, "some": base[:, 1:], "last": base[:, 3]})
    restored = stored(data, path)
    assert_same(restored, data)
    restored.batch["all"][0, 0] = 77
    assert restored.batch["same"][0, 0] == 0


def test_a_single_row_of_a_column_that_is_a_view_is_stored(path):
    pair = torch.arange(4.0).view(1, 4)
    data = DataProto.from_dict({"real": pair[:, 2], "exotic": pair.to(torch.complex64)[:, 3]})
    assert_same(stored(data, path), data)


def test_only_the_rows_of_a_slice_are_stored(path):
    only_tensors(100_000)[:10].save_to_disk(path)
    assert path.stat().st_size < 2000


def test_jagged_columns_that_share_offsets_share_them_when_read(path):
    restored = stored(jagged_rows(), path)
    product = restored.batch["ids"] * restored.batch["mask"]
    assert rows_of(product) == [[0, 1, 0], [3, 0], [5, 0, 7, 0]]


def test_tables_inside_a_column_are_stored(path):
    inner = TensorDict({"x": torch.arange(2)}, batch_size=[2])
    data = DataProto(TensorDict({"inner": inner, "x": torch.ones(2)}, batch_size=[2]))
    restored = stored(data, path)
    assert restored.batch["inner", "x"].tolist() == [0, 1]
    assert restored.batch["x"].tolist() == [1.0, 1.0]


def test_odd_column_names_are_kept_apart(path):
    names = ["a", "a/offsets", "document", "pool", "0.a", "", "ä"]
    data = DataProto.from_dict({name: torch.tensor([i]) for i, name in enumerate(names)})
    assert_same(stored(data, path), data)


def test_a_gradient_is_not_stored(path):
    data = DataProto.from_dict({"t": torch.ones(2, requires_grad=True)})
    assert stored(data, path).batch["t"].requires_grad is False


# ---- the file ------------------------------------------------------------------------------------


def test_the_file_is_plain_safetensors(path):
    numbered(3).save_to_disk(path)
    with safe_open(path, framework="pt") as file:
        assert file.get_tensor("0.number").tolist() == [0, 1, 2]
        document = json.loads(file.get_tensor("document").numpy().tobytes())
        assert file.metadata() == {"format": "verl.DataProto/1"}
    assert document["meta_info"] == {"temperature": 0.7}
    assert document["non_tensor_batch"]["name"] == {"$objects": [[3], ["row 0", "row 1", "row 2"]]}


def test_paths_may_be_strings_and_a_file_is_replaced_as_a_whole(path, tmp_path):
    numbered(3).save_to_disk(str(path))
    only_tensors(2).save_to_disk(str(path))
    assert_same(DataProto.load_from_disk(str(path)), only_tensors(2))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_could_not_be_written_leaves_the_old_one(path, tmp_path):
    numbered(3).save_to_disk(path)
    with pytest.raises(ValueError, match="cannot write"):
        DataProto(meta_info={"x": object()}).save_to_disk(path)
    assert_same(DataProto.load_from_disk(path), numbered(3))
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_could_not_be_put_in_its_place_leaves_nothing_behind(path, tmp_path):
    path.mkdir()
    with pytest.raises(OSError, match=r"batch\.safetensors"):
        numbered(3).save_to_disk(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_file_is_a_file_not_found_error(path):
    with pytest.raises(FileNotFoundError, match=r"batch\.safetensors"):
        DataProto.load_from_disk(path)


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (1 + 2j, "builtins.complex"),
        (bytearray(b"x"), "builtins.bytearray"),
        (Color.RED, "Color"),
        (Pair(1, 2), "Pair"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (print, "builtin_function"),
        (torch.float32, "torch.dtype"),
        (torch.nn.Parameter(torch.ones(1)), "Parameter"),
        (torch.eye(2).to_sparse(), "torch.Tensor"),
        (np.zeros(2, dtype=[("a", "i4")]), "numpy.ndarray"),
    ],
)
def test_what_is_not_plain_data_is_refused_with_its_place_type_and_a_way_out(value, kind, path):
    with pytest.raises(ValueError, match=rf"meta_info\['x'\]\[0\]\['k'\].*{kind}.*data\.select"):
        DataProto(meta_info={"x": [{"k": value}]}).save_to_disk(path)
    with pytest.raises(ValueError, match=rf"non_tensor_batch\['y'\]\[1\].*{kind}.*data\.select"):
        DataProto.from_dict(non_tensors={"y": [1, value]}).save_to_disk(path)
    assert not path.exists()


def test_values_that_contain_themselves_or_nest_without_end_are_refused(path):
    knot: list = []
    knot.append({"back": knot})
    with pytest.raises(ValueError, match=r"\['back'\].*contains itself"):
        DataProto(meta_info={"x": knot}).save_to_disk(path)
    deep: list = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match="levels deep"):
        DataProto(meta_info={"x": deep}).save_to_disk(path)


def test_a_value_may_occur_twice_without_containing_itself(path):
    shared = [1]
    assert stored_value([shared, shared], path) == [[1], [1]]


def test_columns_without_bytes_are_refused_by_name(path):
    with pytest.raises(ValueError, match=r"0\.t.*sparse"):
        DataProto.from_dict({"t": torch.eye(2).to_sparse()}).save_to_disk(path)
    objects = DataProto(TensorDict({"x": NonTensorData(1)}, batch_size=[2]))
    with pytest.raises(ValueError, match=r"0\.x.*non_tensor_batch"):
        objects.save_to_disk(path)


class Bomb:
    """Leaves a trace when a pickle of it is loaded."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self):
        return Path.touch, (self.trace,)


def test_a_pickle_is_refused_and_not_loaded(path, tmp_path):
    trace = tmp_path / "trace"
    path.write_bytes(pickle.dumps(Bomb(trace)))
    with pytest.raises(ValueError, match=r"batch\.safetensors is no batch"):
        DataProto.load_from_disk(path)
    torch.save({"x": torch.ones(2)}, path)
    with pytest.raises(ValueError, match=r"batch\.safetensors is no batch"):
        DataProto.load_from_disk(path)
    assert not trace.exists()


@pytest.mark.parametrize(
    "garbage", [b"", b"x", b"\x00" * 100, b"\xff" * 1000, b"{}", b"PK\x03\x04"]
)
def test_garbage_is_refused(garbage, path):
    path.write_bytes(garbage)
    with pytest.raises(ValueError, match=r"batch\.safetensors is no batch"):
        DataProto.load_from_disk(path)


def test_a_file_cut_off_anywhere_is_refused(path):
    numbered(3).save_to_disk(path)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"batch\.safetensors is no batch"):
            DataProto.load_from_disk(path)


def test_other_safetensors_files_are_refused(path):
    save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="no batch"):
        DataProto.load_from_disk(path)


def document(**fields: object) -> str:
    empty = {"format": "verl.DataProto/1", "batch": None, "non_tensor_batch": {}, "meta_info": {}}
    return json.dumps({**empty, **fields})


def one_column(**column: object) -> str:
    return document(batch={"batch_size": [1], "columns": [["a", column]]})


@pytest.mark.parametrize(
    "text",
    [
        "not json",
        "[]",
        "{}",
        "[" * 100_000,
        document(format="other"),
        document(meta_info={"x": {"$unknown": 1}}),
        document(meta_info={"x": {"$tuple": 1}}),
        document(meta_info={"x": {"$bytes": "?"}}),
        document(meta_info={"x": {"$array": ["|O", [1], 0, 8]}}),
        document(meta_info={"x": {"$array": ["<i8", [99], 0, 8]}}),
        document(meta_info={"x": {"$tensor": ["load", [1], 0, 8]}}),
        document(meta_info={"x": {"$objects": [[2], [1]]}}),
        one_column(dense=["missing", "int64", [1]]),
        one_column(dense=["pool", "int64", [99]]),
        one_column(other=[]),
        one_column(jagged=[]),
    ],
)
def test_a_damaged_document_is_refused(text, path):
    DataProto().save_to_disk(path)
    entries = load_file(path)
    entries["document"] = torch.tensor(list(text.encode()), dtype=torch.uint8)
    save_file(entries, path)
    with pytest.raises(ValueError, match=r"batch\.safetensors is no batch"):
        DataProto.load_from_disk(path)


def test_an_undamaged_document_is_read(path):
    DataProto().save_to_disk(path)
    entries = load_file(path)
    entries["document"] = torch.tensor(list(document().encode()), dtype=torch.uint8)
    save_file(entries, path)
    assert_same(DataProto.load_from_disk(path), DataProto())
