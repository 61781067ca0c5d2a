import json
import logging
import os
import stat
import sys
import threading
import uuid
from pathlib import Path

import fsspec
import pytest

from verl.utils import fs
from verl.utils.environment import temp_env_var
from verl.utils.fs import (
    copy_local_path_from_hdfs,
    copy_to_local,
    copy_to_shm,
    is_non_local,
    local_mkdir_safe,
    verify_copy,
)


@pytest.fixture
def remote():
    """A directory of fsspec's in-memory file system, which stands for s3 and the like."""
    memory = fsspec.filesystem("memory")
    root = f"/{uuid.uuid4().hex}"
    memory.pipe({f"{root}/model/config.json": b"{}", f"{root}/model/part/weights": b"12345"})
    yield f"memory:/{root}/model"
    memory.rm(root, recursive=True)


def test_a_path_with_a_scheme_is_elsewhere():
    assert is_non_local("hdfs://cluster/x")
    assert is_non_local("s3://bucket/x")
    assert not is_non_local("/data/x")
    assert not is_non_local("Qwen/Qwen3-0.6B")
    assert not is_non_local("file:///data/x")


def test_local_paths_and_hub_names_pass_through(tmp_path):
    assert copy_to_local(str(tmp_path)) == str(tmp_path)
    assert copy_to_local("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert copy_to_local("file:///data/x") == "/data/x"


def test_a_directory_is_copied_whole_and_only_once(remote, tmp_path):
    local = Path(copy_to_local(remote, cache_dir=str(tmp_path)))
    assert local.name == "model"
    assert (local / "config.json").read_text() == "{}"
    assert (local / "part" / "weights").read_bytes() == b"12345"
    before = (local / "config.json").stat()
    assert copy_to_local(remote + "/", cache_dir=str(tmp_path)) == str(local)
    assert (local / "config.json").stat().st_ino == before.st_ino
    copy_local_path_from_hdfs(remote, cache_dir=str(tmp_path), always_recopy=True)
    assert (local / "config.json").stat().st_ino != before.st_ino


@pytest.mark.parametrize("harm", ["changed", "added", "removed"])
def test_a_copy_that_is_not_what_was_copied_is_made_again(remote, tmp_path, harm, caplog):
    local = Path(copy_to_local(remote, cache_dir=str(tmp_path)))
    if harm == "changed":
        (local / "part" / "weights").write_bytes(b"54321")
    elif harm == "added":
        (local / "modeling.py").write_text("planted")
    else:
        (local / "config.json").unlink()
    assert copy_to_local(remote, cache_dir=str(tmp_path)) == str(local)
    files = {path.name: path.read_bytes() for path in local.rglob("*") if path.is_file()}
    assert files == {"config.json": b"{}", "weights": b"12345"}
    assert "copying again" in caplog.text


def test_copies_lie_in_a_folder_of_the_user(remote, tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    local = Path(copy_to_local(remote))
    assert local.is_relative_to(tmp_path / "verl" / "copies")
    for folder in (local.parent, local.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "own"))
    assert Path(copy_to_local(remote)).is_relative_to(tmp_path / "own" / "copies")


def planted(remote: str, cache: Path) -> Path:
    """A model of somebody else, under the name that the cache would use."""
    folder = Path(fs.get_local_temp_path(remote, str(cache)))
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("planted")
    record = {"copy": fs.fingerprint(folder), "source": None}
    (folder.parent / fs.RECORD).write_text(json.dumps(record))
    return folder


@pytest.mark.parametrize("way", ["writable", "link", "owner", "owner of the cache"])
def test_a_folder_that_is_not_the_users_alone_is_refused(remote, tmp_path, way, monkeypatch):
    folder = planted(remote, tmp_path / "cache")
    if way == "writable":
        folder.parent.chmod(0o777)
    elif way == "link":
        folder.parent.rename(tmp_path / "theirs")
        folder.parent.symlink_to(tmp_path / "theirs")
    elif way == "owner" and os.geteuid() == 0:
        os.chown(folder.parent, 12345, 12345)
    elif way == "owner of the cache" and os.geteuid() == 0:
        os.chown(tmp_path / "cache", 12345, 12345)
    else:
        monkeypatch.setattr(fs.os, "geteuid", lambda: 12345)
    with pytest.raises(PermissionError, match="VERL_CACHE"):
        copy_to_local(remote, cache_dir=str(tmp_path / "cache"))


def test_of_a_large_file_samples_are_hashed(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "SAMPLE_BYTES", 4)
    file = tmp_path / "weights"

    def fingerprint_of(content: bytes) -> dict[str, str]:
        file.write_bytes(content)
        os.utime(file, ns=(0, 0))
        return fs.fingerprint(file)

    before = fingerprint_of(bytes(200))
    for changed in (0, 91, 199):
        assert fingerprint_of(bytes(changed) + b"x" + bytes(199 - changed)) != before
    assert fingerprint_of(bytes(90) + b"x" + bytes(109)) == before  # between two samples
    os.utime(file, ns=(0, 1))
    assert fs.fingerprint(file) != before


def test_a_file_is_copied_too(remote, tmp_path):
    local = Path(copy_to_local(f"{remote}/part/weights", cache_dir=str(tmp_path)))
    assert local.read_bytes() == b"12345"


def test_a_copy_that_fails_leaves_nothing_behind(tmp_path):
    missing = f"memory://{uuid.uuid4().hex}/model"
    with pytest.raises(FileNotFoundError):
        copy_to_local(missing, cache_dir=str(tmp_path))
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path.name for path in left] in ([], [".file.lock"])


