"""Engines in processes of their own, real ones; one of them is killed."""

import psutil
import pytest

from tests.trainer.generation.cases import (
    Starts,
    config_of,
    generated,
    responses_of,
    rows,
    written,
)
from verl.config.faults import ConfigError
from verl.config.generation import GenerationConfig
from verl.config.load import load_config
from verl.trainer.generation.engines import Engines, start_engines
from verl.trainer.generation.run import generate

pytestmark = pytest.mark.slow

NUM_ROWS = 8


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return written(tmp_path_factory.mktemp("prompts") / "prompts.parquet", rows(NUM_ROWS))


def with_processes(model, source, output, count, **rollout):
    values = {
        "data": {"path": source, "output_path": str(output), "n_samples": 2, "batch_size": 3},
        "model": {"path": model},
        "rollout": {"prompt_length": 8, "response_length": 6, "top_k": -1, "top_p": 1.0, **rollout},
        "trainer": {"n_gpus_per_node": count, "device": "cpu"},
    }
    return load_config(values, GenerationConfig).checked()


class FirstIsKilled:
    """Starts real engines, and kills the first one's process when its first batch comes."""

    def __init__(self, config):
        self.config, self.engines = config, None

    def __call__(self, model_path: str, num_batches: int) -> Engines:
        mine = {child.pid for child in psutil.Process().children()}
        self.engines = start_engines(self.config, model_path, num_batches=num_batches, dtype="auto")
        new = [child for child in psutil.Process().children() if child.pid not in mine]
        self.victim = new[0]
        self.victim.kill()
        return self.engines


def test_engines_share_the_batches_and_a_killed_one_comes_back(model, source, tmp_path):
    expected = generated(config_of(model, source, tmp_path / "one.parquet"))
    config = with_processes(model, source, tmp_path / "two.parquet", 2)
    starts = FirstIsKilled(config)
    summary = generate(config, starts)
    assert len(starts.engines.rollouts) == 2
    assert summary.num_restarts == 1
    assert responses_of(tmp_path / "two.parquet") == expected
    assert not any(child.is_running() for child in [starts.victim])


def test_an_engine_that_does_not_start_ends_the_run_with_its_reason(model, source, tmp_path):
    config = with_processes(model, source, tmp_path / "out.parquet", 2)
    with pytest.raises(ConfigError, match=r"^the model at .* cannot be loaded: "):
        start_engines(config, str(tmp_path / "no such model"), num_batches=2, dtype="auto")
    generate(config, Starts())  # what failed has left nothing locked
