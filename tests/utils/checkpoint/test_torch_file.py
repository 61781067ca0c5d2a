"""A pickle is read without running any of it, and a hostile one is refused or harmless."""

import io
import pickle
import pickletools
import zipfile
from collections import OrderedDict
from contextlib import suppress

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.checkpoint import torch_file
from verl.utils.checkpoint.torch_file import (
    Record,
    Symbol,
    UnreadablePickleError,
    read_pickle,
    read_torch_file,
)


class Strikes:
    """Leaves a trace when it is unpickled."""

    struck = 0

    @classmethod
    def strike(cls, *_):
        cls.struck += 1

    def __reduce__(self):
        return Strikes.strike, ("now",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_comes_back_as_it_was(protocol):
    value = {"a": [1, 2.5, None, True, "text"], 3: (4, 5), "big": 2**70, "none": ()}
    assert read_pickle(pickle.dumps(value, protocol)) == value


def test_a_call_is_described_and_not_made():
    assert pickle.loads(pickle.dumps(Strikes())) is None
    assert Strikes.struck == 1, "the trap works"
    found = read_pickle(pickle.dumps({"weight": Strikes()}, 2))
    assert Strikes.struck == 1
    record = found["weight"]
    assert isinstance(record, Record)
    assert record.arguments == ("now",)


def test_names_are_not_looked_up():
    program = b"\x80\x02cno.such.module\nthing\n)R."
    assert read_pickle(program).maker == Symbol("no.such.module", "thing")


@pytest.mark.parametrize(
    "program",
    [
        b"",
        b".",
        b"\x80\x02",
        b"\x80\x02t.",  # a tuple since a mark that is not there
        b"\x80\x02R.",  # a call of nothing
        b"\x80\x02K\x01h\x05.",  # a memory that was never written
        b"\x80\x02K\x01}b.",  # a state for a number
        b"\x80\x02K\x01K\x02K\x03s.",  # an item of a number
        b"\x80\x02P0\n.",
        b"(S'os'\ni.",
        b"\x80\x02\x82\x01.",  # extension registry
        b"not a pickle at all",
    ],
)
def test_what_is_not_a_pickle_of_tensors_is_refused(program):
    with pytest.raises(UnreadablePickleError):
        read_pickle(program)


def test_doubling_costs_no_more_than_its_own_length():
    """Thirty pairs of pairs are a tuple of 2**30 leaves, each of which hashing it would visit."""
    tuples = b"K\x01\x85" + b"q\x00h\x00\x86" * 30
    found = read_pickle(b"\x80\x02}" + tuples + b"K\x02s.")
    assert list(found.values()) == [2]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_pickle_is_data_or_an_error_and_never_code(data):
    program = bytearray(pickle.dumps(OrderedDict(a=Strikes(), b=[1, (2, "x")]), 2))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(program) - 1))
        program[place] = data.draw(st.integers(0, 255))
    before = Strikes.struck
    with suppress(UnreadablePickleError):
        read_pickle(bytes(program))
    assert Strikes.struck == before


# ---- files ---------------------------------------------------------------------------------------


def rewritten(source, target, change, *, compression=zipfile.ZIP_STORED):
    """The archive with `change(name, octets)` in place of each entry."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "saved.pt"
    state = OrderedDict(
        matrix=torch.arange(6.0).reshape(2, 3),
        turned=torch.arange(6).reshape(2, 3).T,
        parameter=torch.nn.Parameter(torch.ones(2, dtype=torch.bfloat16)),
        tail=torch.arange(10, dtype=torch.int32)[7:],
        empty=torch.zeros(0, 3),
        step=7,
    )
    torch.save(state, path)
    return path


def test_tensors_of_every_form_are_read(saved):
    found = read_torch_file(saved, rank=0)
    assert {name: tensor.read().tolist() for name, tensor in found.items()} == {
        "matrix": [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]],
        "turned": [[0, 3], [1, 4], [2, 5]],
        "parameter": [1.0, 1.0],
        "tail": [7, 8, 9],
        "empty": [],
    }
    assert found["parameter"].read().dtype == torch.bfloat16


def test_a_file_with_an_attack_in_it_gives_its_tensors_and_nothing_else(tmp_path):
    path = tmp_path / "attack.pt"
    torch.save({"w": torch.ones(2), "attack": Strikes()}, path)
    before = Strikes.struck
    assert list(read_torch_file(path, rank=0)) == ["w"]
    assert Strikes.struck == before


def test_a_compressed_entry_is_refused_before_it_grows(saved, tmp_path):
    bomb = rewritten(
        saved, tmp_path / "bomb.pt", lambda name, old: old, compression=zipfile.ZIP_DEFLATED
    )
    with pytest.raises(ValueError, match=r"data\.pkl is compressed"):
        read_torch_file(bomb, rank=0)


def test_a_storage_of_another_size_is_refused(saved, tmp_path):
    cut = rewritten(
        saved, tmp_path / "cut.pt", lambda name, old: old[:-4] if "/data/0" in name else old
    )
    with pytest.raises(ValueError, match="has 20 bytes"):
        read_torch_file(cut, rank=0)["matrix"].read()


def test_a_tensor_beyond_its_storage_is_refused(saved, tmp_path):
    def longer(name, old):
        if not name.endswith("data.pkl"):
            return old
        wide = old.replace(b"K\x02K\x03\x86", b"K\x02K\x63\x86")  # 2 x 3 becomes 2 x 99
        assert wide != old
        return wide

    with pytest.raises(ValueError, match="beyond its storage"):
        read_torch_file(rewritten(saved, tmp_path / "wide.pt", longer), rank=0)["matrix"].read()


def test_a_file_that_is_no_archive_is_refused_by_name(tmp_path):
    path = tmp_path / "old.pt"
    buffer = io.BytesIO()
    torch.save(torch.ones(1), buffer, _use_new_zipfile_serialization=False)
    path.write_bytes(buffer.getvalue())
    with pytest.raises(ValueError, match=r"old\.pt is not a file of tensors"):
        read_torch_file(path, rank=0)


def test_a_pickle_that_is_no_mapping_is_refused(tmp_path):
    path = tmp_path / "list.pt"
    torch.save([torch.ones(1)], path)
    with pytest.raises(ValueError, match="does not hold tensors by name"):
        read_torch_file(path, rank=0)


def test_every_instruction_of_the_files_that_torch_writes_is_known(saved):
    known = {*torch_file.IGNORED, *torch_file.PUSHES_ARGUMENT, *torch_file.CONSTANTS}
    known |= {*torch_file.INSTRUCTIONS, "STOP"}
    with zipfile.ZipFile(saved) as archive:
        program = archive.read("saved/data.pkl")
    assert {opcode.name for opcode, _, _ in pickletools.genops(program)} <= known
