import tracemalloc
from collections import Counter
from itertools import chain

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from tests.toy import make_toy, toy_run, weights
from verl.config.data import DataConfig, SamplerConfig
from verl.trainer.ppo.data import EndOfData, PromptLoader, create_rl_sampler
from verl.utils.dataset.rl_dataset import (
    AbstractCurriculumSampler,
    AbstractSampler,
    RandomOrder,
    SequentialOrder,
)


class Numbers(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, item):
        return {"number": item}


def loader(num_rows, batch_size, *, seed=3, **options) -> PromptLoader:
    data = Numbers(num_rows)
    sampler = RandomOrder(data, seed) if seed is not None else SequentialOrder(data)
    return PromptLoader(data, sampler, batch_size, **options)


def take(made, count):
    return [made.next_batch()["number"].tolist() for _ in range(count)]


@settings(max_examples=300, deadline=None)
@given(
    num_rows=st.integers(1, 30),
    batch_size=st.integers(1, 30),
    first=st.integers(0, 40),
    second=st.integers(0, 40),
)
def test_a_run_that_stops_twice_sees_the_rows_of_one_that_does_not(
    num_rows, batch_size, first, second
):
    batch_size = min(batch_size, num_rows)
    expected = take(loader(num_rows, batch_size), first + second + 5)
    seen, state = [], None
    for count in (first, second, 5):
        made = loader(num_rows, batch_size)
        if state is not None:
            made.load_state_dict(state)
        seen += take(made, count)
        state = made.state_dict()
    assert seen == expected


def test_every_row_comes_once_per_epoch_and_in_another_order_each_time():
    batches = take(loader(12, 4), 9)
    rows = [row for batch in batches for row in batch]
    epochs = [rows[start : start + 12] for start in (0, 12, 24)]
    assert all(Counter(epoch) == Counter(range(12)) for epoch in epochs)
    assert len(set(map(tuple, epochs))) == 3


def test_the_order_follows_from_the_seed():
    assert take(loader(12, 4, seed=3), 5) == take(loader(12, 4, seed=3), 5)
    assert take(loader(12, 4, seed=3), 5) != take(loader(12, 4, seed=4), 5)
    assert take(loader(4, 2, seed=None), 3) == [[0, 1], [2, 3], [0, 1]]


def test_rows_that_do_not_fill_a_batch_are_dropped_or_kept():
    assert take(loader(5, 2, seed=None), 3) == [[0, 1], [2, 3], [0, 1]]
    kept = loader(5, 2, seed=None, drop_last=False)
    assert [batch["number"].tolist() for batch in kept] == [[0, 1], [2, 3], [4]]
    assert (len(loader(5, 2)), len(kept)) == (2, 3)


def test_iterating_gives_one_epoch_and_goes_on_with_the_next():
    made = loader(4, 2, seed=None)
    assert [batch["number"].tolist() for batch in made] == [[0, 1], [2, 3]]
    assert made.epoch == 1
    assert len(list(made)) == 2
    assert made.epoch == 2


def test_a_state_taken_after_the_last_batch_of_an_epoch_continues_with_the_next_epoch():
    made = loader(4, 2, seed=None)
    take(made, 2)
    resumed = loader(4, 2, seed=None)
    resumed.load_state_dict(made.state_dict())
    assert len(list(resumed)) == 2, "the loop over an epoch does not come out empty"
    assert resumed.epoch == 2


def test_the_data_ends_after_the_last_epoch():
    made = loader(4, 2, max_epochs=2)
    take(made, 4)
    with pytest.raises(EndOfData, match="all 2 epochs"):
        made.next_batch()


def test_other_data_is_refused():
    state = loader(4, 2).state_dict()
    with pytest.raises(ValueError, match="had 4 rows when the run was saved and has 6 now"):
        loader(6, 2).load_state_dict(state)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ValueError, match="the data has 3 rows and a batch needs 4"):
        loader(3, 4)


# ---- samplers ------------------------------------------------------------------------------------

