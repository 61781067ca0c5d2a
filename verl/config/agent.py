"""Conversations: turns, tools, and the agent loops that hold them.

An agent loop turns one prompt into one trajectory; which loop runs is chosen per row
(`agent_name`) or by `agent.default_agent_loop`.
"""

from dataclasses import dataclass

from verl.config.base import BaseConfig, When, never, option
from verl.config.roles import NO_TOOL_LOOP, NO_TOOLS, OWN_LOOPS


@dataclass(kw_only=True)
class MultiTurnConfig(BaseConfig):
    """Conversations with tools and simulated users."""

    _target_: str = "verl.workers.config.MultiTurnConfig"

    enable: bool = option(False, absent=NO_TOOLS)
    """Say that the run is multi-turn. What happens in a turn is up to the agent loop."""

    max_assistant_turns: int | None = option(None, minimum=1, used_if=OWN_LOOPS)
    """Most turns of the model; null sets no limit."""

    max_user_turns: int | None = option(None, minimum=1, used_if=OWN_LOOPS)
    """Most turns of the user or of tools; null sets no limit."""

    tool_config_path: str | None = option(None, absent=NO_TOOLS)
    """YAML file that lists the tools."""

    tool_server: str | None = option(None, absent=NO_TOOLS)
    """Address of an HTTP server whose tools are offered to the model."""

    interaction_config_path: str | None = option(None, absent=NO_TOOLS)
    """YAML file that lists the simulated users."""

    max_parallel_calls: int = option(1, minimum=1, used_if=OWN_LOOPS)
    """Tool calls run per turn; further ones are dropped."""

    max_tool_response_length: int = option(256, minimum=0, used_if=OWN_LOOPS)
    """Longest tool output, in characters; longer output is cut."""

    tool_response_truncate_side: str = option(
        "middle", choices=("left", "middle", "right"), used_if=OWN_LOOPS
    )
    """Which part of a long tool output is cut out."""

    format: str = option("hermes", used_if=OWN_LOOPS)
    """How the model writes tool calls: `hermes`, `gpt-oss`, or a registered parser."""

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

    num_repeat_rollouts: int | None = option(None, minimum=1, used_if=OWN_LOOPS)
    """Continuations simulated per interaction (CollabLLM)."""


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

    default_agent_loop: str = option("single_turn_agent", absent=NO_TOOL_LOOP)
    """Loop for rows without an `agent_name`: `single_turn_agent`, or a registered one."""

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

    backend: str | None = option(None, choices=("weave", "mlflow"))
    """Where traces go; null records none."""

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
