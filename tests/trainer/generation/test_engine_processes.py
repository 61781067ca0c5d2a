"""Several engines at once: which differ in what, and what is left when one does not start."""

from dataclasses import replace

import psutil
import pytest
from omegaconf import OmegaConf

from tests.trainer.generation.cases import saved_model
from verl.config.faults import ConfigError
from verl.config.generation import GenerationConfig
from verl.config.load import load_config
from verl.config.rollout import RolloutConfig
from verl.trainer.generation.engines import GenerationFailed, start_engines, start_processes
from verl.trainer.main_generation_server import main as serve
from verl.trainer.serving import ServingFailed
from verl.workers.rollout.factory import ProcessEngineSpec, native_process, register_engine
from verl.workers.rollout.process.client import EngineSpec, EngineStartError

NO_PYTHON = "/no/such/python"

ordered: list[ProcessEngineSpec] = []


@register_engine("without_python")
def without_python(spec: ProcessEngineSpec) -> EngineSpec:
    """No process of it comes up."""
    ordered.append(spec)
    return replace(native_process(spec), python=NO_PYTHON)


@register_engine("second_without_python")
def second_without_python(spec: ProcessEngineSpec) -> EngineSpec:
    return without_python(spec) if spec.seed == 1 else native_process(spec)


@register_engine("refusing")
def refusing(spec: ProcessEngineSpec) -> EngineSpec:
    raise ValueError("this engine takes no orders")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return saved_model(tmp_path_factory.mktemp("model"))


def start(name, model, count):
    rollout = RolloutConfig(name=name, prompt_length=8, response_length=8, max_num_seqs=2)
    return start_processes(
        rollout, model, count=count, device="cpu", dtype="auto", trust_remote_code=False
    )


def generation_config(name, model):
    values = {
        "model": {"path": model},
        "rollout": {"name": name},
        "trainer": {"n_gpus_per_node": 2, "device": "cpu"},
    }
    return load_config(values, GenerationConfig).config


def serving_config(name, model):
    values = {
        "actor_rollout_ref": {
            "model": {"path": model},
            "rollout": {"name": name, "server": {"port": 0}},
        },
        "trainer": {"n_gpus_per_node": 2, "device": "cpu"},
    }
    return OmegaConf.create(values)


def test_no_two_engines_draw_with_the_same_seeds(model):
    ordered.clear()
    with pytest.raises(EngineStartError, match=NO_PYTHON):
        start("without_python", model, 3)
    assert [spec.seed for spec in ordered] == [0, 1, 2]
    assert all(spec.has_weights and spec.dtype == "float32" for spec in ordered)
    first_seeds = [without_python(spec).options["seed"] % 2**64 for spec in ordered[:3]]
    assert first_seeds == [0, 2**32, 2**33]


@pytest.mark.slow
def test_when_one_engine_does_not_start_none_is_left(model):
    before = set(psutil.Process().children())
    with pytest.raises(EngineStartError, match=NO_PYTHON):
        start("second_without_python", model, 2)
    assert set(psutil.Process().children()) == before


def test_both_commands_end_with_the_reason_when_an_engine_does_not_start(model):
    with pytest.raises(GenerationFailed, match=f"an engine does not start: .*{NO_PYTHON}"):
        start_engines(
            generation_config("without_python", model), model, num_batches=2, dtype="auto"
        )
    with pytest.raises(ServingFailed, match=f"an engine does not start: .*{NO_PYTHON}"):
        serve(serving_config("without_python", model))


def test_both_commands_name_the_option_when_an_engine_refuses(model):
    with pytest.raises(ConfigError, match="takes no orders"):
        start_engines(generation_config("refusing", model), model, num_batches=2, dtype="auto")
    with pytest.raises(ConfigError, match="takes no orders"):
        serve(serving_config("refusing", model))