SAMPLERS = """
from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler

class Hardest(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.data_source, self.seen = data_source, []

    def __iter__(self):
        return iter(range(len(self.data_source) - 1, -1, -1))

    def __len__(self):
        return len(self.data_source)

    def update(self, batch):
        self.seen.append(batch)

class NotOne:
    pass
"""


def test_a_sampler_of_ones_own_is_loaded_from_its_file(tmp_path):
    path = tmp_path / "samplers.py"
    path.write_text(SAMPLERS)
    config = DataConfig(
        dataloader_num_workers=0,
        sampler=SamplerConfig(class_path=str(path), class_name="Hardest"),
    )
    sampler = create_rl_sampler(config, Numbers(4))
    assert isinstance(sampler, AbstractCurriculumSampler)
    made = PromptLoader(Numbers(4), sampler, 2)
    assert take(made, 3) == [[3, 2], [1, 0], [3, 2]]
    resumed = PromptLoader(Numbers(4), sampler, 2)
    resumed.load_state_dict({"epoch": 0, "position": 2, "num_rows": 4, "sampler": None})
    assert take(resumed, 1) == [[1, 0]]


def test_what_is_no_sampler_is_refused(tmp_path):
    path = tmp_path / "samplers.py"
    path.write_text(SAMPLERS)
    chosen = SamplerConfig(class_path=str(path), class_name="NotOne")
    with pytest.raises(TypeError, match=r"must be a subclass of .*AbstractSampler"):
        create_rl_sampler(DataConfig(dataloader_num_workers=0, sampler=chosen), Numbers(4))


def test_a_sampler_with_a_state_continues_by_itself():
    class Countdown(AbstractSampler):
        def __init__(self, data_source, data_config=None):
            self.left = len(data_source)

        def __iter__(self):
            while self.left:
                self.left -= 1
                yield self.left

        def __len__(self):
            return 6

        def state_dict(self):
            return {"left": self.left}

        def load_state_dict(self, state_dict):
            self.left = state_dict["left"]

    made = PromptLoader(Numbers(6), Countdown(Numbers(6)), 2)
    take(made, 1)
    resumed = PromptLoader(Numbers(6), Countdown(Numbers(6)), 2)
    resumed.load_state_dict(made.state_dict())
    assert take(resumed, 2) == [[3, 2], [1, 0]]


def test_without_a_sampler_shuffle_decides():
    assert isinstance(create_rl_sampler(DataConfig(shuffle=False), Numbers(3)), SequentialOrder)
    shuffled = create_rl_sampler(DataConfig(seed=None), Numbers(3))
    assert isinstance(shuffled, RandomOrder)
    assert shuffled.seed == 1


class Learning(AbstractCurriculumSampler):
    """Draws next the row that stands furthest from what was trained last."""

    def __init__(self, data_source, data_config=None):
        self.left, self.last = list(range(len(data_source))), 0

    def __len__(self):
        return 8

    def __iter__(self):
        while self.left:
            chosen = max(self.left, key=lambda row: abs(row - self.last))
            self.left.remove(chosen)
            yield chosen
        self.left = list(range(8))

    def update(self, batch):
        self.last = int(batch["number"][-1])


class Remembering(Learning):
    def state_dict(self):
        return {"left": self.left, "last": self.last}

    def load_state_dict(self, state_dict):
        self.left, self.last = state_dict["left"], state_dict["last"]


def learn(made, count):
    seen = []
    for _ in range(count):
        batch = made.next_batch()
        made.sampler.update(batch)
        seen.append(batch["number"].tolist())
    return seen


@pytest.mark.parametrize("count", range(7))
def test_a_curriculum_that_remembers_continues_as_if_it_had_not_stopped(count):
    expected = learn(PromptLoader(Numbers(8), Remembering(Numbers(8)), 2), 9)
    stopped = PromptLoader(Numbers(8), Remembering(Numbers(8)), 2)
    seen = learn(stopped, count)
    resumed = PromptLoader(Numbers(8), Remembering(Numbers(8)), 2)
    resumed.load_state_dict(stopped.state_dict())
    assert seen + learn(resumed, 9 - count) == expected


