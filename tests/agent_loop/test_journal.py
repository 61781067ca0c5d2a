"""Replies from outside are written beside their trajectory, and taken back for the same request."""

import asyncio
import itertools
import json
import logging
import random

import pytest

from verl.agent_loop import journal_files
from verl.agent_loop.base import AgentLoopOutput
from verl.agent_loop.journal import (
    Journal,
    JournalMismatch,
    current_journal,
    journalled,
)
from verl.agent_loop.journal_files import read_step, step_file
from verl.protocol.trajectory import InfraFault


class World:
    """Replies with a number that nobody can repeat, and with how often it was asked."""

    def __init__(self):
        self.asked = []

    def call(self, request):
        async def reply():
            self.asked.append(request)
            await asyncio.sleep(0)
            return {"drawn": random.SystemRandom().random(), "asked": len(self.asked)}

        return reply


async def ask(world, request, kind="tool"):
    return await journalled(kind, request, world.call(request))


def said(replies):
    ids = [int(reply["drawn"] * 1e9) for reply in replies]
    return AgentLoopOutput(prompt_ids=[1], response_ids=ids, response_mask=[0] * len(ids))


def make(folder, loop, *, ends=True, step=3, complete=False, **options):
    """Run `loop` as one trajectory of a run; what it returned, and the journal of the run."""
    journal = Journal(folder, **options)

    async def run():
        await journal.begin(step)
        trajectory = journal.trajectory(step, "train", "3-0", 0)
        current_journal.set(trajectory)
        try:
            replies = await loop()
        except InfraFault as fault:
            trajectory.end(fault)
            raise
        if ends:
            trajectory.end(said(replies))
        await journal.files.written()
        return replies

    try:
        return asyncio.run(run()), journal
    finally:
        if complete:
            journal.complete(step)
        journal.files.close()


def asks(world, *requests):
    async def loop():
        return [await ask(world, request) for request in requests]

    return loop


def test_a_trajectory_that_ended_is_made_again_without_the_world(tmp_path):
    first, second = World(), World()
    before, _ = make(tmp_path, asks(first, "a", {"n": [1, 2]}, "b" * 9999))
    after, journal = make(tmp_path, asks(second, "a", {"n": [1, 2]}, "b" * 9999))
    assert after == before
    assert second.asked == []
    assert journal.ended == {"step 3, train, prompt 3-0, sample 0": True}


@pytest.mark.parametrize("case", ["unfinished", "covered"])
def test_what_had_not_ended_or_a_checkpoint_covers_is_asked_anew(tmp_path, case):
    world = World()
    before, _ = make(tmp_path, asks(World(), "a", "b"), ends=case != "unfinished")
    after, _ = make(tmp_path, asks(world, "a", "b"), after=3 if case == "covered" else 2)
    assert world.asked == ["a", "b"]  # from the first on: a tool may keep state
    assert after != before
    third, _ = make(tmp_path, asks(world, "a", "b"), mode="replay")
    assert third == after  # the attempt that ended last


def test_another_request_is_named_once_and_asked_after_those_before_it(tmp_path, caplog):
    world = World()
    before, _ = make(tmp_path, asks(World(), "a", "b", "c"))
    after, _ = make(tmp_path, asks(world, "a", "other", "c", "d"))
    assert after[0] == before[0]
    assert world.asked == ["a", "other", "c", "d"]
    named = [r.getMessage() for r in caplog.records if "but the journal has" in r.getMessage()]
    assert named == [
        'step 3, train, prompt 3-0, sample 0: request 1 is tool "other", but the journal has tool '
        '"b"; it and what follows in the trajectory are asked live'
    ]
    assert make(tmp_path, asks(world, "a", "other", "c", "d"), mode="replay")[0] == after


def test_a_replay_refuses_what_the_journal_does_not_have(tmp_path):
    make(tmp_path, asks(World(), "a"))
    for requests in (["b"], ["a", "b"]):
        with pytest.raises(JournalMismatch, match="not those of the run"):
            make(tmp_path, asks(World(), *requests), mode="replay")
    with pytest.raises(JournalMismatch, match="has nothing"):
        make(tmp_path, asks(World(), "a"), step=4, mode="replay")


def test_a_live_replay_keeps_the_replies_and_names_those_that_differ(tmp_path):
    world = World()
    before, _ = make(tmp_path, asks(World(), "a", "b"))
    content = step_file(tmp_path, 3).read_bytes()
    after, journal = make(tmp_path, asks(world, "a", "b"), mode="live")
    assert (after, world.asked) == (before, ["a", "b"])
    assert len(journal.differences) == 2
    assert "reply 0 to tool" in journal.differences[0]
    assert step_file(tmp_path, 3).read_bytes() == content


