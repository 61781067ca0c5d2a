"""The engines that share the batches.

One engine that needs a Hugging Face module and nothing else runs in this process. Several, and
those that are foreign, have processes of their own, each with its share of the devices. All of them
read their weights from the disk.
"""

from functools import partial

from verl.config.faults import ConfigError, Fault
from verl.config.generation import GenerationConfig
from verl.models.fuse import fuse_model
from verl.models.loading import load_causal_lm
from verl.trainer.generation.checks import num_engines
from verl.trainer.generation.engine_processes import start_processes
from verl.trainer.generation.sharing import Engine, GenerationFailed
from verl.utils.device import resolve_device
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine.spec import compute_dtype
from verl.workers.rollout.factory import ModuleOrder, has_own_process, module_engines
from verl.workers.rollout.process.client import EngineProcess, EngineStartError


def start_engines(
    config: GenerationConfig, model_path: str, *, num_batches: int, dtype: str
) -> list[Engine]:
    """As many as the devices allow and the batches need, ready to generate.

    `dtype` is `auto` or the number format of the weights.
    """
    try:
        device = resolve_device(config.trainer.device)
        count = min(num_engines(config), num_batches)
        if count == 1 and not has_own_process(config.rollout.name):
            return [engine_here(config, model_path, device, dtype)]
        return engines_apart(config, model_path, device, count, dtype)
    except ConfigError:
        raise
    except ValueError as refused:  # by the engine, the model or the device, in words for users
        raise ConfigError([Fault(str(refused), ("rollout.name",))]) from refused
    except EngineStartError as error:
        raise GenerationFailed(f"an engine does not start: {error}") from error


def engine_here(config: GenerationConfig, model_path: str, device: str, dtype: str) -> Engine:
    """An engine in this process, which cannot be lost."""
    trusts_code = config.model.trust_remote_code
    module = load_causal_lm(
        model_path,
        dtype=compute_dtype(dtype, device),
        device=device,
        trust_remote_code=trusts_code,
    )
    fuse_model(module)
    order = ModuleOrder(
        module=module,
        rollout=config.rollout,
        tokenizer=hf_tokenizer(model_path, trust_remote_code=trusts_code),
        version=lambda: 0,
        owns_module=True,
    )
    rollout = module_engines[config.rollout.name](order)
    return Engine(rollout, restart=lambda: None, close=lambda: None)


def engines_apart(
    config: GenerationConfig, model_path: str, device: str, count: int, dtype: str
) -> list[Engine]:
    """`count` engines in processes of their own."""
    processes = start_processes(
        config.rollout,
        model_path,
        count=count,
        device=device,
        dtype=dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    return [Engine(one, restart=partial(bring_back, one), close=one.close) for one in processes]


def bring_back(process: EngineProcess) -> None:
    """Start a lost engine anew; that it does not come up ends the run with its reason."""
    try:
        process.restart()
    except (EngineStartError, ValueError) as error:
        raise GenerationFailed(f"an engine does not start again: {error}") from error
