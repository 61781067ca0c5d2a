"""The store of a run: what is committed is there, the oldest samples go first."""

import json
import sqlite3

import numpy as np
import pytest

from verl import diff
from verl.board.compare import first_difference
from verl.board.reader import NoStore, StoreReader, stores_below
from verl.board.store import FILE_NAME, Sample, Step, StoreWriter, plain_numbers


def writer(folder, *, max_bytes=1 << 30, first_step=0, **facts):
    return StoreWriter(
        folder,
        facts={"name": "run", "total_steps": 3, **facts},
        decode=lambda token: f"<{token}>",
        max_bytes=max_bytes,
        first_step=first_step,
    )


def sample(uid="1-0", *, response="4", ids=(7, 8), advantage=(0.5, -1.0), **values):
    columns = {"mask": np.array([1.0, 0.0]), "advantage": np.array(advantage)}
    return Sample(
        uid=uid,
        prompt="2+2=",
        response=response,
        score=1.0,
        prompt_ids=[1, 2],
        response_ids=list(ids),
        columns=columns,
        **values,
    )


def step(number, *samples, metrics=None, events=()):
    return Step(
        number=number,
        metrics=plain_numbers(metrics or {"critic/score/mean": number / 2}),
        seconds={"gen": 1.0, "other": 0.5},
        samples=samples,
        events=events,
    )


def test_a_step_comes_back_with_its_samples_tokens_and_events(tmp_path):
    store = writer(tmp_path)
    store.add(step(1, sample(), events=[("fault", "a tool broke")]))
    store.close()
    reader = StoreReader(tmp_path / FILE_NAME)
    (entry,) = reader.steps()
    assert entry["metrics"] == {"critic/score/mean": 0.5}
    assert entry["seconds"] == {"gen": 1.0, "other": 0.5}
    (listed,) = reader.samples()["rows"]
    assert (listed["score"], listed["tokens"], listed["advantage"]) == (1.0, 2, 0.5)
    whole = reader.sample(listed["id"])
    assert whole["tokens"] == [[7, "<7>"], [8, "<8>"]]
    assert whole["prompt_tokens"] == [[1, "<1>"], [2, "<2>"]]
    assert whole["columns"] == {"mask": [1.0, 0.0], "advantage": [0.5, -1.0]}
    assert reader.events()[0]["text"] == "a tool broke"
    assert reader.summary()["total"] == 3


def test_numbers_that_are_not_finite_stay_readable(tmp_path):
    store = writer(tmp_path)
    store.add(step(1, metrics={"actor/kl_loss": float("nan"), "name": "text is left out"}))
    store.close()
    (entry,) = StoreReader(tmp_path / FILE_NAME).steps()
    assert entry["metrics"] == {"actor/kl_loss": "nan"}


def test_what_the_page_reads_is_json_whatever_went_wrong(tmp_path):
    store = writer(tmp_path, settings={"limit": float("inf")})
    odd = sample(advantage=(np.nan, -np.inf), extras={"acc": float("nan")})
    odd.score = float("inf")
    store.add(step(1, odd))
    store.close()
    reader = StoreReader(tmp_path / FILE_NAME)
    (row,) = reader.samples()["rows"]
    whole = reader.sample(row["id"])
    json.dumps([row, whole, reader.summary()], allow_nan=False)
    assert row["score"] == "inf"
    assert whole["columns"]["advantage"] == ["nan", "-inf"]
    assert whole["extras"] == {"acc": "nan"}
    assert np.isnan(reader.sample(row["id"], digits=None)["columns"]["advantage"][0])


def test_samples_are_found_by_text_step_and_phase(tmp_path):
    store = writer(tmp_path)
    store.add(step(1, sample(response="Seven"), sample(response="eight", phase="validation")))
    store.add(step(2, sample(response="seventeen, Über 100% \\_")))
    store.close()
    reader = StoreReader(tmp_path / FILE_NAME)
    assert reader.samples(text="SEVEN")["count"] == 2
    assert reader.samples(text="100%")["count"] == reader.samples(text="\\_")["count"] == 1
    assert reader.samples(text="ÜBER")["count"] == reader.samples(text="über")["count"] == 1
    assert reader.samples(text="seven", step=2)["count"] == 1
    assert reader.samples(phase="validation")["rows"][0]["response"] == "eight"
    assert reader.samples(limit=1, offset=1)["count"] == 3
    with pytest.raises(ValueError, match="sort is 'loudest'; it must be one of"):
        reader.samples(sort="loudest")


