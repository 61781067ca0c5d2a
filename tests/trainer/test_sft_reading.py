import threading
import time
from functools import partial

import pytest
import torch
from tensordict import TensorDict

from verl.trainer.sft import batches
from verl.trainer.sft.batches import RowReader
from verl.utils.dataset.tables import DataError


class Rows:
    """Batches that hold their number, and what was read so far."""

    def __init__(self, fault: int = 0):
        self.fault = fault
        self.numbers = []
        self.num_reading = 0
        self.most_reading = 0
        self.has_read = threading.Condition()

    def read(self, number):
        with self.has_read:
            self.num_reading += 1
            self.most_reading = max(self.most_reading, self.num_reading)
        time.sleep(0.01)
        with self.has_read:
            self.num_reading -= 1
            self.numbers.append(number)
            self.has_read.notify_all()
        if number == self.fault:
            raise ValueError(f"row of step {number}")
        return TensorDict({"number": torch.tensor([number])}, batch_size=1)

    def wait_for(self, numbers):
        with self.has_read:
            return self.has_read.wait_for(lambda: self.numbers == numbers, timeout=60)


def number_of(batch):
    return int(batch["number"])


def test_the_next_batch_is_read_while_the_current_one_is_in_use():
    reader, rows = RowReader(), Rows()
    assert number_of(reader.take(5, rows.read, last=6)) == 5
    assert rows.wait_for([5, 6]), "nobody has asked for 6 yet"
    assert number_of(reader.take(6, rows.read, last=6)) == 6
    assert rows.numbers == [5, 6], "each is read once, and none behind the last"


def test_a_batch_that_was_not_foreseen_is_read_all_the_same():
    reader, rows = RowReader(), Rows()
    assert [number_of(reader.take(number, rows.read, last=9)) for number in (1, 7, 3)] == [1, 7, 3]


def test_what_reading_raises_is_raised_for_the_batch_it_belongs_to():
    reader, rows = RowReader(), Rows(fault=2)
    assert number_of(reader.take(1, rows.read, last=2)) == 1
    assert rows.wait_for([1, 2])
    with pytest.raises(ValueError, match="row of step 2"):
        reader.take(2, rows.read, last=2)


def test_held_out_batches_come_in_order_and_nothing_is_read_beside_them():
    reader, rows = RowReader(), Rows()
    reader.take(1, rows.read, last=2)
    found = [number_of(batch) for batch in reader.each(partial(rows.read, n) for n in (11, 12, 13))]
    assert found == [11, 12, 13]
    assert number_of(reader.take(2, rows.read, last=2)) == 2
    assert rows.numbers == [1, 2, 11, 12, 13]
    assert rows.most_reading == 1
    assert list(reader.each([])) == []


def test_closing_waits_for_what_was_begun():
    reader, rows = RowReader(), Rows()
    reader.take(1, rows.read, last=2)
    reader.close()
    assert rows.numbers == [1, 2]
    RowReader().close()  # nothing was begun


def test_a_dataset_that_is_stuck_is_said_to_be(monkeypatch):
    monkeypatch.setattr(batches, "MAX_SECONDS", 0.05)
    is_over = threading.Event()
    with pytest.raises(DataError, match="the dataset is stuck"):
        RowReader().take(1, lambda number: is_over.wait(60), last=1)
    is_over.set()
