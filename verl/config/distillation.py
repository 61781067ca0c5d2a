"""Distillation on the student's own responses: teachers, where they compute, and the loss.

A teacher is other weights with the same tokenizer, or the policy's own with more context. It runs
inside the policy's workers, frozen, as the reference does, or on ranks of its own, or behind an
endpoint. `distillation.teacher_models` has `teacher_model`; further teachers are added under names
of their own (`+distillation.teacher_models.math.model_path=...`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from verl.config.base import BaseConfig, When, option, while_on
from verl.config.faults import Fault

PATH = "distillation"
SAMPLED_MODES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "k1+", "kl+", "abs+", "k3+")
TOP_K_MODES = ("forward_kl_topk", "reverse_kl_topk")
FULL_MODES = ("forward_kl_full", "reverse_kl_full", "jsd")
WEIGHTS = ("path", "start", "current")

TOP_K = When(lambda here, run: here.loss_mode in TOP_K_MODES, "only the modes *_topk use it")
AS_REWARD = while_on("use_policy_gradient")
IS_STARTED = When(
    lambda here, run: here.num_replicas > 0,
    "num_replicas is 0: a teacher runs as the reference does (actor_rollout_ref.ref.*), or behind "
    "an endpoint, whose server has its own settings",
)


@dataclass(kw_only=True)
class DistillationLossConfig(BaseConfig):
    """What the student is held to."""

    loss_mode: str = option("k3", choices=(*SAMPLED_MODES, *TOP_K_MODES, *FULL_MODES))
    """The divergence between student and teacher. From the sampled token alone: `k1`, `k2`, `k3`,
    `abs`, a trailing `+` takes the gradient of `k2`. Over the teacher's `topk` likeliest tokens:
    `forward_kl_topk`, `reverse_kl_topk`. Over the whole vocabulary, exactly: `forward_kl_full`,
    `reverse_kl_full`, `jsd`."""

    topk: int = option(32, minimum=1, used_if=TOP_K)
    """Tokens of the teacher that are compared at each position."""

    jsd_beta: float = option(
        0.5,
        above=0,
        used_if=When(lambda here, run: here.loss_mode == "jsd", "only loss_mode=jsd uses it"),
    )
    """The teacher's share, between 0 and 1, of the mixture that both are compared with."""

    use_task_rewards: bool = True
    """Train by rewards too. Off, the distillation loss alone trains the policy."""

    distillation_loss_coef: float = option(1.0, minimum=0)
    """Factor on the distillation loss."""

    loss_max_clamp: float | None = option(None, above=0)
    """Limit of a token's loss on both sides; a token beyond it has no gradient. Null: none."""

    log_prob_min_clamp: float | None = option(
        None,
        maximum=0,
        used_if=When(
            lambda here, run: here.loss_mode != "jsd", "a mixture is never far below either model"
        ),
    )
    """Log-probabilities of both models below it count as this. Null: they count as they are."""

    use_policy_gradient: bool = False
    """Take minus the divergence of each sampled token as its advantage, instead of its gradient."""

    policy_loss_mode: str = option(
        "vanilla", choices=("vanilla", "gpg", "cispo", "sapo"), used_if=AS_REWARD
    )
    """The policy loss that takes these advantages."""

    clip_ratio: float = option(0.2, minimum=0, used_if=AS_REWARD)
    """Clipping range of that policy loss."""

    clip_ratio_low: float = option(0.2, minimum=0, used_if=AS_REWARD)
    """Clipping range below 1."""

    clip_ratio_high: float = option(0.2, minimum=0, used_if=AS_REWARD)
    """Clipping range above 1."""