def test_a_run_that_continues_forgets_the_steps_of_the_lost_attempt(tmp_path):
    store = writer(tmp_path)
    for number in (1, 2, 3):
        store.add(step(number, sample(f"{number}-0")))
    store.close()
    store = writer(tmp_path, first_step=1)
    store.add(step(2, sample("again")))
    store.close()
    reader = StoreReader(tmp_path / FILE_NAME)
    assert [entry["step"] for entry in reader.steps()] == [1, 2]
    assert [row["uid"] for row in reader.samples(sort="oldest")["rows"]] == ["1-0", "again"]
    with sqlite3.connect(tmp_path / FILE_NAME) as connection:
        left = connection.execute("SELECT COUNT(DISTINCT sample) FROM columns").fetchone()
    assert left == (2,)


def test_beyond_its_limit_the_file_loses_its_oldest_samples_and_says_so(tmp_path):
    store = writer(tmp_path, max_bytes=400_000)
    for number in range(1, 21):
        store.add(step(number, sample(response="x" * 50_000)))
    store.close()
    reader = StoreReader(tmp_path / FILE_NAME)
    kept = [row["step"] for row in reader.samples(limit=200, sort="oldest")["rows"]]
    assert 1 < len(kept) < 20
    assert kept == list(range(21 - len(kept), 21))
    assert len(reader.steps()) == 20
    assert {event["kind"] for event in reader.events()} == {"retention"}
    assert (tmp_path / FILE_NAME).stat().st_size < 700_000


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(NoStore, match=r"holds no board\.sqlite; .* trainer\.board=True"):
        stores_below(tmp_path)
    (tmp_path / FILE_NAME).write_text("not a database at all, but long enough to be one")
    with pytest.raises(NoStore, match="cannot be read as the store of a run"):
        StoreReader(tmp_path / FILE_NAME)


def test_a_damaged_store_is_named(tmp_path, capsys):
    store = writer(tmp_path)
    store.add(step(1, sample()))
    store.close()
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    with pytest.raises(NoStore, match=r"cannot be read as the store of a run: .* malformed"):
        StoreReader(path)
    assert diff.main([str(tmp_path), str(tmp_path)]) == 2
    assert "malformed" in capsys.readouterr().err


def stored(folder, *samples, metrics=None):
    store = writer(folder)
    store.add(step(1, sample("1-0")))
    store.add(step(2, *samples, metrics=metrics))
    store.close()
    return StoreReader(folder / FILE_NAME)


def test_two_runs_are_compared_down_to_the_first_token_that_differs(tmp_path):
    ours = stored(tmp_path / "a", sample("2-0"), sample("2-1"))
    same = stored(tmp_path / "b", sample("2-0"), sample("2-1"))
    assert first_difference(ours, same) is None
    token = stored(tmp_path / "c", sample("2-0"), sample("2-1", ids=(7, 9)))
    found = first_difference(ours, token)
    assert str(found) == "step 2: token 1 of sample 1 (2-1): [8, '<8>'] against [9, '<9>']"
    value = stored(tmp_path / "d", sample("2-0", advantage=(0.5, 2.0)), sample("2-1"))
    assert "advantage of token 1 of sample 0" in str(first_difference(ours, value))
    close = stored(tmp_path / "g", sample("2-0", advantage=(0.5, 2.0000002)), sample("2-1"))
    assert "2.0 against 2.000000" in str(first_difference(value, close)), "the last bit counts"
    nan = [stored(tmp_path / name, sample("2-0", advantage=(0.5, np.nan))) for name in "hi"]
    assert first_difference(*nan) is None
    fewer = stored(tmp_path / "e", sample("2-0"))
    assert "sample 1 is in the first run only" in str(first_difference(ours, fewer))
    assert first_difference(ours, stored(tmp_path / "j")) is None, "its samples were removed"
    metric = stored(tmp_path / "f", sample("2-0"), sample("2-1"), metrics={"actor/lr": 2.0})
    assert str(first_difference(ours, metric)).startswith("step 2: actor/lr: None against 2.0")


def test_json_in_the_store_is_plain(tmp_path):
    store = writer(tmp_path)
    store.add(step(1, sample(extras={"acc": True, "odd": {1, 2}})))
    store.close()
    reader = StoreReader(tmp_path / FILE_NAME)
    json.dumps(reader.sample(reader.samples()["rows"][0]["id"]))
