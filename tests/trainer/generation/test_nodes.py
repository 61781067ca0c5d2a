"""Engines on two machines of a Ray cluster, which are two Ray nodes of this machine."""

import subprocess
import sys

import pytest

from tests.trainer.generation.cases import config_of, generated, responses_of, rows, written
from verl.trainer.generation.engines import shares_of

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
