"""Every back-end of the data plane against a plain dictionary, and what each promises beyond it."""

import asyncio
import random
import threading
import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from verl.data_plane import (
    DataPlane,
    KeyTaken,
    Limits,
    PlaneFull,
    PlaneLost,
    PlaneTimeout,
    Ready,
    RowsLost,
    RowsMissing,
    connect,
    create,
)

LONG = 120.0
BACKENDS = [
    "in_process",
    pytest.param("ray", marks=pytest.mark.ray, id="ray"),
    pytest.param(
        "transfer_queue",
        marks=[
            pytest.mark.ray,
            pytest.mark.skipif(
                find_spec("transfer_queue") is None, reason="needs the package TransferQueue"
            ),
        ],
        id="ray-transfer_queue",
    ),
]
SLOWER = [
    "in_process",
    pytest.param("ray", marks=[pytest.mark.ray, pytest.mark.slow], id="ray"),
    BACKENDS[2],
]
"""Where each test starts a plane of its own, which takes seconds on Ray."""

OPTIONS = {"transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}}}


@pytest.fixture(params=BACKENDS, scope="module")
def backend(request: pytest.FixtureRequest) -> str:
    if request.param != "in_process":
        request.getfixturevalue("ray_cluster")
    return request.param


def new_plane(backend: str, limits: Limits | None = None) -> DataPlane:
    name = f"test-{uuid.uuid4().hex[:8]}"
    return create(backend, name, limits, OPTIONS.get(backend))


@pytest.fixture(scope="module")
def only_plane(backend: str) -> Iterator[DataPlane]:
    one = new_plane(backend)
    yield one
    one.close()


@pytest.fixture
def plane(only_plane: DataPlane) -> Iterator[DataPlane]:
    yield only_plane
    only_plane.delete(list(only_plane.entries()))


def columns_of(seed: int) -> dict[str, Any]:
    """A group of 1 to 3 rows: tensors of several types, an array, texts and nested plain data."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = 1 + seed % 3, 1 + seed % 5
    objects = np.empty(rows, dtype=object)
    objects[:] = [{"turns": [seed, None], "image": torch.ones(2)} for _ in range(rows)]
    return {
        "ids": torch.randint(0, 9, (rows, width), generator=generator),
        "log_probs": torch.rand(rows, width, generator=generator),
        "half": torch.rand(rows, generator=generator).bfloat16(),
        "is_trained": torch.rand(rows, width, generator=generator) > 0.5,
        "index": np.arange(rows) + seed,
        "uid": np.array([f"{seed}-ä"] * rows),
        "extra": objects,
    }


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, column in expected.items():
        assert type(found[name]) is type(column), name
        if isinstance(column, torch.Tensor):
            assert torch.equal(found[name], column)
            assert found[name].dtype == column.dtype
        elif column.dtype == object:
            assert repr(found[name].tolist()) == repr(column.tolist())
        else:
            assert found[name].dtype == column.dtype
            assert found[name].tolist() == column.tolist()


class Model:
    """What a plane is, without any of its difficulties: a dictionary and who was given what."""

    def __init__(self) -> None:
        self.rows: dict[str, dict[str, Any]] = {}
        self.given: dict[tuple[str, str], set[str]] = {}

    def delete(self, key: str) -> None:
        self.rows.pop(key, None)
        for keys in self.given.values():
            keys.discard(key)

    def take(self, consumer: str, partition: str, count: int) -> list[str] | None:
        given = self.given.setdefault((consumer, partition), set())
        fresh = [k for k in self.rows if k.startswith(f"{partition}/") and k not in given][:count]
        if len(fresh) < count:
            return None
        given.update(fresh)
        return fresh


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_verbs_gives_what_a_dictionary_gives(plane: DataPlane, seed: int):
    chance, model = random.Random(seed), Model()
    for number in range(80):
        key = f"{chance.choice('ab')}/{chance.randrange(12)}"
        verb = chance.choice(["put", "put", "put", "get", "take", "take", "delete", "list"])
        if verb == "put" and key in model.rows:
            with pytest.raises(KeyTaken, match=key):
                plane.put(key, columns_of(number))
        elif verb == "put":
            model.rows[key] = columns_of(number)
            receipt = plane.put(key, model.rows[key], {"number": number})
            assert (receipt.num_rows, receipt.tags) == (1 + number % 3, {"number": number})
        elif verb == "get" and key in model.rows:
            assert_same(plane.get([key])[0], model.rows[key])
            some = chance.sample(list(model.rows[key]), 2)
            assert_same(plane.get([key], some)[0], {name: model.rows[key][name] for name in some})
        elif verb == "get":
            with pytest.raises(RowsMissing, match=key):
                plane.get([key])
        elif verb == "take":
            consumer, count = chance.choice(["critic", "actor"]), chance.choice([1, 2])
            expected = model.take(consumer, key[0], count)
            if expected is not None:
                taken = plane.take(consumer, count, key[0], timeout_seconds=LONG)
                assert [receipt.key for receipt in taken] == expected
            else:
                with pytest.raises(PlaneTimeout, match=f"partition '{key[0]}'"):
                    plane.take(consumer, count, key[0], timeout_seconds=0.0)
        elif verb == "delete":
            plane.delete([key])
            model.delete(key)
        else:
            expected = [k for k in model.rows if k.startswith(f"{key[0]}/")]
            assert list(plane.entries(key[0])) == expected
    assert list(plane.entries()) == list(model.rows)


def test_a_field_that_is_not_there_and_a_value_that_is_not_plain_are_named(plane: DataPlane):
    plane.put("p/0", {"ids": torch.arange(2)})
    with pytest.raises(RowsMissing, match=r"no field 'values'; it has \['ids'\]"):
        plane.get(["p/0"], ["values"])
    for column, reason in (
        ([object()], r"builtins\.object is not plain data"),
        (torch.eye(2).to_sparse(), "dense"),
        (7, "int is no column"),
    ):
        with pytest.raises(ValueError, match=f"column 'bad': .*{reason}"):
            plane.put("p/1", {"bad": column})  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="equally many rows"):
        plane.put("p/1", {"a": torch.arange(2), "b": torch.arange(3)})
    with pytest.raises(ValueError, match="tag 'ids'"):
        plane.put("p/1", {"a": torch.arange(2)}, {"ids": torch.arange(2)})  # pyright: ignore
    assert list(plane.entries()) == ["p/0"]


@pytest.mark.parametrize("backend", SLOWER, indirect=True)
def test_sizes_are_bounded(backend: str):
    plane = new_plane(backend, Limits(max_keys=2, max_bytes=100, max_bytes_per_key=64))
    plane.put("a", {"x": torch.zeros(16)})
    with pytest.raises(PlaneFull, match="'b' has 68 bytes"):
        plane.put("b", {"x": torch.zeros(17)})
    with pytest.raises(PlaneFull, match="limit of 100 bytes"):
        plane.put("b", {"x": torch.zeros(10)})
    plane.reserve(["b"])
    with pytest.raises(PlaneFull, match="limit of 2 keys"):
        plane.put("c", {"x": torch.zeros(1)})
    plane.delete(["a", "b"])
    plane.put("c", {"x": torch.zeros(16)})  # what is deleted no longer counts
    plane.close()


def test_a_waiter_sleeps_until_its_condition_holds_and_wakes_once(plane: DataPlane):
    """20 puts, three sleepers: no more than three wake-ups."""
    found: dict[str, list[str]] = {}

    def sleeper(name: str, call: Any) -> threading.Thread:
        thread = threading.Thread(
            target=lambda: found.update({name: [receipt.key for receipt in call()]})
        )
        thread.start()
        return thread

    threads = [
        sleeper("keys", lambda: plane.wait(Ready(keys=("s/19", "s/3")), LONG)),
        sleeper("count", lambda: plane.wait(Ready(partition="s", count=10), LONG)),
        sleeper("take", lambda: plane.take("actor", 12, "s", LONG)),
    ]
    wait_until_asleep(plane, 3)
    before = plane.num_wakes  # pyright: ignore[reportAttributeAccessIssue]
    for number in range(20):
        plane.put(f"s/{number}", {"x": torch.arange(1)})
    for thread in threads:
        thread.join(LONG)
    assert plane.num_wakes - before == 3  # pyright: ignore[reportAttributeAccessIssue]
    assert found["keys"] == ["s/19", "s/3"]
    assert found["count"] == [f"s/{number}" for number in range(10)]
    assert found["take"] == [f"s/{number}" for number in range(12)]


def wait_until_asleep(plane: Any, num_waiting: int) -> None:
    done = threading.Event()
    while plane.num_waiting < num_waiting:
        done.wait(0.001)


def test_coroutines_wait_without_a_thread_each(plane: DataPlane):
    async def scenario() -> tuple[list[str], int]:
        before = threading.active_count()
        waits = [
            asyncio.create_task(plane.wait_async(Ready(keys=(f"c/{i}",)), LONG)) for i in range(50)
        ]
        takes = [asyncio.create_task(plane.take_async("one", 1, "c", LONG)) for _ in range(50)]
        await asyncio.sleep(0)
        num_threads = threading.active_count() - before
        for number in range(50):
            await asyncio.to_thread(plane.put, f"c/{number}", {"x": torch.arange(1)})
        await asyncio.gather(*waits)
        return [(await take)[0].key for take in takes], num_threads

    taken, num_threads = asyncio.run(scenario())
    assert sorted(taken) == sorted(f"c/{number}" for number in range(50))  # each given once
    assert num_threads < 10


def test_rows_of_a_producer_that_is_lost_are_visible_as_such(plane: DataPlane):
    plane.reserve(["p/0", "p/1"], producer="loop-7")
    plane.put("p/0", {"x": torch.arange(3)}, producer="loop-7")
    with pytest.raises(PlaneTimeout, match=r"1 of 2 keys: 'p/1' \(open, by loop-7\)"):
        plane.wait(Ready(keys=("p/0", "p/1")), timeout_seconds=0.0)
    with pytest.raises(RowsMissing, match="'p/1' is not complete; loop-7"):
        plane.get(["p/1"])
    errors: list[Exception] = []

    def waiter() -> None:
        try:
            plane.wait(Ready(keys=("p/1",)), LONG)
        except RowsLost as error:
            errors.append(error)

    thread = threading.Thread(target=waiter)
    thread.start()
    wait_until_asleep(plane, 1)
    assert plane.lose("loop-7") == ["p/1"]
    thread.join(LONG)
    assert "'p/1' was never completed, its producer loop-7 is gone" in str(errors[0])
    assert {key: receipt.state for key, receipt in plane.entries("p").items()} == {
        "p/0": "complete",
        "p/1": "lost",
    }
    plane.delete(["p/1"])
    plane.put("p/1", {"x": torch.arange(3)})  # produced again by somebody else
    assert len(plane.wait(Ready(keys=("p/0", "p/1")), LONG)) == 2


@pytest.mark.parametrize("backend", SLOWER, indirect=True)
def test_a_plane_is_reached_by_its_address_and_closes_with_a_word(backend: str):
    plane = new_plane(backend)
    address = plane.address()
    other = connect(address)
    other.put("p/0", columns_of(4))
    assert_same(plane.get(["p/0"])[0], columns_of(4))
    plane.close()
    with pytest.raises(PlaneLost, match=plane.name):
        other.entries()
    with pytest.raises(PlaneLost, match=plane.name):
        connect(address)


def test_rows_in_process_are_not_copied():
    plane = new_plane("in_process")
    ids = torch.arange(6).view(2, 3)
    plane.put("p/0", {"ids": ids})
    assert plane.get(["p/0"])[0]["ids"] is ids
    plane.close()