def test_a_copy_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "cache" / "model"
    halfway, finish = threading.Event(), threading.Event()

    def fetch(partial: Path) -> None:
        partial.mkdir()
        (partial / "a").write_text("a")
        halfway.set()
        assert finish.wait(60)
        (partial / "b").write_text("b")

    first = threading.Thread(target=fs._copy_once, args=(target, ".lock", False, fetch))
    first.start()
    assert halfway.wait(60)
    assert not target.exists()
    second = threading.Thread(
        target=fs._copy_once, args=(target, ".lock", False, lambda _: pytest.fail("copied twice"))
    )
    second.start()
    finish.set()
    first.join(60)
    second.join(60)
    assert sorted(path.name for path in target.iterdir()) == ["a", "b"]
    assert not list(target.parent.glob("*.partial"))


def test_an_unknown_file_system_is_named(tmp_path):
    with pytest.raises(ValueError, match="Protocol not known: nosuch"):
        copy_to_local("nosuch://x/y", cache_dir=str(tmp_path))


def test_shared_memory_serves_when_it_has_room(tmp_path, monkeypatch, caplog):
    shm = tmp_path / "shm"
    shm.mkdir()
    monkeypatch.setattr(fs, "SHARED_MEMORY", shm)
    source = tmp_path / "model"
    source.mkdir()
    (source / "weights").write_bytes(b"12345")
    staged = Path(copy_to_local(str(source), use_shm=True))
    assert staged.is_relative_to(shm)
    assert (staged / "weights").read_bytes() == b"12345"
    assert copy_to_shm("org/hub-name") == "org/hub-name"
    (source / "weights").write_bytes(b"54321")
    assert copy_to_shm(str(source)) == str(staged)
    assert (staged / "weights").read_bytes() == b"54321"
    staged.parent.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert copy_to_shm(str(source)) == str(source)
    assert "can be written by others" in caplog.text

    monkeypatch.setattr(fs.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 3}))
    other = tmp_path / "other"
    other.write_bytes(b"123456")
    with caplog.at_level(logging.WARNING):
        assert copy_to_shm(str(other)) == str(other)
    assert "needs 6 bytes" in caplog.text


def test_a_copy_with_a_missing_or_short_file_is_found(tmp_path):
    for name, content in ("a", "123"), ("b", "45"):
        for side in ("source", "copy"):
            (tmp_path / side).mkdir(exist_ok=True)
            (tmp_path / side / name).write_text(content)
    assert verify_copy(str(tmp_path / "source"), str(tmp_path / "copy"))
    (tmp_path / "copy" / "a").write_text("12")
    (tmp_path / "copy" / "b").unlink()
    assert not verify_copy(str(tmp_path / "source"), str(tmp_path / "copy"))


def test_modelscope_is_asked_for_by_name_when_it_is_missing():
    with (
        temp_env_var("VERL_USE_MODELSCOPE", "True"),
        pytest.raises(ImportError, match="pip install modelscope"),
    ):
        copy_to_local("org/name")


def test_a_model_name_is_looked_up_on_modelscope_and_a_folder_is_not(tmp_path, monkeypatch):
    """With a package of that name whose function has the signature of the real one."""
    (tmp_path / "modelscope.py").write_text(
        "def snapshot_download(model_id):\n    return f'/hub/{model_id}'\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with temp_env_var("VERL_USE_MODELSCOPE", "1"):
            assert copy_to_local("org/name") == "/hub/org/name"
            assert copy_to_local(str(tmp_path)) == str(tmp_path)
        assert copy_to_local("org/name") == "org/name"
    finally:
        sys.modules.pop("modelscope", None)


def test_directories_are_made_once_or_twice(tmp_path):
    path = str(tmp_path / "a" / "b")
    assert local_mkdir_safe(path) == local_mkdir_safe(path) == path
    assert Path(path).is_dir()
