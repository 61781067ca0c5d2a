"""Any plain state comes back from disk exactly as it was, and nothing else can be written."""

import math
import struct
import tracemalloc
import warnings
from collections import OrderedDict
from enum import IntEnum

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.torch import load_file

from verl.utils.checkpoint.layout import CheckpointCorruptError
from verl.utils.checkpoint.safetensors_file import TensorSource, write_safetensors
from verl.utils.checkpoint.tensor_store import TORCH_DTYPES, has_state, load_state, save_state

QUANTIZED = ("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
NAN_WITH_PAYLOAD = struct.unpack(">d", bytes.fromhex("fff8000000000abc"))[0]
DENSE_DTYPES = {name: dtype for name, dtype in TORCH_DTYPES.items() if name not in QUANTIZED}


def same(left, right):
    """Equal in value, in type and in every bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        octets = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right) if t.numel()]
        return not octets or torch.equal(*octets)
    if isinstance(left, np.ndarray | np.generic):
        same_kind = left.dtype == right.dtype and left.shape == right.shape
        return same_kind and left.tobytes() == right.tobytes()
    if isinstance(left, dict):
        keys = [(type(key), key) for key in left] == [(type(key), key) for key in right]
        return keys and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right)
    return left == right


def test_the_comparison_of_these_tests_sees_every_bit():
    assert not same(NAN_WITH_PAYLOAD, math.nan)
    assert not same(0.0, -0.0)
    assert not same(1, True)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(torch.zeros(2), torch.zeros(2, 1))


def round_trip(folder, state, **options):
    save_state(folder, "state", state, **options)
    return load_state(folder, "state")


texts = st.text(st.characters(exclude_categories=[]), max_size=8)  # lone surrogates too
arrays = hnp.arrays(
    dtype=st.one_of(
        hnp.scalar_dtypes(),
        hnp.unicode_string_dtypes(max_len=4),
        hnp.byte_string_dtypes(max_len=4),
    ),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
)
tensors = hnp.arrays(
    dtype=st.sampled_from(["f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "?"]),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
).map(torch.from_numpy)
leaves = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=2**200),
    st.floats(allow_nan=True, allow_infinity=True, width=64),
    texts,
    st.binary(max_size=8),
    arrays,
    hnp.arrays("f4", ()).map(lambda array: array[()]),
    tensors,
    tensors.filter(torch.is_floating_point).map(lambda tensor: tensor.bfloat16()),
)
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(texts, st.integers()), inner, max_size=4),
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(state=states, max_shard_bytes=st.sampled_from([1, 16, 1 << 30]))
def test_every_state_comes_back_with_every_type_and_bit(tmp_path_factory, state, max_shard_bytes):
    folder = tmp_path_factory.mktemp("state")
    assert same(round_trip(folder, state, max_shard_bytes=max_shard_bytes), state)


@pytest.mark.parametrize("name", DENSE_DTYPES)
def test_a_tensor_of_every_dtype_comes_back(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls complex32 experimental
        octets = torch.arange(96, dtype=torch.uint8)
        tensor = octets.view(DENSE_DTYPES[name]) if name != "bool" else octets % 2 == 0
        loaded = round_trip(tmp_path, {"t": tensor})["t"]
        assert same(loaded, tensor)


@pytest.mark.parametrize(
    "value",
    [
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        NAN_WITH_PAYLOAD,
        5e-324,
        2**63,
        -(2**5000),
        True,
        "\ud800\udc00",
        {1: "int", "1": "text"},
        {"$tensor": 1},
        {},
        (),
        [[], ()],
        b"",
    ],
)
def test_what_json_would_change_is_kept(tmp_path, value):
    assert same(round_trip(tmp_path, value), value)


def test_views_conjugates_and_parameters_are_stored_by_content(tmp_path):
    base = torch.arange(12.0).reshape(3, 4)
    complex_view = torch.tensor([1 + 2j, 3 - 4j]).conj()
    loaded = round_trip(
        tmp_path,
        {
            "transposed": base.T,
            "strided": base[:, ::2],
            "expanded": torch.ones(1).expand(3),
            "single": torch.arange(4.0).as_strided((1,), (0,), 2),
            "conjugate": complex_view,
            "parameter": torch.nn.Parameter(base.clone()),
        },
    )
    assert torch.equal(loaded["transposed"], base.T)
    assert loaded["strided"].tolist() == [[0.0, 2.0], [4.0, 6.0], [8.0, 10.0]]
    assert loaded["expanded"].tolist() == [1.0, 1.0, 1.0]
    assert loaded["single"].tolist() == [2.0]
    assert loaded["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert type(loaded["parameter"]) is torch.Tensor
    assert not loaded["parameter"].requires_grad


class Colour(IntEnum):
    RED = 1


cyclic: list = []
cyclic.append(cyclic)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "builtins.object"),
        ({1, 2}, "builtins.set"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        (Colour.RED, "Colour"),
        (torch.Size([1]), "torch.Size"),
        (lambda: None, "function"),
        (1j, "complex"),
        (np.array([object()]), "numpy.ndarray"),
        (np.zeros(2, dtype=[("x", "f4")]), "numpy.ndarray"),
        (np.bytes_(b"a\0"), "numpy.bytes_"),
        ({(1, 2): 0}, r"its key \(1, 2\)"),
        ({True: 0}, "its key True"),
        (torch.zeros(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (cyclic, "contains itself"),
    ],
)
def test_anything_else_is_refused_with_its_place(tmp_path, value, reason):
    with pytest.raises(ValueError, match=rf"state\['optimizer'\]\[3\]\['x'\].*{reason}"):
        save_state(tmp_path, "state", {"optimizer": [0, 1, 2, {"x": value}]})
    assert list(tmp_path.iterdir()) == []


def test_a_part_that_occurs_twice_does_not_contain_itself(tmp_path):
    part = [1, {"x": 2}]
    assert round_trip(tmp_path, {"a": part, "b": (part, part)}) == {"a": part, "b": (part, part)}


def test_nesting_beyond_the_limit_is_refused(tmp_path):
    state: list = []
    for _ in range(300):
        state = [state]
    with pytest.raises(ValueError, match="nested more than 200 levels"):
        save_state(tmp_path, "state", state)


def test_the_state_of_a_torch_optimizer_continues_exactly(tmp_path):
    def build():
        torch.manual_seed(3)
        layer = torch.nn.Linear(4, 2)
        adam = torch.optim.AdamW(layer.parameters(), lr=0.1)
        return layer, adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda step: 1 / (step + 1))

    def step(layer, adam, schedule, scale):
        layer(torch.full((1, 4), scale)).sum().backward()
        adam.step()
        adam.zero_grad()
        schedule.step()

    layer, adam, schedule = build()
    step(layer, adam, schedule, 1.0)
    state = {"w": layer.state_dict(), "adam": adam.state_dict(), "lr": schedule.state_dict()}
    state["w"] = dict(state["w"])
    loaded = round_trip(tmp_path, state)
    step(layer, adam, schedule, 2.0)

    other, other_adam, other_schedule = build()
    other.load_state_dict(loaded["w"])
    other_adam.load_state_dict(loaded["adam"])
    other_schedule.load_state_dict(loaded["lr"])
    step(other, other_adam, other_schedule, 2.0)
    assert torch.equal(other.weight, layer.weight)
    assert other_schedule.get_last_lr() == schedule.get_last_lr()


def test_tensors_are_spread_over_files_of_the_size_asked_for(tmp_path):
    state = {name: torch.zeros(100) for name in "abcde"}  # 400 bytes each
    state["large"] = torch.ones(1000)
    save_state(tmp_path, "opt", state, max_shard_bytes=800)
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert files == [f"opt-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert same(load_state(tmp_path, "opt"), state)


def test_the_files_are_ordinary_safetensors(tmp_path):
    save_state(tmp_path, "opt", {"m": torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "n": {7: 1}})
    (tensor,) = load_file(tmp_path / "opt.safetensors").values()
    assert tensor.dtype == torch.bfloat16
    assert tensor.tolist() == [1.5, 2.5]


def test_saving_copies_one_tensor_at_a_time(tmp_path):
    """Transposed arrays must be copied to be written; the copies never add up."""
    arrays = [np.zeros((1000, 1000), dtype=np.float32).T for _ in range(8)]  # 4 MB each
    tracemalloc.start()
    save_state(tmp_path, "state", arrays)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 6e6


@pytest.mark.gpu
def test_tensors_on_the_gpu_come_back_on_the_cpu_bit_for_bit(tmp_path):
    tensors = [torch.randn(64, 3, device="cuda").to(dtype).T for dtype in (torch.bfloat16,) * 2]
    loaded = round_trip(tmp_path, tensors)
    assert all(
        same(ours.cpu().contiguous(), back) for ours, back in zip(tensors, loaded, strict=True)
    )


def test_has_state_tells_whether_a_name_was_saved(tmp_path):
    save_state(tmp_path, "extra", None)
    assert has_state(tmp_path, "extra")
    assert not has_state(tmp_path, "optimizer")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\x80\x04\x95",
        b"[" * 100_000,
        b'{"format": "other", "version": 1}',
        b'{"format":"verl-state","version":1,"files":["../x.safetensors"],"tree":1}',
        b'{"format":"verl-state","version":1,"files":["a.pkl"],"tree":1}',
        b'{"format":"verl-state","version":1,"files":[],"tree":{"$tensor":["0 x","float32",[1]]}}',
        b'{"format":"verl-state","version":1,"files":[],"tree":{"$call":["os.system","id"]}}',
        b'{"format":"verl-state","version":1,"files":[],"tree":{"$scalar":["O","AAAA"]}}',
        b'{"format":"verl-state","version":1,"files":[],"tree":{"$dict":[[[1],2]]}}',
        b'{"format":"verl-state","version":1,"files":[],"tree":{"$bytes":"QQ==!"}}',
    ],
)
def test_a_file_that_no_save_wrote_is_refused(tmp_path, text):
    (tmp_path / "state.json").write_bytes(text)
    with pytest.raises(CheckpointCorruptError, match=r"state\.json"):
        load_state(tmp_path, "state")


def test_the_tree_reaches_the_file_system_as_it_is_written(tmp_path, monkeypatch):
    """Nothing waits in a buffer for a `close` that a full disk would refuse."""
    seen = []

    def write(stream, octets):
        stream.write(octets)
        seen.append((tmp_path / "state.json").stat().st_size == len(octets))

    monkeypatch.setattr("verl.utils.checkpoint.tensor_store.write_all", write)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_state(tmp_path, "state", {"a": 1})
    assert seen == [True]


def test_a_tensor_file_with_the_wrong_shape_for_the_state_is_refused(tmp_path):
    save_state(tmp_path, "state", {"a": torch.zeros(4)})
    path = tmp_path / "state.safetensors"
    path.unlink()
    small = TensorSource(
        name="0 ['a']", dtype="U8", shape=(3,), num_bytes=3, read=lambda: memoryview(b"abc")
    )
    write_safetensors(path, [small])
    with pytest.raises(CheckpointCorruptError, match="not a saved state"):
        load_state(tmp_path, "state")
