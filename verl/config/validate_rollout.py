"""Does the generation section make sense: sampling, lengths, parallelism, data around it."""

from collections.abc import Iterator
from typing import Any

from verl.config.faults import Fault, nearest_divisors
from verl.config.roles import pool_devices, rollout_ranks, rollout_traits, world_size

ROLLOUT = "actor_rollout_ref.rollout"


def rollout_faults(config: Any) -> Iterator[Fault]:
    yield from sampling_faults(config)
    yield from length_faults(config)
    yield from own_ranks_faults(config)
    if rollout_ranks(config):
        yield from engine_faults(config)
    yield from loader_faults(config)


def sampling_faults(config: Any) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.n > 1 and (rollout.temperature == 0 or not rollout.do_sample):
        key = "temperature" if rollout.temperature == 0 else "do_sample"
        text = (
            f"{ROLLOUT}.{key} is {rollout[key]}; all {rollout.n} responses to a prompt would be "
            f"the same, so sample (temperature above 0, do_sample=True) or set {ROLLOUT}.n=1"
        )
        yield Fault(text, (f"{ROLLOUT}.{key}", f"{ROLLOUT}.n"))
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        text = (
            f"{ROLLOUT}.val_kwargs.temperature is 0; with {ROLLOUT}.val_kwargs.do_sample=True it "
            "must be above 0; for greedy validation set do_sample=False"
        )
        yield Fault(text, (f"{ROLLOUT}.val_kwargs.temperature",))


def length_faults(config: Any) -> Iterator[Fault]:
    rollout = config.actor_rollout_ref.rollout
    longest = rollout.prompt_length + rollout.response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        text = (
            f"{ROLLOUT}.max_model_len is {rollout.max_model_len}; it must hold the longest prompt "
            f"and response, {longest} tokens; null takes exactly that"
        )
        yield Fault(text, (f"{ROLLOUT}.max_model_len",))
    budget = rollout.max_num_batched_tokens
    if rollout.name == "vllm" and not rollout.enable_chunked_prefill and budget < longest:
        text = (
            f"{ROLLOUT}.max_num_batched_tokens is {budget}; without enable_chunked_prefill it must "
            f"hold the longest sequence, {longest} tokens"
        )
        yield Fault(text, (f"{ROLLOUT}.max_num_batched_tokens",))


def own_ranks_faults(config: Any) -> Iterator[Fault]:
    """Generation shares the policy's ranks, or has its own: one of the two."""
    section, switch = config.actor_rollout_ref, "actor_rollout_ref.hybrid_engine"
    devices = pool_devices(config, "rollout")
    if section.hybrid_engine:
        if devices is not None:
            text = (
                f"resource_pool.rollout.devices is {devices}; with {switch}=True generation shares "
                f"the devices of training: set {switch}=False"
            )
            yield Fault(text, ("resource_pool.rollout.devices",))
        return
    if devices is None and not section.rollout.nnodes:
        text = (
            f"{switch} is False, so generation needs ranks of its own: set {ROLLOUT}.nnodes and "
            f"n_gpus_per_node for devices beside those of the trainer, or "
            f"resource_pool.rollout.devices for some of its {world_size(config)}"
        )
        yield Fault(text, (switch,))
    if devices is not None and section.rollout.nnodes:
        text = (
            f"{ROLLOUT}.nnodes is {section.rollout.nnodes} and resource_pool.rollout.devices is "
            f"{devices}; leave one of them out"
        )
        yield Fault(text, (f"{ROLLOUT}.nnodes", "resource_pool.rollout.devices"))
    if devices is not None and pool_devices(config, "actor_rollout_ref") is None:
        text = (
            f"resource_pool.rollout.devices is {devices}, and the actor has no list; without one "
            "it takes all devices, these too: set resource_pool.actor_rollout_ref.devices"
        )
        yield Fault(text, ("resource_pool.rollout.devices",))
    if section.rollout.exact:
        text = (
            f"{ROLLOUT}.exact is True; with {switch}=False the rollout has weights of its own, and "
            f"generation and training agree bit for bit on shared weights only: set one of them "
            "the other way"
        )
        yield Fault(text, (f"{ROLLOUT}.exact",))