@dataclass(kw_only=True)
class TeacherInferenceConfig(BaseConfig):
    """Settings of a serving engine for the teacher."""

    name: str = option("native", yaml="${oc.select:actor_rollout_ref.rollout.name,native}")
    """Engine; follows the rollout."""

    dtype: str = option("bfloat16", yaml="${oc.select:actor_rollout_ref.rollout.dtype,bfloat16}")
    """Number format; follows the rollout."""

    gpu_memory_utilization: float = option(0.5, above=0, maximum=1)
    """Part of a device's memory for the engine."""

    enforce_eager: bool = True
    """Compile nothing."""

    cudagraph_capture_sizes: list[int] | None = None
    """Batch sizes that get a CUDA graph."""

    free_cache_engine: bool = True
    """Free the engine's cache between steps."""

    data_parallel_size: int = option(1, minimum=1)
    """Copies of the engine that share requests."""

    expert_parallel_size: int = option(1, minimum=1)
    """Devices that share the experts."""

    tensor_model_parallel_size: int = option(2, minimum=1)
    """Devices that share a layer."""

    max_num_batched_tokens: int = option(8192, minimum=1)
    """Tokens per pass."""

    max_model_len: int | None = None
    """Longest sequence."""

    max_num_seqs: int = option(1024, minimum=1)
    """Sequences per pass."""

    load_format: str = "auto"
    """How weights are read."""

    engine_kwargs: dict[str, Any] = option(default_factory=dict)
    """Further arguments of the engine."""

    limit_images: int | None = None
    """Images per prompt."""

    enable_chunked_prefill: bool = True
    """Split long prompts over passes."""

    enable_prefix_caching: bool = True
    """Keep the cache of common prefixes."""

    disable_log_stats: bool = True
    """Leave out the engine's statistics."""

    skip_tokenizer_init: bool = True
    """Load no tokenizer into the engine."""

    prompt_length: int = option(
        512, yaml="${oc.select:actor_rollout_ref.rollout.prompt_length,512}"
    )
    """Longest prompt; follows the rollout."""

    response_length: int = option(
        512, yaml="${oc.select:actor_rollout_ref.rollout.response_length,512}"
    )
    """Longest response; follows the rollout."""

    temperature: float = option(1.0, yaml="${oc.select:actor_rollout_ref.rollout.temperature,1.0}")
    """Temperature; follows the rollout."""


@dataclass(kw_only=True)
class TeacherConfig(BaseConfig):
    """One teacher."""

    key: str | None = None
    """Rows whose `distillation.teacher_key` has this value are this teacher's. Null: all rows,
    which only a teacher alone can have."""

    model_path: str | None = None
    """Hugging Face name or folder of the teacher; its tokenizer must be the policy's."""

    weights: str = option("path", choices=WEIGHTS)
    """Whose weights: `path` (those at `model_path`), `start` (the policy as training starts) or
    `current` (the policy as it is). The last two make sense with `privileged_prompt`."""

    privileged_prompt: str | None = None
    """What the teacher reads instead of the user's last message, with the columns of the row in
    braces: `{prompt} The answer is {ground_truth}.` `{prompt}` is the message itself. Null: what
    the student reads."""

    endpoint: str | None = None
    """Address of a server that has the teacher (`http://host:port/v1`) and returns the
    log-probabilities of a prompt (`prompt_logprobs`), as vLLM and
    `python -m verl.trainer.distillation.serve` do. Null: it computes in this run."""

    timeout_seconds: float = option(
        120.0,
        above=0,
        used_if=When(
            lambda here, run: here.is_served, "the teacher has no endpoint and no replicas"
        ),
    )
    """How long one request to a server of the teacher may take."""

    num_replicas: int = option(0, minimum=0)
    """Engine processes with the teacher that this run starts on its own machine, which share the
    rows of a step. 0: the teacher computes on ranks, or is behind `endpoint`."""

    inference: TeacherInferenceConfig = option(
        default_factory=TeacherInferenceConfig,
        used_if=IS_STARTED,
        reads=("name", "dtype", "max_num_batched_tokens", "max_model_len", "max_num_seqs"),
        unread="a replica is one process on one device that computes log-probabilities only",
    )
    """Settings of the engine processes of the teacher."""

    @property
    def is_served(self) -> bool:
        """Whether the driver asks for its answers over HTTP."""
        return self.endpoint is not None or self.num_replicas > 0


@dataclass(kw_only=True)
class TeacherModelsConfig(BaseConfig):
    """The teachers by name; others than this one are added with `+`."""

    teacher_model: TeacherConfig = option(default_factory=TeacherConfig)
    """The teacher, or the first of several."""


