"""Memory that comes back at its address, on a driver of our own that counts what it hands out."""

import ctypes

import pytest

from verl.utils import steady_memory
from verl.utils.steady_memory import OUT_OF_MEMORY, CudaDriverError, SteadyMemory


class Driver:
    """So many bytes are free; `kept` more come free when torch gives back what it keeps."""

    def __init__(self, free, kept=0, fails=()):
        self.free, self.kept, self.fails = free, kept, fails
        self.calls = []

    def __getitem__(self, name):
        def call(*arguments):
            self.calls.append(name)
            if name == "cuMemCreate":
                size = arguments[1].value
                if size > self.free:
                    return OUT_OF_MEMORY
                self.free -= size
                self.size = size
            if name == "cuMemRelease":
                self.free += self.size
            return 999 if name in self.fails else 0

        return call

    def give_back(self):
        self.free, self.kept = self.free + self.kept, 0


def memory_of(driver, monkeypatch, num_bytes=100):
    monkeypatch.setattr(steady_memory, "free_cached_memory", driver.give_back)
    monkeypatch.setattr("torch.cuda.synchronize", lambda *_: None)
    memory = SteadyMemory.__new__(SteadyMemory)
    memory._driver = driver
    memory._location = steady_memory._Location(1, 0)
    memory._properties = steady_memory._AllocationProperties()
    memory._address, memory._handle = ctypes.c_uint64(1), ctypes.c_uint64()
    memory.num_bytes, memory.is_mapped = num_bytes, False
    return memory


def test_it_takes_what_torch_keeps_for_nothing(monkeypatch):
    driver = Driver(free=40, kept=80)
    memory = memory_of(driver, monkeypatch)
    memory.map()
    assert memory.is_mapped
    assert (driver.free, driver.kept) == (20, 0)
    memory.unmap()
    assert driver.free == 120


def test_torch_keeps_its_memory_where_there_is_enough(monkeypatch):
    driver = Driver(free=100, kept=80)
    memory_of(driver, monkeypatch).map()
    assert driver.kept == 80


def test_too_little_memory_is_an_error_that_says_how_much_was_asked_for(monkeypatch):
    memory = memory_of(Driver(free=40, kept=10), monkeypatch, num_bytes=3 << 20)
    with pytest.raises(CudaDriverError, match="cuMemCreate for 3 MiB failed"):
        memory.map()
    assert not memory.is_mapped


@pytest.mark.parametrize("name", ["cuMemMap", "cuMemSetAccess"])
def test_memory_that_cannot_be_mapped_is_not_lost(monkeypatch, name):
    driver = Driver(free=100, fails={name})
    memory = memory_of(driver, monkeypatch)
    with pytest.raises(CudaDriverError, match=name):
        memory.map()
    assert driver.free == 100
    assert ("cuMemUnmap" in driver.calls) == (name == "cuMemSetAccess")