def test_a_curriculum_that_forgets_is_noticed_when_it_is_resumed(caplog):
    made = PromptLoader(Numbers(8), Learning(Numbers(8)), 2)
    made.load_state_dict(made.state_dict())
    assert "Learning has no state_dict and load_state_dict" in caplog.text


def test_a_sampler_that_gives_fewer_rows_than_it_says_is_named():
    class Short(AbstractSampler):
        def __init__(self, data_source, data_config=None): ...

        def __len__(self):
            return 4

        def __iter__(self):
            return iter([0, 1, 2])

    made = PromptLoader(Numbers(4), Short(Numbers(4)), 2)
    take(made, 1)
    with pytest.raises(ValueError, match="Short gave 3 rows in epoch 0, but its length is 4"):
        made.next_batch()


def test_an_epoch_has_the_rows_that_the_data_had_when_it_began():
    data = Numbers(4)
    made = PromptLoader(data, RandomOrder(data, 3), 2)
    first = take(made, 1)
    data.count = 8
    resumed = PromptLoader(data, RandomOrder(data, 3), 2)
    resumed.load_state_dict(made.state_dict())
    assert sorted(chain(*first, *take(resumed, 1))) == [0, 1, 2, 3]
    assert sorted(chain(*take(resumed, 4))) == list(range(8))


def test_millions_of_rows_are_shuffled_without_a_list_of_them():
    data = Numbers(2 * 10**6)
    order = iter(RandomOrder(data, 1))
    assert [type(next(order)) for _ in range(3)] == [int] * 3
    tracemalloc.start()
    iter(RandomOrder(data, 1))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


# ---- in a run ------------------------------------------------------------------------------------

GROWING = """
from verl.utils.dataset.dynamicgen_dataset import AbstractDataGenerator
from verl.utils.dataset.rl_dataset import AbstractCurriculumSampler

class Subtract(AbstractDataGenerator):
    def generate(self, dataset):
        number = len(dataset) % 10
        return [{"prompt": f"{number}-{number}=", "answer": "7", "data_source": "sevens"}]

class Newest(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.data_source, self.num_updates, self.drawn = data_source, 0, 0

    def __len__(self):
        return len(self.data_source)

    def __iter__(self):
        while self.drawn < len(self):
            self.drawn += 1
            yield (len(self) - self.drawn * (self.num_updates + 1)) % len(self)
        self.drawn = 0

    def update(self, batch):
        self.num_updates += 1

    def state_dict(self):
        return {"num_updates": self.num_updates, "drawn": self.drawn}

    def load_state_dict(self, state_dict):
        self.num_updates, self.drawn = state_dict["num_updates"], state_dict["drawn"]
"""


def test_a_run_on_growing_data_with_a_curriculum_resumes_bit_for_bit(tmp_path):
    toy = make_toy(tmp_path / "toy")
    (toy / "growing.py").write_text(GROWING)
    options = [
        f"data.datagen.path={toy / 'growing.py'}", "data.datagen.name=Subtract",
        f"data.sampler.class_path={toy / 'growing.py'}", "data.sampler.class_name=Newest",
        "data.dataloader_num_workers=0", "trainer.save_freq=1",
    ]  # fmt: skip
    _, straight = toy_run(toy, tmp_path / "a", *options, "trainer.total_training_steps=4")
    toy_run(toy, tmp_path / "b", *options, "trainer.total_training_steps=2")
    _, resumed = toy_run(toy, tmp_path / "b", *options, "trainer.total_training_steps=4")
    assert len(straight.train_dataset) == 24 + 1 + 4
    assert resumed.train_dataset.generated == straight.train_dataset.generated
    assert resumed.train_dataloader.sampler.num_updates == 4
    expected = weights(straight)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(resumed).items())
