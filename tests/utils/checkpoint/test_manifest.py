"""No change to a committed step goes unnoticed, and none is acted on."""

import json
import os
import random
import shutil
import time

import pytest
import torch

from verl.utils.checkpoint.layout import CheckpointCorruptError
from verl.utils.checkpoint.manifest import (
    FileRecord,
    Manifest,
    is_safe_name,
    record_file,
    verify_step,
)
from verl.utils.checkpoint.safetensors_file import read_header
from verl.utils.checkpoint.store import staged_step
from verl.utils.checkpoint.tensor_store import save_state

FILES = [
    "actor/huggingface/config.json",
    "actor/optimizer-00001-of-00002.safetensors",
    "actor/optimizer-00002-of-00002.safetensors",
    "actor/optimizer.json",
    "data.json",
    "manifest.json",
]
PICKLE = b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94."


def save(root, step=1):
    with staged_step(root, step, fingerprint={"run": {"lr": 0.5}}) as folder:
        save_state(
            folder / "actor", "optimizer", [torch.ones(4), torch.zeros(4)], max_shard_bytes=16
        )
        save_state(folder, "data", {"cursor": 3})
        (folder / "actor" / "huggingface").mkdir()
        (folder / "actor" / "huggingface" / "config.json").write_text("{}")


@pytest.fixture
def step(tmp_path):
    save(tmp_path)
    folder = tmp_path / "global_step_1"
    assert sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()) == FILES
    return folder


def overwrite(path, place, octet):
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(bytes([octet]))


def refused(folder, pattern=""):
    with pytest.raises(CheckpointCorruptError, match=pattern):
        verify_step(folder)
    return True


def test_an_untouched_step_passes(step):
    manifest = verify_step(step, step=1)
    assert sorted(manifest.files) == FILES[:-1]
    assert manifest.fingerprint == {"run": {"lr": 0.5}}


def test_every_flipped_bit_out_of_a_thousand_is_found(step):
    rng = random.Random(0)
    sizes = [(step / name).stat().st_size for name in FILES]
    num_found = 0
    for _ in range(1000):
        (name,) = rng.choices(FILES, weights=sizes)
        path = step / name
        octets = path.read_bytes()
        place, bit = rng.randrange(len(octets)), rng.randrange(8)
        overwrite(path, place, octets[place] ^ (1 << bit))
        num_found += refused(step, name)
        overwrite(path, place, octets[place])
    assert num_found == 1000
    verify_step(step)


def test_every_changed_byte_of_the_manifest_is_found(step):
    path = step / "manifest.json"
    octets = path.read_bytes()
    for place, octet in enumerate(octets):
        overwrite(path, place, ord("\t") if chr(octet).isspace() else octet ^ 1)
        refused(step, "manifest")
        overwrite(path, place, octet)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 1, 0.5, -1])
