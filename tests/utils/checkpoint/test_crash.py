"""A save that is killed, or refused by the disk, at any system call loses nothing committed.

The prepared root holds step 1. A child then saves step 2 (and deletes step 1, keeping one), or step
1 once more with other contents. strace ends it at the k-th use of a system call, for each call and
each k; strace counts every kind of call by itself.
"""

import os
import re
import shutil

import pytest

from tests.utils.checkpoint.rig import StraceRefusedError, running_rig

CHANGES = "openat write pwrite64 writev ftruncate fsync fdatasync rename renameat renameat2 mkdir"
CHANGES = frozenset([*CHANGES.split(), "mkdirat", "unlink", "unlinkat", "rmdir", "sendto"])
REFUSABLE = CHANGES - {"unlink", "unlinkat", "rmdir", "sendto"}
NEXT, AGAIN = (2, 0), (1, 1)


@pytest.fixture(scope="module")
def rig():
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    with running_rig() as running:
        try:
            running.count_calls([2], 0)
        except StraceRefusedError as error:
            pytest.skip(str(error))
        yield running


def points(rig, kinds, step, version, *, every=1):
    """(call, k) for the calls of these kinds that a save makes; of those it makes more than eight
    times only the first, the last and each `every`-th."""
    for call, count in sorted(rig.count_calls([step], version).items()):
        if kinds is None or call in kinds:
            stride = every if count > 8 else 1
            yield from ((call, k) for k in sorted({*range(1, count + 1, stride), count}))


def kill_at(rig, call, k, step, version):
    rig.reset()
    outcome = rig.save([step], version, strace=["-e", f"inject={call}:signal=KILL:when={k}"])
    is_new = rig.holds(step, version)
    assert is_new or rig.holds(1, 0)
    assert is_new or not outcome.committed, f"acknowledged and lost: killed at {call} {k}"
    assert rig.save([step + 1], 0).committed == [step + 1]
    assert rig.holds(step + 1, 0)
    assert not [name for name in rig.names() if name.startswith(".")], f"killed at {call} {k}"
    return outcome.was_killed


@pytest.mark.parametrize(("step", "version"), [NEXT, AGAIN])
def test_a_kill_at_calls_that_change_the_disk_loses_nothing(rig, step, version):
    spread = points(rig, CHANGES, step, version, every=4)
    kills = [kill_at(rig, *point, step, version) for point in spread]
    assert all(kills)
    assert len(kills) > 20


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("step", "version"), [NEXT, AGAIN])
def test_a_kill_at_any_system_call_at_all_loses_nothing(rig, step, version):
    kills = [kill_at(rig, *point, step, version) for point in points(rig, None, step, version)]
    assert sum(kills) > 150


def refuse_at(rig, call, k, error, step, version):
    """Let one call fail, then let the same process save once more."""
    rig.reset()
    strace = ["-e", f"inject={call}:error={error}:when={k}"]
    outcome = rig.save([step, step + 1], version, strace=strace)
    for failure in outcome.failed:
        assert failure["errno"] == error
        assert failure["file"].startswith(str(rig.root)), f"{call} {k}: {failure}"
        assert "free space" in failure["text"]
    assert outcome.committed[-1:] == [step + 1], f"{call} {k}: the run could not go on: {outcome}"
    assert rig.holds(step + 1, version)
    assert not [name for name in rig.names() if name.startswith(".")], f"{call} {k}"
    return bool(outcome.failed)


def refuse_at_points(rig, error, step, version, *, every=1):
    return [
        refuse_at(rig, *point, error, step, version)
        for point in points(rig, REFUSABLE, step, version, every=every)
    ]


@pytest.mark.parametrize(("step", "version"), [NEXT, AGAIN])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS"])
def test_a_refused_call_is_a_typed_error_and_the_run_goes_on(rig, error, step, version):
    assert sum(refuse_at_points(rig, error, step, version, every=8)) > 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("step", "version"), [NEXT, AGAIN])
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS"])
def test_every_refused_call_is_a_typed_error_and_the_run_goes_on(rig, error, step, version):
    assert sum(refuse_at_points(rig, error, step, version)) > 30


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize(("step", "version"), [NEXT, AGAIN])
def test_a_disk_that_stays_full_leaves_the_last_commit_and_nothing_else(rig, call, step, version):
    count = rig.count_calls([step], version)[call]
    last = count if call == "write" else count - 1  # the very last sync is after the tracker
    for k in range(1, last + 1):
        rig.reset()
        strace = ["-e", f"inject={call}:error=ENOSPC:when={k}+"]
        outcome = rig.save([step, step], version, strace=strace)
        assert [failure["errno"] for failure in outcome.failed] == ["ENOSPC", "ENOSPC"]
        assert rig.holds(1, 0)
        assert rig.names() == {"global_step_1", "latest_checkpointed_iteration.txt"}


def test_nothing_gets_a_name_before_its_bytes_are_on_the_disk(rig):
    """What a power failure spares is what was synced; so the order of the calls is the promise."""
    rig.reset()
    trace = rig.root.parent / "order"
    rig.save([2], 0, strace=["-y", "-e", "trace=write,fsync,rename", "-o", str(trace)])
    events = [event for line in trace.read_text().splitlines() if (event := parse(line, rig.root))]
    publish, name = [number for number, event in enumerate(events) if event[0] == "rename"][:2]
    staging, final = events[publish][1:]
    assert final == "global_step_2"
    written = {path for call, path, *_ in events[:publish] if call == "write"}
    assert len(written) == 5
    for path in written:
        last_write = max(n for n, e in enumerate(events[:publish]) if e[:2] == ("write", path))
        assert ("fsync", path) in events[last_write:publish]
    last_file = max(n for n, e in enumerate(events[:publish]) if e[0] == "write")
    assert ("fsync", staging) in events[last_file:publish]
    assert ("fsync", f"{staging}/actor") in events[last_file:publish]
    assert ("fsync", ".") in events[publish:name]  # the step's name, before the tracker has it
    assert events[name][2] == "latest_checkpointed_iteration.txt"
    assert ("fsync", events[name][1]) in events[publish:name]
    assert ("fsync", ".") in events[name:]


def parse(line, root):
    """`fsync(3</root/a>)` -> ("fsync", "a"), paths relative to the root; None for the rest."""
    call = line.partition("(")[0]
    paths = re.findall(r'[<"](/[^>"]*)[>"]', line)
    inside = [os.path.relpath(path, root) for path in paths if path.startswith(str(root))]
    return (call, *inside) if inside else None