def engine_faults(config: Any) -> Iterator[Fault]:
    yield from engine_size_faults(config)
    rollout = config.actor_rollout_ref.rollout
    ranks = rollout_ranks(config)
    tensor, data = rollout.tensor_model_parallel_size, rollout.data_parallel_size
    size = tensor * data * rollout.pipeline_model_parallel_size
    if ranks % size:
        text = (
            f"{ROLLOUT}.tensor_model_parallel_size ({tensor}) times data_parallel_size ({data}) "
            f"times pipeline_model_parallel_size makes engines of {size} devices; that must divide "
            f"the {ranks} ranks; the nearest would be {nearest_divisors(size, of=ranks)}"
        )
        yield Fault(text, (f"{ROLLOUT}.tensor_model_parallel_size",))
    if rollout.expert_parallel_size not in (1, tensor * data):
        text = (
            f"{ROLLOUT}.expert_parallel_size is {rollout.expert_parallel_size}; it must be 1 or "
            f"tensor_model_parallel_size times data_parallel_size ({tensor * data})"
        )
        yield Fault(text, (f"{ROLLOUT}.expert_parallel_size",))
    if rollout.prometheus.enable and rollout.disable_log_stats:
        text = (
            f"{ROLLOUT}.disable_log_stats is True; {ROLLOUT}.prometheus.enable needs the engine's "
            "statistics, so set it to False"
        )
        yield Fault(text, (f"{ROLLOUT}.disable_log_stats",))


def engine_size_faults(config: Any) -> Iterator[Fault]:
    """Not every engine can be divided among devices."""
    rollout = config.actor_rollout_ref.rollout
    key = f"{ROLLOUT}.tensor_model_parallel_size"
    is_divisible = rollout_traits(rollout.name).is_divisible
    if not is_divisible and rollout.tensor_model_parallel_size > 1:
        text = (
            f'{key} is {rollout.tensor_model_parallel_size}, but {ROLLOUT}.name is "{rollout.name}"'
            "; of the built-in engines only native divides its model among ranks: set one of them "
            "the other way"
        )
        yield Fault(text, (key, f"{ROLLOUT}.name"))


def loader_faults(config: Any) -> Iterator[Fault]:
    data = config.data
    if data.sampler.class_path is not None and data.dataloader_num_workers:
        text = (
            f"data.dataloader_num_workers is {data.dataloader_num_workers}; with data.sampler it "
            "must be 0, because rows read ahead would miss the sampler's updates"
        )
        yield Fault(text, ("data.dataloader_num_workers",))
    pairs = (
        ("data.custom_cls", data.custom_cls.path, "name", data.custom_cls.name),
        ("data.datagen", data.datagen.path, "name", data.datagen.name),
        ("data.sampler", data.sampler.class_path, "class_name", data.sampler.class_name),
    )
    for key, path, field, name in pairs:
        if path is not None and name is None:
            text = f"{key}.{field} is null; it must name the class in {path}"
            yield Fault(text, (f"{key}.{field}",))
    manager = config.reward_manager
    if manager.source == "importlib" and (manager.module is None or manager.module.path is None):
        text = "reward_manager.module.path is null; reward_manager.source=importlib needs the file"
        yield Fault(text, ("reward_manager.module.path",))
    if manager.name == "model" and manager.source == "register" and not config.reward_model.enable:
        text = (
            "reward_manager.name is model, but reward_model.enable is False; it takes the score of "
            "a reward model: set reward_model.enable=True and reward_model.model.path"
        )
        yield Fault(text, ("reward_manager.name", "reward_model.enable"))