@dataclass(kw_only=True)
class DistillationConfig(BaseConfig):
    """Learning from what teachers say about the student's responses."""

    enabled: bool = False
    """Add a distillation loss to the policy's."""

    distillation_loss: DistillationLossConfig = option(default_factory=DistillationLossConfig)
    """What the student is held to."""

    nnodes: int = option(0, minimum=0)
    """Machines with ranks of the teachers' own. 0: teachers compute on the policy's ranks."""

    n_gpus_per_node: int = option(
        8, minimum=1, used_if=When(lambda here, run: here.nnodes > 0, "nnodes is 0")
    )
    """Ranks of the teachers on each of these machines."""

    teacher_models: TeacherModelsConfig = option(default_factory=TeacherModelsConfig)
    """The teachers."""

    teacher_key: str = "data_source"
    """The column whose value chooses the teacher of a row, by the teachers' `key`."""

    max_missing_ratio: float = option(0.1, minimum=0, maximum=1)
    """Part of a step's responses that may stay without an answer of their teacher's endpoint. These
    are left out of the step and counted; more end the run."""


def teachers_of(config: DistillationConfig) -> dict[str, TeacherConfig]:
    """Every teacher by name; `teacher_model` only if something was set in it, or it is alone."""
    models = config.teacher_models
    others = {name: teacher_config(name, values) for name, values in vars(models)["extras"].items()}
    first = models.teacher_model
    is_named = first.model_path or first.endpoint or first.weights != "path"
    return {"teacher_model": first, **others} if is_named or not others else others


def teacher_config(name: str, values: Any) -> TeacherConfig:
    """A teacher that was added with `+`."""
    known = {item.name for item in fields(TeacherConfig)} - {"_target_"}
    if not isinstance(values, BaseConfig):
        raise ValueError(f"{PATH}.teacher_models.{name} is {values!r}; it must have a model_path")
    values = vars(values)["extras"]
    unknown = sorted(set(values) - known)
    if unknown:
        raise ValueError(
            f"{PATH}.teacher_models.{name} has {unknown[0]!r}; a teacher has: "
            f"{', '.join(sorted(known))}"
        )
    inference = values.get("inference")
    if isinstance(inference, BaseConfig):
        settings = vars(inference)["extras"]
        wrong = sorted(set(settings) - {item.name for item in fields(TeacherInferenceConfig)})
        if wrong:
            raise ValueError(f"{PATH}.teacher_models.{name}.inference has no option {wrong[0]!r}")
        values = {**values, "inference": TeacherInferenceConfig(**settings)}
    return TeacherConfig(**values)


def distillation_faults(config: Any) -> Iterator[Fault]:
    """What is wrong with the section, if it is on."""
    section: DistillationConfig = config.distillation
    if not section.enabled:
        return
    loss = section.distillation_loss
    yield from loss_faults(loss)
    try:
        teachers = teachers_of(section)
    except ValueError as error:
        yield Fault(str(error), (f"{PATH}.teacher_models",))
        return
    for name, teacher in teachers.items():
        yield from teacher_faults(f"{PATH}.teacher_models.{name}", teacher, section)
    keys = [teacher.key for teacher in teachers.values()]
    if len(teachers) > 1 and (None in keys or len(set(keys)) < len(keys)):
        text = (
            f"{PATH}.teacher_models has {len(teachers)} teachers with the keys {keys}; each needs "
            f"a key of its own, the value of the column {section.teacher_key!r} of its rows"
        )
        yield Fault(text, (f"{PATH}.teacher_models",))
    temperature = config.actor_rollout_ref.rollout.temperature
    is_served = [teacher.is_served for teacher in teachers.values()]
    if temperature != 1 and any(is_served):
        text = (
            f"actor_rollout_ref.rollout.temperature is {temperature}; a server gives the "
            "log-probabilities of a prompt at temperature 1, so set it to 1"
        )
        yield Fault(text, ("actor_rollout_ref.rollout.temperature",))
    has_replicas = any(teacher.num_replicas for teacher in teachers.values())
    if has_replicas and (section.nnodes > 1 or (section.nnodes and not all(is_served))):
        text = (
            f"{PATH}.nnodes is {section.nnodes} and a teacher has num_replicas: replicas are "
            "processes on this machine, with devices behind the policy's if nnodes is 1. Take "
            "nnodes=1 with num_replicas for every teacher, or nnodes=0, or an endpoint"
        )
        yield Fault(text, (f"{PATH}.nnodes",))
    if config.transfer_queue.enable:
        text = (
            f"{PATH}.enabled is True and transfer_queue.enable is True; teachers read the batch in "
            "the driver, so leave transfer_queue.enable out"
        )
        yield Fault(text, ("transfer_queue.enable",))


