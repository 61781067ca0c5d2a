import json

import numpy as np
import pytest

from tests.tiny_tokenizer import tiny_tokenizer
from verl.config.data import CustomClassConfig, DataConfig
from verl.trainer.ppo.data import PromptLoader, create_rl_dataset, create_rl_sampler
from verl.utils.checkpoint.tensor_store import load_state, save_state
from verl.utils.dataset.dynamicgen_dataset import DynamicGenDataset
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.tables import DataError

GENERATORS = """
from verl.utils.dataset.dynamicgen_dataset import AbstractDataGenerator

class Counting(AbstractDataGenerator):
    count = 100

    def generate(self, dataset):
        self.count += 1
        return [{"prompt": f"{self.count}=", "answer": "1"}]

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]

class Careless(AbstractDataGenerator):
    def generate(self, dataset):
        return [{"prompt": None}, {"prompt": "123456789"}, {"prompt": "ok="}]

class Objects(AbstractDataGenerator):
    def generate(self, dataset):
        return [{"prompt": "x", "answer": object()}]

class NotOne:
    pass
"""


def config(tmp_path, name="Counting"):
    (tmp_path / "generators.py").write_text(GENERATORS)
    return DataConfig(
        max_prompt_length=8,
        seed=5,
        datagen=CustomClassConfig(path=str(tmp_path / "generators.py"), name=name),
    )


def dataset(tmp_path, name="Counting", num_rows=4):
    path = tmp_path / "a.jsonl"
    rows = [{"prompt": f"{number}=", "answer": "1"} for number in range(num_rows)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return create_rl_dataset(str(path), config(tmp_path, name), tiny_tokenizer(), None)


def loader(tmp_path):
    data = dataset(tmp_path)
    return PromptLoader(data, create_rl_sampler(data.config, data), 2)


def prompts(data):
    return [row["raw_prompt"] for row in data]


def train(made, num_steps):
    """What the trainer does with the data, step by step."""
    seen = []
    for _ in range(num_steps):
        batch = made.next_batch()
        seen.append(batch["raw_prompt"].tolist())
        made.dataset.on_batch_end(batch=batch)
    return seen


def test_a_generator_is_chosen_for_training_data_only(tmp_path):
    assert isinstance(dataset(tmp_path), DynamicGenDataset)
    made = create_rl_dataset(
        str(tmp_path / "a.jsonl"), config(tmp_path), tiny_tokenizer(), None, is_train=False
    )
    assert type(made) is RLHFDataset


def test_rows_are_generated_at_the_start_and_after_every_step(tmp_path):
    data = dataset(tmp_path)
    assert prompts(data) == ["0=", "1=", "2=", "3=", "101="]
    data.on_batch_end(batch=None)
    assert prompts(data)[-2:] == ["101=", "102="]
    assert data[5]["reward_model"]["ground_truth"] == "1"
    assert [file.path for file in data.files] == [str(tmp_path / "a.jsonl")]


def test_new_rows_come_in_the_next_epoch(tmp_path):
    made = loader(tmp_path)
    first = [prompt for batch in train(made, 2) for prompt in batch]
    assert set(first) <= {"0=", "1=", "2=", "3=", "101="}
    second = [prompt for batch in train(made, 3) for prompt in batch]
    assert made.epoch_rows == 7
    assert len(set(second)) == 6
    assert {"102=", "103="} & set(second)


@pytest.mark.parametrize("num_steps", range(8))
def test_a_resumed_run_has_the_generated_rows_and_the_order_of_one_that_went_on(
    tmp_path, num_steps
):
    expected = train(loader(tmp_path), 12)
    stopped = loader(tmp_path)
    seen = train(stopped, num_steps)
    save_state(tmp_path / "state", "data", stopped.state_dict())
    resumed = loader(tmp_path)
    resumed.load_state_dict(load_state(tmp_path / "state", "data"))
    assert seen + train(resumed, 12 - num_steps) == expected


def test_bad_generated_rows_are_named_and_left_out(tmp_path, caplog):
    data = dataset(tmp_path, "Careless")
    assert prompts(data)[4:] == ["ok="]
    assert "a generated row is left out: prompt is null" in caplog.text
    assert "a generated row is left out: the prompt has 9 tokens" in caplog.text


def test_what_cannot_be_saved_or_is_no_generator_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be saved as JSON"):
        dataset(tmp_path, "Objects")
    with pytest.raises(TypeError, match="must be an AbstractDataGenerator"):
        dataset(tmp_path, "NotOne")


def test_the_state_is_a_few_bytes_per_row(tmp_path):
    state = dataset(tmp_path).state_dict()
    assert isinstance(state["generated"], np.ndarray)
    assert state["generator"] == {"count": 101}
