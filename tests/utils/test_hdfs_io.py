import os

import pytest

from verl.utils import hdfs_io

# Answers like Hadoop's client for a file system under $HDFS_ROOT, and notes what it was asked.
FAKE_HDFS = """#!/bin/sh
echo "$@" >> "$HDFS_ROOT/calls"
shift
command=$1
shift
local_path() { echo "$1" | sed "s#^hdfs://#$HDFS_ROOT/#"; }
for last; do :; done
case $command in
  -test) [ -e "$(local_path "$last")" ];;
  -mkdir) mkdir -p "$(local_path "$last")";;
  -put|-get|-cp) cp -r "$(local_path "$2")" "$(local_path "$3")";;
esac
"""


@pytest.fixture
def hdfs_root(tmp_path, monkeypatch):
    root = tmp_path / "hdfs"
    root.mkdir()
    command = tmp_path / "bin" / "hdfs"
    command.parent.mkdir()
    command.write_text(FAKE_HDFS)
    command.chmod(0o755)
    monkeypatch.setenv("HDFS_ROOT", str(root))
    monkeypatch.setenv("PATH", f"{command.parent}{os.pathsep}{os.environ['PATH']}")
    return root


def test_local_paths_need_no_hadoop(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    folder = str(tmp_path / "a" / "b")
    hdfs_io.makedirs(folder)
    hdfs_io.makedirs(folder, exist_ok=True)
    with pytest.raises(FileExistsError):
        hdfs_io.makedirs(folder)
    assert hdfs_io.exists(folder)
    (tmp_path / "a" / "b" / "file").write_text("x")
    assert hdfs_io.copy(folder, str(tmp_path / "copy"))
    assert (tmp_path / "copy" / "file").read_text() == "x"
    assert hdfs_io.copy(str(tmp_path / "copy" / "file"), str(tmp_path / "single"))
    assert (tmp_path / "single").read_text() == "x"
    assert not hdfs_io.exists(str(tmp_path / "nothing"))


def test_without_the_hdfs_command_the_way_out_is_named(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match=r"hdfs://c/x is on HDFS.*not on the PATH"):
        hdfs_io.exists("hdfs://c/x")


def test_files_travel_to_hdfs_and_back(hdfs_root, tmp_path):
    (tmp_path / "file").write_text("x")
    assert not hdfs_io.exists("hdfs://c")
    hdfs_io.makedirs("hdfs://c")
    hdfs_io.makedirs("hdfs://c", exist_ok=True)
    with pytest.raises(FileExistsError, match="hdfs://c exists already"):
        hdfs_io.makedirs("hdfs://c")
    hdfs_io.copy(str(tmp_path / "file"), "hdfs://c/file")
    hdfs_io.copy("hdfs://c/file", "hdfs://c/second")
    hdfs_io.copy("hdfs://c/second", str(tmp_path / "back"))
    assert (tmp_path / "back").read_text() == "x"
    assert (hdfs_root / "calls").read_text().splitlines()[0] == "dfs -test -e hdfs://c"


@pytest.mark.usefixtures("hdfs_root")
def test_a_failing_command_is_an_error_with_its_message(tmp_path):
    with pytest.raises(RuntimeError, match=r"-get -f hdfs://c/missing .* failed with exit code 1"):
        hdfs_io.copy("hdfs://c/missing", str(tmp_path / "back"))


@pytest.mark.usefixtures("hdfs_root")
def test_a_name_with_shell_characters_is_only_a_name(tmp_path):
    assert not hdfs_io.exists(f"hdfs://c/$(touch {tmp_path}/hacked); touch {tmp_path}/hacked")
    assert not (tmp_path / "hacked").exists()