def component_faults(config: Any) -> Iterator[Fault]:
    """A cross-entropy is added to the batch in the driver."""
    actor = config.actor_rollout_ref.actor
    names = {"sft_replay.files": actor.sft_replay.files is not None}
    names["ce_on_tool_text_coef"] = actor.ce_on_tool_text_coef > 0
    for name, is_set in names.items():
        if is_set and config.transfer_queue.enable:
            key = f"actor_rollout_ref.actor.{name}"
            text = f"{key} is set and transfer_queue.enable is True; leave one of them out"
            yield Fault(text, (key, "transfer_queue.enable"))


def loss_faults(loss: DistillationLossConfig) -> Iterator[Fault]:
    path = f"{PATH}.distillation_loss"
    if loss.jsd_beta >= 1:
        text = f"{path}.jsd_beta is {loss.jsd_beta}; it must be below 1, where nothing is learnt"
        yield Fault(text, (f"{path}.jsd_beta",))
    if loss.use_policy_gradient and loss.loss_mode not in SAMPLED_MODES:
        text = (
            f"{path}.use_policy_gradient is True and loss_mode is {loss.loss_mode!r}, which has "
            "an exact gradient; take that (use_policy_gradient=False), or loss_mode=k1"
        )
        yield Fault(text, (f"{path}.use_policy_gradient", f"{path}.loss_mode"))
    if not loss.use_policy_gradient and loss.loss_mode in ("k1", "kl"):
        text = (
            f"{path}.loss_mode is {loss.loss_mode!r}, whose gradient is that of the student's "
            "log-probability alone, so nothing would be learnt from the teacher; set "
            f"{path}.use_policy_gradient=True, or loss_mode=k1+ or k3"
        )
        yield Fault(text, (f"{path}.loss_mode",))


def teacher_faults(
    path: str, teacher: TeacherConfig, section: DistillationConfig
) -> Iterator[Fault]:
    is_full = section.distillation_loss.loss_mode in FULL_MODES
    if teacher.weights == "path" and not (teacher.model_path or teacher.endpoint):
        text = (
            f"{path}.model_path is null; {PATH}.enabled needs a teacher: set model_path, or "
            "endpoint, or weights=start with a privileged_prompt"
        )
        yield Fault(text, (f"{path}.model_path",))
    if teacher.weights != "path" and (teacher.model_path or teacher.endpoint):
        text = f"{path}.weights is {teacher.weights!r}; leave model_path and endpoint out"
        yield Fault(text, (f"{path}.weights",))
    if teacher.weights == "current" and teacher.privileged_prompt is None:
        text = (
            f"{path}.weights is 'current' without a privileged_prompt: the teacher would be the "
            "student itself, and the loss 0; set privileged_prompt"
        )
        yield Fault(text, (f"{path}.weights",))
    if teacher.weights == "current" and section.nnodes:
        text = f"{path}.weights is 'current'; the policy's weights are not on other ranks: nnodes=0"
        yield Fault(text, (f"{path}.weights", f"{PATH}.nnodes"))
    if teacher.endpoint and not teacher.model_path:
        text = (
            f"{path}.endpoint is {teacher.endpoint!r} and model_path is null; name the model that "
            "is served, whose tokenizer must be the policy's"
        )
        yield Fault(text, (f"{path}.model_path",))
    if teacher.num_replicas and (teacher.endpoint or teacher.weights != "path"):
        text = (
            f"{path}.num_replicas is {teacher.num_replicas}; the processes have the weights at "
            "model_path, so leave endpoint and weights out"
        )
        yield Fault(text, (f"{path}.num_replicas",))
    if teacher.num_replicas and teacher.inference.name != "native":
        text = (
            f"{path}.inference.name is {teacher.inference.name!r}; replicas that this run starts "
            f"are verl's own (native). Start the server of {teacher.inference.name} yourself and "
            f"name it in {path}.endpoint"
        )
        yield Fault(text, (f"{path}.inference.name",))
    if is_full and (teacher.is_served or section.nnodes):
        where = "behind a server" if teacher.is_served else "on other ranks"
        text = (
            f"{PATH}.distillation_loss.loss_mode is {section.distillation_loss.loss_mode!r}, but "
            f"{path} is {where}: the whole vocabulary would be hundreds of kilobytes a token. Let "
            "the teacher compute in the policy's ranks (nnodes=0, no endpoint, no replicas), or "
            "use forward_kl_topk"
        )
        yield Fault(text, (f"{PATH}.distillation_loss.loss_mode",))
