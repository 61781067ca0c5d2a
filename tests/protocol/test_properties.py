"""What holds for every batch, tried on random ones."""

import pickle

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.protocol.batches import assert_same
from tests.protocol.test_serialization import DTYPES
from verl.protocol import (
    DataProto,
    deserialize_single_tensor,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    serialize_single_tensor,
    unfold_batch_dim,
    unpad_dataproto,
)
from verl.protocol.storage import Fields, dump_fields, parse_fields

fast = settings(max_examples=20, deadline=None, database=None)

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.binary(max_size=5),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3),
    ),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn, num_rows: int) -> torch.Tensor:
    """Any type, any width, random bits (so also NaNs, infinities and denormals)."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = (num_rows, *draw(st.lists(st.integers(0, 3), max_size=2)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        return bits.squeeze(-1) > 127
    return bits.flatten().view(dtype).view(shape)


@st.composite
def jagged(draw: st.DrawFn, num_rows: int) -> torch.Tensor:
    lengths = draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows))
    offsets = torch.tensor([0, *np.cumsum(lengths).tolist()])
    content = torch.arange(int(offsets[-1]) * 2).view(-1, 2)
    return torch.nested.nested_tensor_from_jagged(content, offsets)


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, dense_only: bool = False) -> DataProto:
    num_rows = draw(st.integers(min_rows, 8))
    columns = {f"t{i}": draw(tensors(num_rows)) for i in range(draw(st.integers(0, 3)))}
    if not dense_only and draw(st.booleans()):
        columns["jagged"] = draw(jagged(num_rows))
    rows = st.lists(values, min_size=num_rows, max_size=num_rows)
    arrays = {f"o{i}": draw(rows) for i in range(draw(st.integers(0, 2)))}
    data = DataProto.from_dict(columns, arrays, draw(st.dictionaries(st.text(max_size=3), values)))
    data.meta_info.pop("metrics", None)  # joining parts collects them on purpose
    return data


@fast
@given(data=batches(), chunks=st.integers(1, 9))
def test_chunks_joined_are_the_whole(data, chunks):
    data.meta_info["_verl_auto_padding"] = True
    parts = data.chunk(chunks)
    assert len(parts) == chunks
    assert_same(DataProto.concat(parts), data)


@fast
@given(data=batches(min_rows=1), size=st.integers(1, 9))
def test_splits_joined_are_the_whole(data, size):
    if len(data) == 0:
        assert data.split(size) == []
        return
    parts = data.split(size)
    assert all(len(part) == size for part in parts[:-1])
    assert_same(DataProto.concat(parts), data)


@fast
@given(data=batches(), times=st.integers(0, 3))
def test_repeating_is_choosing_rows_often(data, times):
    rows = list(range(len(data)))
    assert_same(data.repeat(times), data.select_idxs([row for row in rows for _ in range(times)]))
    assert_same(data.repeat(times, interleave=False), data.select_idxs(rows * times))
    assert_same(data.repeat(times), data.sample_level_repeat([times] * len(data)))


@fast
@given(data=batches(min_rows=1), times=st.integers(1, 3))
def test_interleaved_and_plain_repetition_are_one_reordering_apart(data, times):
    plain = data.repeat(times, interleave=False)
    order = torch.arange(len(plain)).view(times, len(data)).T.reshape(-1)
    plain.reorder(order)
    assert_same(plain, data.repeat(times))


@fast
@given(data=batches(), divisor=st.integers(1, 9))
def test_padding_is_undone_by_unpadding(data, divisor):
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert len(padded) % divisor == 0
    assert 0 <= pad_size < divisor
    assert_same(unpad_dataproto(padded, pad_size), data)


@fast
@given(data=batches(min_rows=1), random=st.randoms(use_true_random=False))
def test_choosing_twice_is_choosing_by_the_chosen_numbers(data, random):
    size = len(data)
    first = [random.randrange(-size, size) for _ in range(size)] if size else []
    second = [random.randrange(size) for _ in range(3)] if size else []
    once = data.select_idxs([first[row] for row in second])
    assert_same(data.select_idxs(first).select_idxs(second), once)


@fast
@given(data=batches(), random=st.randoms(use_true_random=False))
def test_a_mask_chooses_the_rows_where_it_is_true(data, random):
    mask = [random.random() < 0.5 for _ in range(len(data))]
    numbers = [row for row, is_chosen in enumerate(mask) if is_chosen]
    assert_same(data[np.array(mask, dtype=bool)], data.select_idxs(numbers))


@fast
@given(
    data=batches(),
    start=st.none() | st.integers(-10, 10),
    stop=st.none() | st.integers(-10, 10),
    step=st.sampled_from([None, 1, 2, 3, -1, -2]),
)
def test_a_slice_is_the_choice_of_its_rows(data, start, stop, step):
    rows = list(range(len(data)))[start:stop:step]
    assert_same(data[start:stop:step], data.select_idxs(rows))


@fast
@given(data=batches(min_rows=1), random=st.randoms(use_true_random=False))
def test_reordering_is_undone_by_the_inverse_order(data, random):
    order = list(range(len(data)))
    random.shuffle(order)
    changed = data.select()
    changed.reorder(torch.tensor(order, dtype=torch.long))
    changed.reorder(torch.tensor(order, dtype=torch.long).argsort())
    assert_same(changed, data)


@fast
@given(data=batches(dense_only=True), size=st.integers(1, 9))
def test_folding_is_undone_by_unfolding(data, size):
    if len(data) % size == 0 and len(data):
        assert_same(unfold_batch_dim(fold_batch_dim(data, size)), data)


@fast
@given(data=batches())
def test_pickling_is_the_identity(data):
    assert_same(pickle.loads(pickle.dumps(data, protocol=5)), data)


@fast
@given(data=batches())
def test_storing_is_the_identity(data):
    octets = dump_fields(Fields(data.batch, data.non_tensor_batch, data.meta_info))
    assert_same(DataProto(*parse_fields(octets)), data)


@fast
@given(data=batches(), cut=st.floats(0, 0.999))
def test_a_cut_off_message_is_a_value_error(data, cut):
    octets = dump_fields(Fields(data.batch, data.non_tensor_batch, data.meta_info))
    try:
        parse_fields(octets[: int(len(octets) * cut)])
    except ValueError:
        return
    raise AssertionError("a cut-off message was accepted")


@fast
@given(data=st.data(), num_rows=st.integers(0, 4))
def test_serializing_a_tensor_is_the_identity(data, num_rows):
    tensor = data.draw(tensors(num_rows))
    restored = deserialize_single_tensor(serialize_single_tensor(tensor))
    assert_same(DataProto.from_dict({"t": restored}), DataProto.from_dict({"t": tensor}))