def test_parallel_calls_are_numbered_in_the_order_in_which_they_start(tmp_path):
    turns = iter([asyncio.Event() for _ in range(5)])

    async def loop():
        gates = list(turns)

        async def call(number):
            await gates[number].wait()
            if number:
                gates[number - 1].set()
            return {"drawn": number / 10}

        gates[4].set()  # they end in the opposite order
        calls = [journalled("tool", n, lambda n=n: call(n)) for n in range(5)]
        return list(await asyncio.gather(*calls))

    make(tmp_path, loop)
    replies = read_step(step_file(tmp_path, 3)).trajectories["train", "3-0", 0].replies
    assert list(replies) == [4, 3, 2, 1, 0]  # as they ended
    assert {number: entry["request"] for number, entry in replies.items()} == {
        n: n for n in range(5)
    }


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize("how", ["raised", "outcome"])
def test_a_broken_world_is_repeated_only_in_a_step_that_was_complete(tmp_path, complete, how):
    asked = []

    def broken(is_broken):
        async def call():
            asked.append(is_broken)
            if is_broken and how == "raised":
                raise InfraFault("the sandbox is gone")
            return {"kind": "infra" if is_broken else "reply", "drawn": 0.5}

        async def loop():
            reply = await journalled("tool", "a", call)
            if reply["kind"] == "infra":
                raise InfraFault("the sandbox is gone")
            return [reply]

        return loop

    with pytest.raises(InfraFault):
        make(tmp_path, broken(True), complete=complete)
    if complete:
        with pytest.raises(InfraFault, match="the sandbox is gone"):
            make(tmp_path, broken(False))
        assert asked == [True]
    else:
        assert make(tmp_path, broken(False))[0][0]["kind"] == "reply"
        assert asked == [True, False]


def test_a_file_cut_or_damaged_anywhere_gives_a_whole_trajectory_or_none(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    before, _ = make(tmp_path / "whole", asks(World(), "a", "b"))
    content = step_file(tmp_path / "whole", 3).read_bytes()
    lines = content.splitlines(keepends=True)
    assert [json.loads(line)["entry"].get("reply") for line in lines] == [*before, None]
    path = step_file(tmp_path, 3)
    for cut in range(0, len(content), 7):
        for damaged in (content[:cut], content[:cut] + b"#" + content[cut + 1 :]):
            if damaged == content:
                continue
            path.write_bytes(damaged)
            found = read_step(path)
            assert found.trajectories == {}
            assert found.num_bytes == damaged.rfind(b"\n") + 1


def test_a_line_cut_short_is_removed_before_others_follow(tmp_path):
    make(tmp_path, asks(World(), "a"))
    path = step_file(tmp_path, 3)
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    after, _ = make(tmp_path, asks(World(), "a"))
    assert path.read_bytes().startswith(whole[: whole.index(b"\n") + 1])
    assert read_step(path).damaged_lines == []
    assert make(tmp_path, asks(World(), "a"), mode="replay")[0] == after


def test_what_is_too_large_or_refused_is_said_and_asked_again(tmp_path, monkeypatch, caplog):
    world = World()
    monkeypatch.setattr("verl.agent_loop.journal.MAX_REPLY_BYTES", 10)
    make(tmp_path, asks(World(), "a"))
    monkeypatch.setattr("verl.agent_loop.journal.MAX_REPLY_BYTES", 1000)
    monkeypatch.setattr(journal_files, "MAX_STEP_BYTES", 10)
    make(tmp_path, asks(World(), "a"))
    monkeypatch.undo()
    make(tmp_path, asks(world, "a"))
    assert world.asked == ["a"]
    assert "is not journalled; the limit is 10" in caplog.text
    assert "takes no more replies" in caplog.text


def test_only_old_steps_are_removed(tmp_path):
    for step in (1, 2, 3):
        make(tmp_path, asks(World(), "a"), step=step)
    (tmp_path / "mine.txt").write_text("x")
    journal = Journal(tmp_path)
    journal.files.remove(2)
    journal.files.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine.txt", "step_000003.jsonl"]


@pytest.mark.parametrize("reply", [object(), {1: {2}}, b"bytes"])
def test_a_reply_that_is_not_plain_data_is_refused_with_and_without_a_journal(tmp_path, reply):
    async def call():
        return reply

    async def loop():
        return [await journalled("tool", "a", call)]

    with pytest.raises(TypeError, match="'tool' cannot be journalled"):
        make(tmp_path, loop)
    with pytest.raises(TypeError, match="'tool' cannot be journalled"):
        asyncio.run(journalled("tool", "a", call))


def test_a_reply_is_the_same_live_and_replayed(tmp_path):
    odd = {"t": (1, 2), "f": 0.1 + 0.2, "s": "\ud800 \u2028", "n": None, 5: "key", "drawn": 0.1}
    counter = itertools.count()

    async def call():
        next(counter)
        return odd

    async def loop():
        return [await journalled("tool", "a", call)]

    live, _ = make(tmp_path, loop)
    assert make(tmp_path, loop)[0] == live == [json.loads(json.dumps(odd))]
    assert next(counter) == 1
