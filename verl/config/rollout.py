"""Generating responses: the engine, how tokens are drawn, and the agent loops on top.

Engine options that the reward model shares are in `serving`. Log-probability options here concern
the old policy: the trainer's own log-probabilities of the responses before the first update. An
agent loop turns one prompt into one trajectory; which loop runs is chosen per row (`agent_name`) or
by `agent.default_agent_loop`.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

from verl.config.base import Absent, BaseConfig, When, never, option, while_on
from verl.config.model import MtpConfig
from verl.config.profiler import ProfilerConfig, RolloutProfilerConfig
from verl.config.roles import (
    FOREIGN_ENGINE,
    FULLY_ASYNC,
    KEEPS_CONVERSATIONS,
    OWN_LOOPS,
    OWN_PROCESS,
    RECORDED_WITH_ACTOR,
    SEVERAL_TURNS,
    async_mode,
    is_training,
    rollout_traits,
)
from verl.config.serving import (
    CheckpointEngineConfig,
    PrometheusConfig,
    SamplingConfig,
    ServerConfig,
    ServingConfig,
)


@dataclass(kw_only=True)
class MultiTurnConfig(BaseConfig):
    """Conversations with tools and simulated users."""

    _target_: str = "verl.workers.config.MultiTurnConfig"

    enable: bool = False
    """Run rows that name no agent loop in `tool_agent`: the model may call the tools below, and
    simulated users answer it."""

    max_assistant_turns: int | None = option(None, minimum=1, used_if=SEVERAL_TURNS)
    """Most turns of the model; null sets no limit."""

    max_user_turns: int | None = option(None, minimum=1, used_if=SEVERAL_TURNS)
    """Most turns of the user or of tools; null sets no limit."""

    tool_config_path: str | None = option(None, used_if=SEVERAL_TURNS)
    """YAML file that lists the tools: classes with a configuration and a schema, MCP servers."""

    function_tool_path: str | None = option(None, used_if=SEVERAL_TURNS)
    """Python file, or `pkg://package.module`, whose `@function_tool` functions are offered too."""

    tool_server: str | None = option(None, used_if=SEVERAL_TURNS)
    """Address of an HTTP server whose tools are offered to the model too."""

    interaction_config_path: str | None = option(None, used_if=SEVERAL_TURNS)
    """YAML file that lists the simulated users."""

    max_parallel_calls: int = option(1, minimum=1, used_if=SEVERAL_TURNS)
    """Tool calls run per turn; further ones are dropped."""

    max_tool_response_length: int = option(256, minimum=0, used_if=SEVERAL_TURNS)
    """Longest tool output, in characters; longer output is cut."""

    tool_response_truncate_side: str = option(
        "middle", choices=("left", "middle", "right"), used_if=SEVERAL_TURNS
    )
    """Which part of a long tool output is cut out: `left` keeps the end, `right` the beginning,
    `middle` both."""

    tool_timeout_seconds: float = option(60.0, above=0, used_if=SEVERAL_TURNS)
    """Most seconds that a call of a tool may take; `config.timeout` of a tool comes first."""

    max_tool_threads: int = option(64, minimum=1, used_if=SEVERAL_TURNS)
    """Blocking tool calls that run at once, and such calls that may hang before all are refused."""

    format: str = option("hermes", used_if=SEVERAL_TURNS)
    """How the model writes tool calls: `hermes`, `llama3_json`, ... (docs/tool_formats.md), or the
    name of a registered parser."""

    continuous_token: dict[str, Any] = option(
        default_factory=dict,
        used_if=never(
            "every conversation keeps the sampled ids and appends those of replies; nothing is "
            "rendered again, and there is no other way to choose"
        ),
    )
    """Accepted for scripts of verl 0.9: replies are always appended as ids after the sampled ones,
    and a template for which that cannot be proven is refused."""

    use_inference_chat_template: bool = option(
        False, used_if=never("the whole conversation always uses one template")
    )
    """Accepted for older scripts; the whole conversation always uses one template."""

    tokenization_sanity_check_mode: str = option(
        "strict",
        choices=("disable", "strict", "ignore_strippable"),
        used_if=never("sampled tokens are never tokenized again, so there is nothing to check"),
    )
    """Accepted for older scripts; sampled tokens are never tokenized again, so there is nothing to
    check."""

    max_infra_ratio: float = option(0.25, minimum=0, maximum=1, used_if=SEVERAL_TURNS)
    """Largest share of the trajectories of a step that broken tools or environments may end; the
    run stops above it."""

    num_repeat_rollouts: int | None = option(None, minimum=1, used_if=OWN_LOOPS)
    """Conversations with a simulated user that follow each answer (CollabLLM); null is one."""


@dataclass(kw_only=True)
class CustomAsyncServerConfig(BaseConfig):
    """An engine server of your own."""

    _target_: str = "verl.workers.config.CustomAsyncServerConfig"

    path: str | None = None
    """File that holds the server class."""

    name: str | None = None
    """Name of the class."""


@dataclass(kw_only=True)
class AgentLoopConfig(BaseConfig):
    """Who turns prompts into trajectories."""

    _target_: str = "verl.workers.config.AgentLoopConfig"

    num_workers: int = option(8, minimum=1, used_if=never("all loops run on one event loop"))
    """Processes that run agent loops."""

    default_agent_loop: str = "single_turn_agent"
    """Loop for rows without an `agent_name`: `single_turn_agent` (which `multi_turn.enable` turns
    into `tool_agent`), `tool_agent`, `env_agent`, `program_agent`, or a registered one."""

    agent_loop_config_path: str | None = None
    """YAML file that lists more loops as `{name, _target_, ...}`."""

    agent_loop_manager_class: str | None = None
    """Full name of a class that replaces `AgentLoopManager`."""

    custom_async_server: CustomAsyncServerConfig = option(
        default_factory=CustomAsyncServerConfig, used_if=never("engines are chosen by rollout.name")
    )
    """An engine server of your own."""


@dataclass(kw_only=True)
class TraceConfig(BaseConfig):
    """Recording trajectories for inspection."""

    _target_: str = "verl.workers.config.TraceConfig"

    backend: str | None = option(
        None, choices=("file", "opentelemetry", "mlflow", "weave", "trackio")
    )
    """Where spans of turns, tool calls, grades and weight updates go: `file` is `trace.json` beside
    the checkpoints, for Perfetto; null records none."""

    token2text: bool = option(
        False, used_if=When(lambda here, run: here.backend is not None, "trace.backend is null")
    )
    """Add the decoded text of prompts and responses."""

    max_samples_per_step_per_worker: int | None = option(
        None,
        minimum=0,
        used_if=When(lambda here, run: here.backend is not None, "trace.backend is null"),
    )
    """Most trajectories traced per step by one worker; null traces all."""


@dataclass(kw_only=True)
class RolloutConfig(ServingConfig):
    """Everything about generation."""

    _mutable_fields: ClassVar[set[str]] = {
        "max_model_len",
        "load_format",
        "engine_kwargs",
        "prompt_length",
        "response_length",
        "log_prob_micro_batch_size",
        "log_prob_micro_batch_size_per_gpu",
    }

    _target_: str = "verl.workers.config.RolloutConfig"

    mode: str = option(
        "async", choices=("async", "sync"), used_if=never("every rollout is asynchronous")
    )
    """Requests are always served asynchronously; `sync` is accepted and means the same."""

    nnodes: int = option(
        0,
        minimum=0,
        used_if=When(
            lambda here, run: is_training(run) and not run.actor_rollout_ref.hybrid_engine,
            "generation shares the devices of training: hybrid_engine is on",
        ),
    )
    """Without `hybrid_engine`: machines that only generate, beside those of `trainer.nnodes`. 0
    where `resource_pool.rollout.devices` names devices among those of the run."""

    n_gpus_per_node: int = option(
        8,
        yaml="${oc.select:trainer.n_gpus_per_node,8}",
        minimum=1,
        used_if=When(
            lambda here, run: is_training(run) and not run.actor_rollout_ref.hybrid_engine,
            "generation shares the devices of training: hybrid_engine is on",
        ),
    )
    """Devices on each of them; follows `trainer.n_gpus_per_node`."""

    n: int = option(1, minimum=1)
    """Responses per prompt. GRPO and its relatives need more than 1."""

    temperature: float = option(1.0, minimum=0)
    """Sampling temperature. The same temperature scales the log-probabilities in training."""

    exact: bool = False
    """Built-in engine: the log-probabilities of sampled tokens equal those of training bit for bit.
    Every product then has one fixed shape. It is slower on a CPU; in turn the pass that computes
    old log-probabilities is left out, since it would return the same numbers."""

    top_k: int = option(-1, minimum=-1)
    """Draw from this many likeliest tokens; -1 (or 0) from all."""

    top_p: float = option(1.0, above=0, maximum=1)
    """Draw from the likeliest tokens that together have this probability."""

    repetition_penalty: float = option(1.0, above=0)
    """Above 1, tokens that occurred before become less likely."""

    do_sample: bool = True
    """Draw at random. Off is greedy, whatever the temperature."""

    ignore_eos: bool = False
    """Go on after the end-of-sequence token, up to `response_length`. For benchmarks."""

    calculate_log_probs: bool = False
    """Return the log-probabilities with which tokens were drawn, as rollout correction needs."""

    logprobs_mode: str = option(
        "processed_logprobs",
        choices=("processed_logprobs", "raw_logprobs", "processed", "raw"),
        used_if=When(
            lambda here, run: here.name != "sglang" and not here.exact,
            "name is sglang or exact is on: both return those before the filters",
        ),
    )
    """Log-probabilities of what tokens are drawn from, after temperature, penalty and filters
    (`processed`), or before (`raw`; the built-in engines keep the temperature, vLLM does not).
    Only processed ones let rollout correction see top-k, top-p and penalties."""

    probe: bool = option(True, used_if=OWN_PROCESS)
    """Ask an engine with weights of its own at its start whether updates reach every tensor, caches
    are cleared and log-probabilities are what it says; what does not hold stops the run."""

    canary_tolerance: float | None = option(None, above=0, used_if=OWN_PROCESS)
    """After each update the engine continues a fixed prompt; log-probabilities that differ from the
    trainer's by more than this stop the run. Null goes by number format: 0.05, in bf16 0.25."""

    kv_after_update: str = option(
        "recompute", choices=("recompute", "keep"), used_if=KEEPS_CONVERSATIONS
    )
    """Keys and values of responses that go on across an update of the weights, and of conversations
    between two turns: `recompute` computes them anew with the new weights, `keep` uses them on.
    Keeping saves work; later tokens are then drawn from a mixture of old and new weights, which
    `kv_max_kl` bounds."""

    kv_max_kl: float = option(
        0.01,
        above=0,
        used_if=When(
            lambda here, run: here.kv_after_update == "keep", "kv_after_update is not keep"
        ),
    )
    """Most KL, in nats per token, between what is drawn over kept keys and values and what the
    same weights give over recomputed ones; more of it, measured on a sample of rows, stops the
    run."""

    val_kwargs: SamplingConfig = option(
        default_factory=lambda: SamplingConfig(temperature=0.0, do_sample=False)
    )
    """How tokens are drawn when the policy is validated."""

    prompt_length: int = option(512, yaml="${oc.select:data.max_prompt_length,512}", minimum=1)
    """Most tokens in a prompt; follows `data.max_prompt_length`."""

    response_length: int = option(512, yaml="${oc.select:data.max_response_length,512}", minimum=1)
    """Most tokens in a response, tool output included; follows `data.max_response_length`."""

    pipeline_model_parallel_size: int = option(1, minimum=1, used_if=FOREIGN_ENGINE)
    """Pipeline stages of one engine."""

    load_format: str = option(
        "dummy",
        used_if=When(
            lambda here, run: not rollout_traits(here.name).is_builtin,
            "the built-in engine generates with the trained weights, or with a copy of them",
        ),
    )
    """Where weights come from: `dummy` waits for the trainer to send them, `auto` or `safetensors`
    reads the disk."""

    quantization: str | None = option(
        None,
        choices=("fp8", "torchao"),
        absent=Absent("only fp8 is built in: set quantization=fp8", values=("torchao",)),
    )
    """Generate with linear layers in fp8 (`docs/fp8.md`); null keeps `dtype`."""

    kv_cache_dtype: str = option(
        "auto",
        choices=("auto", "fp8"),
        used_if=When(
            lambda here, run: here.name in ("native", "native_process"),
            "name is not native; other engines take it in engine_kwargs",
        ),
    )
    """Number format of keys and values: that of the weights, or fp8, which takes half of it."""

    quantization_config_file: str | None = option(
        None, used_if=When(lambda here, run: here.name == "vllm", "name is not vllm")
    )
    """vLLM: JSON file with more quantization settings."""

    layered_summon: bool = option(
        False, used_if=never("whole tensors are always put together one at a time")
    )
    """Gather weights layer by layer when they are sent, which lowers peak memory."""

    scheduling_policy: str = option(
        "fcfs",
        choices=("fcfs", "priority"),
        used_if=When(lambda here, run: here.name == "vllm", "name is not vllm"),
    )
    """vLLM: first come, first served, or by priority."""

    over_sample_rate: float = option(
        0.0,
        minimum=0,
        maximum=1,
        absent=Absent("requests are never dropped for being slow: leave it at 0"),
    )
    """Stop this part of the requests: the slowest, once the others are done."""

    enable_sleep_mode: bool = option(
        True, used_if=When(lambda here, run: here.name == "vllm", "name is not vllm")
    )
    """vLLM: let the engine give its memory back while the model trains."""

    multi_stage_wake_up: bool = option(
        False, used_if=When(lambda here, run: here.name == "sglang", "name is not sglang")
    )
    """SGLang: restore weights and KV cache in two steps, which lowers peak memory."""

    sglang_engine_mode: str = option(
        "local",
        choices=("local", "server"),
        used_if=never("SGLang always runs as a server in a process of its own"),
    )
    """Accepted for older scripts: SGLang always runs as a server in a process of its own."""

    engine_kwargs: dict[str, Any] = option(
        default_factory=lambda: {"vllm": {}, "sglang": {}, "trtllm": {}}
    )
    """Arguments passed on to an engine, by its name: `engine_kwargs.vllm.swap_space`."""

    custom: dict[str, Any] | None = option(
        None, used_if=never("only a rollout of your own reads it")
    )
    """A place for options of your own rollout."""

    log_prob_micro_batch_size: int | None = option(None, minimum=1)
    """Deprecated: the same as `log_prob_micro_batch_size_per_gpu`, but counted over all devices."""

    log_prob_micro_batch_size_per_gpu: int | None = option(
        8, yaml="${oc.select:actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu,8}", minimum=1
    )
    """Sequences per forward pass on one device when the old policy's log-probabilities are
    computed; follows `actor.ppo_micro_batch_size_per_gpu`."""

    log_prob_use_dynamic_bsz: bool = option(
        False, yaml="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    )
    """Cut those micro-batches by tokens instead of by sequences; follows the actor."""

    log_prob_max_token_len_per_gpu: int = option(
        16384,
        yaml="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}",
        minimum=1,
        used_if=while_on("log_prob_use_dynamic_bsz"),
    )
    """Tokens per such micro-batch on one device when cut by tokens; follows the actor."""

    multi_turn: MultiTurnConfig = option(default_factory=MultiTurnConfig)
    """Conversations with tools and simulated users."""

    agent: AgentLoopConfig = option(default_factory=AgentLoopConfig)
    """Who turns prompts into trajectories."""

    trace: TraceConfig = option(default_factory=TraceConfig)
    """Recording trajectories for inspection."""

    server: ServerConfig = option(default_factory=ServerConfig)
    """Requests to an engine that has a process of its own."""

    prometheus: PrometheusConfig = option(default_factory=PrometheusConfig)
    """Metrics of the rollout servers for Prometheus."""

    checkpoint_engine: CheckpointEngineConfig = option(default_factory=CheckpointEngineConfig)
    """How new weights travel from the trainer to the rollout."""

    skip_rollout: bool = False
    """Load generations dumped by an earlier run instead of generating. For debugging."""

    skip_dump_dir: str = option(
        "/tmp/rollout_dump",
        used_if=while_on("skip_rollout"),
    )
    """Folder of those dumps."""

    skip_steps: list[int] = option(default_factory=list, used_if=while_on("skip_rollout"))
    """Steps that are dumped and read, counted from 1; empty means every step."""

    partial_rollout: bool = option(
        False,
        used_if=When(
            lambda here, run: async_mode(run) == "one_step_off",
            "only one-step-off training reads it: a fully asynchronous run has "
            "async_training.partial_rollout, trainer.v1 always goes on, and in synchronous "
            "training no response runs while weights change",
        ),
    )
    """Responses go on with the new weights across an update; off, those that run end first."""

    total_rollout_steps: int | None = option(None, minimum=1, used_if=FULLY_ASYNC)
    """Prompts that a fully asynchronous run generates in all; null goes by `total_epochs`."""

    total_epochs: int | None = option(None, minimum=1, used_if=FULLY_ASYNC)
    """Passes of a fully asynchronous run over the data; null takes `trainer.total_epochs`."""

    test_freq: int | None = option(None, minimum=-1, used_if=FULLY_ASYNC)
    """Updates of the rollout's weights between validations of a fully asynchronous run; null goes
    by `trainer.test_freq`, which counts training steps."""

    enable_rollout_routing_replay: bool = option(
        False,
        used_if=When(
            lambda here, run: (
                not is_training(run) or run.actor_rollout_ref.actor.router_replay.mode == "R3"
            ),
            "actor.router_replay.mode is not R3",
        ),
    )
    """Return which experts each token used, for `actor.router_replay.mode=R3`."""

    mtp: MtpConfig | None = option(
        default_factory=MtpConfig, yaml="${oc.select:actor_rollout_ref.model.mtp,null}"
    )
    """Heads that predict several tokens ahead; follows `model.mtp`."""

    profiler: ProfilerConfig = option(
        default_factory=RolloutProfilerConfig, used_if=RECORDED_WITH_ACTOR
    )
    """Profiling of this role."""


@dataclass(kw_only=True)
class LayerNameMapConfig(BaseConfig):
    """Names of fused layers in Megatron checkpoints."""

    qkv_layer_name: str = "qkv"
    """The layer that computes queries, keys and values."""

    gate_proj_layer_name: str = "gate_up"
    """The layer that computes the gate and the up projection."""


@dataclass(kw_only=True)
class McoreRolloutConfig(RolloutConfig):
    """Generation beside a Megatron actor."""

    _target_: str = "verl.workers.config.McoreRolloutConfig"

    layer_name_map: LayerNameMapConfig = option(
        default_factory=LayerNameMapConfig,
        used_if=never("weights reach engines under Hugging Face names"),
    )
    """Names of fused layers in Megatron checkpoints."""
