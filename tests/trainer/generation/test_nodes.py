"""Engines on two machines of a Ray cluster, which are two Ray nodes of this machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.clusters import assert_given_back
from tests.trainer.generation.cases import (
    config_of,
    generated,
    responses_of,
    rows,
    saved_model,
    written,
)
from verl.config.faults import ConfigError
from verl.trainer.generation.engines import shares_of, start_engines, start_on_nodes
from verl.workers.rollout.process.client import EngineStartError

ON_TWO_NODES = """
import sys

import ray
from ray.cluster_utils import Cluster

from verl.config.generation import GenerationConfig
from verl.config.load import load_config
from verl.trainer import main_generation

model, source, output = sys.argv[1:]
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
cluster.add_node(num_cpus=2)
ray.init(address=cluster.address, log_to_driver=False)
values = {
    "data": {"path": source, "output_path": output, "n_samples": 2, "batch_size": 3},
    "model": {"path": model},
    "rollout": {"prompt_length": 8, "response_length": 6, "top_k": -1, "top_p": 1.0},
    "trainer": {"nnodes": 2, "n_gpus_per_node": 1, "device": "cpu"},
}
main_generation.run(load_config(values, GenerationConfig))
ray.shutdown()
cluster.shutdown()
"""


def test_engines_are_spread_over_machines_and_never_more_than_batches():
    assert shares_of(num_batches=100, per_node=4, num_nodes=2) == [4, 4]
    assert shares_of(num_batches=3, per_node=4, num_nodes=2) == [2, 1]
    assert shares_of(num_batches=1, per_node=4, num_nodes=2) == [1]


class FakeEngine:
    def close(self) -> None:
        """It has nothing."""


def two_fakes(rollout, model_path, *, count, **options):
    return [FakeEngine() for _ in range(count)]


def broken(rollout, model_path, **options):
    raise EngineStartError("there is no such engine here")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(240)
def test_engines_on_ray_give_back_what_they_had_however_they_end(model, tmp_path):
    source = written(tmp_path / "prompts.parquet", rows(2))
    config = config_of(model, source, tmp_path / "out.parquet", trainer={"controller": "ray"})
    engines, close = start_on_nodes(config, str(model), two_fakes, num_batches=1, dtype="auto")
    assert len(engines) == 1
    close()
    assert_given_back()
    with pytest.raises(EngineStartError, match=r"^there is no such engine here$"):
        start_on_nodes(config, str(model), broken, num_batches=1, dtype="auto")
    assert_given_back()


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.timeout(300)
def test_an_engine_that_does_not_start_on_ray_ends_the_command_with_its_message(tmp_path):
    model = saved_model(tmp_path)
    source = written(tmp_path / "prompts.parquet", rows(2))
    config = config_of(model, source, tmp_path / "out.parquet", trainer={"controller": "ray"})
    (Path(model) / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ConfigError, match=r"^the model at .* cannot be loaded: "):
        start_engines(config, str(model), num_batches=1, dtype="auto")
    assert_given_back()


ON_ITS_OWN = """
import sys

import ray

from tests.trainer.generation.cases import config_of
from tests.trainer.generation.test_nodes import broken
from verl.trainer.generation.engines import start_on_nodes

model, source = sys.argv[1:]
config = config_of(model, source, "out.parquet", trainer={"controller": "ray"})
try:
    start_on_nodes(config, model, broken, num_batches=1, dtype="auto")
except RuntimeError as error:
    print(f"{error}; is_initialized: {ray.is_initialized()}")
"""


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(240)
def test_a_cluster_that_generation_started_on_ray_ends_with_it(model, tmp_path):
    source = written(tmp_path / "prompts.parquet", rows(2))
    ended = subprocess.run(
        [sys.executable, "-c", ON_ITS_OWN, str(model), str(source)],
        capture_output=True,
        text=True,
        timeout=220,
    )
    said = "there is no such engine here; is_initialized: False"
    assert said in ended.stdout, ended.stderr[-3000:]


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.timeout(400)
def test_two_machines_on_ray_give_the_responses_of_one(model, tmp_path):
    source = written(tmp_path / "prompts.parquet", rows(8))
    expected = generated(config_of(model, source, tmp_path / "one.parquet"))
    output = tmp_path / "two.parquet"
    ended = subprocess.run(
        [sys.executable, "-c", ON_TWO_NODES, str(model), str(source), str(output)],
        capture_output=True,
        text=True,
        timeout=360,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "on 2 machines of a Ray cluster with 1 x 1 device(s)" in ended.stdout
    assert responses_of(output) == expected