def test_a_shortened_file_is_found_and_named(step, name, kept):
    path = step / name
    size = path.stat().st_size
    os.truncate(path, {0: 0, 1: 1, 0.5: size // 2, -1: size - 1}[kept])
    assert refused(step, path.name)


@pytest.mark.parametrize("name", FILES)
def test_a_lengthened_file_is_found_and_named(step, name):
    with open(step / name, "ab") as file:
        file.write(b"\0")
    assert refused(step, name)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_found_and_named(step, name):
    (step / name).unlink()
    assert refused(step, f"{name} is missing")


@pytest.mark.parametrize("name", ["extra.txt", "actor/model.pt", ".hidden", "new/deep/file"])
def test_an_extra_file_is_found_and_named(step, name):
    (step / name).parent.mkdir(parents=True, exist_ok=True)
    (step / name).write_bytes(PICKLE)
    assert refused(step, f"{name} is not in the manifest")


@pytest.mark.parametrize("name", FILES)
def test_pickle_in_place_of_a_file_is_refused(step, name):
    (step / name).write_bytes(PICKLE)
    assert refused(step, name)


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_file_is_refused_even_to_the_same_bytes(step, name):
    copy = step.parent / "copy"
    shutil.move(step / name, copy)
    (step / name).symlink_to(copy)
    assert refused(step, name)


@pytest.mark.parametrize("kind", [os.mkfifo, os.mkdir])
def test_a_pipe_or_a_folder_in_place_of_a_file_is_refused_without_waiting(step, kind):
    for name in ("data.json", "manifest.json"):
        (step / name).unlink()
        kind(step / name)
        assert refused(step, name)
        (os.rmdir if kind is os.mkdir else os.unlink)(step / name)
        shutil.rmtree(step)
        save(step.parent)


def test_swapped_files_of_equal_size_are_found(step):
    first, second = step / FILES[1], step / FILES[2]
    assert first.stat().st_size == second.stat().st_size
    other = second.read_bytes()
    second.write_bytes(first.read_bytes())
    first.write_bytes(other)
    assert refused(step, "optimizer-00001.*optimizer-00002")


def test_a_step_under_another_number_is_refused(step):
    other = step.rename(step.parent / "global_step_9")
    with pytest.raises(CheckpointCorruptError, match="says it is step 1"):
        verify_step(other, step=9)


def test_a_link_to_a_step_is_refused(step):
    link = step.parent / "global_step_2"
    link.symlink_to(step)
    assert refused(link, "link")


def forge(folder, added=None, *, changes=None):
    """Rewrite the manifest so that it agrees with itself: damage that only malice makes."""
    names = [str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()]
    names.remove("manifest.json")
    records = {name: record_file(folder / name) for name in names}
    fields = {"step": 1, "files": {**records, **(added or {})}, "fingerprint": {}}
    manifest = Manifest(**{**fields, **(changes or {})})
    (folder / "manifest.json").write_text(manifest.to_text())


def test_a_forged_manifest_over_the_same_files_passes_so_the_tests_below_mean_something(step):
    forge(step)
    verify_step(step)


@pytest.mark.parametrize(
    "name", ["../outside", "/etc/hostname", "a/../../b", "a//b", "./a", "", "a\\b", "c:x", "a\0b"]
)
def test_a_name_that_leaves_the_folder_is_refused(step, name):
    assert not is_safe_name(name)
    forge(step, {name: FileRecord(size=1, sha256="0")})
    assert refused(step, "not a path inside the folder")


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.pkl", "a.pickle", "a.ckpt"])
def test_a_kind_of_file_that_can_hold_code_is_refused_even_if_listed(step, name):
    (step / name).write_bytes(PICKLE)
    forge(step)
    assert refused(step, f"{name} is of a kind that can hold code")


@pytest.mark.parametrize(
    "octets",
    [
        PICKLE,
        b"",
        b"\xff" * 8,
        (100 << 20).to_bytes(8, "little") + b"{",
        (2).to_bytes(8, "little") + b"{}" + b"extra",
        (8).to_bytes(8, "little") + b"[1,2,3] ",
        (9).to_bytes(8, "little") + b'{"a": 1} ',
        (100_000).to_bytes(8, "little") + b"[" * 100_000,
    ],
)
def test_a_tensor_file_that_is_none_is_refused_even_if_listed(step, octets):
    (step / "evil.safetensors").write_bytes(octets)
    forge(step)
    assert refused(step, r"evil\.safetensors")


@pytest.mark.parametrize(
    ("entries", "num_bytes"),
    [
        ({"a": ["F32", [2], [0, 4]]}, 4),  # too small for its shape
        ({"a": ["F32", [1], [0, 4]], "b": ["F32", [1], [0, 4]]}, 4),  # the same bytes twice
        ({"a": ["F32", [1], [4, 8]]}, 8),  # a gap
        ({"a": ["F32", [-1], [0, -4]]}, 0),
        ({"a": ["U8", [1.0], [0, 1]]}, 1),
        ({"a": ["U8", [10**30], [0, 10**30]]}, 1),
    ],
)
def test_a_tensor_header_that_lies_is_refused(tmp_path, entries, num_bytes):
    header = {
        name: {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        for name, (dtype, shape, offsets) in entries.items()
    }
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * num_bytes)
    with pytest.raises(CheckpointCorruptError, match=r"x\.safetensors"):
        read_header(path)


def test_a_header_may_fill_the_file_and_no_more(tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes((2).to_bytes(8, "little") + b"{}")
    assert read_header(path) == {}
    for octets, reason in (
        (b"\0" * 7, "not a safetensors file"),
        (b"\0" * 8, "malformed"),
        ((3).to_bytes(8, "little") + b"{}", "not a safetensors file"),
    ):
        path.write_bytes(octets)
        with pytest.raises(CheckpointCorruptError, match=reason):
            read_header(path)


def test_huge_headers_and_manifests_are_refused_within_a_second(step):
    with open(step / "evil.safetensors", "wb") as file:
        file.write((100 << 20).to_bytes(8, "little"))
        file.truncate((100 << 20) + 8)
    forge(step)
    start = time.thread_time()
    assert refused(step, r"evil\.safetensors: not a safetensors file")
    os.truncate(step / "manifest.json", 1 << 30)
    assert refused(step, "larger than")
    assert time.thread_time() - start < 1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"files": []},
        {"files": {"data.json": FileRecord(size="1", sha256="")}},
        {"step": None},
        {"step": "1"},
        {"fingerprint": [1]},
    ],
)
def test_a_manifest_of_another_shape_is_refused_even_if_it_agrees_with_itself(step, changes):
    forge(step, changes=changes)
    assert refused(step, r"manifest\.json cannot be used")


@pytest.mark.parametrize("text", ["", "[]", "{}", "NaN", "[" * 10**6, '{"format": "other"}'])
def test_a_manifest_that_is_none_is_refused(step, text):
    (step / "manifest.json").write_text(text)
    assert refused(step, r"manifest\.json cannot be used")
