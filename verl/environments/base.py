"""What an environment is: a world that answers what a model does, and says what it was worth.

    reset(row, seed) -> Observation        the episode that this seed means
    step(action) -> Observation            text or messages, a reward, whether the episode is over
    close()

Each may be a coroutine. An episode follows from its row, its seed and the actions: whoever runs an
environment seeds the generators of `random`, NumPy and torch before `reset`, and runs one
environment at a time in a process.

`make_environment` finds an environment by name: `scheme:rest` (`gymnasium:FrozenLake-v1`), a name
that was registered, `package.module.Class`, or `path/to/file.py:Class`. A class without `step` is
one of tools: its public methods with type hints are what the model may call (`ToolMethods`).

Only the standard library is imported, so that this runs in any interpreter.
"""

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from verl.utils.import_utils import load_class_from_fqn, load_extern_object
from verl.utils.registry import Registry

MAX_INFO_CHARACTERS = 100_000
ROLES = ("system", "user", "tool", "assistant")


class InvalidAction(ValueError):
    """Raised by `step`: the action means nothing here. The model is told, and plays on."""


@dataclass(frozen=True)
class ToolCall:
    """A call that the model made of one of the environment's `tools`."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None
    """Why the arguments cannot be read, where they cannot: text for the model."""


class Action(str):
    """What the model said; `tool_calls` are those in it, where the environment offers tools."""

    tool_calls: tuple[ToolCall, ...]

    def __new__(cls, text: str, tool_calls: Sequence[ToolCall] = ()) -> "Action":
        action = super().__new__(cls, text)
        action.tool_calls = tuple(tool_calls)
        return action


@dataclass(kw_only=True)
class Observation:
    """What the world shows after `reset` or `step`."""

    text: str | None = None
    messages: list[dict[str, Any]] | None = None
    """Chat messages, in the place of one user message with `text`."""

    images: list[bytes] = field(default_factory=list)
    """PNG or JPEG files that belong to the text."""

    reward: float | None = None
    """What the last action earned; None is no verdict, and leaves grading to a reward function."""

    done: bool = False
    info: dict[str, Any] = field(default_factory=dict)
    """Plain data about the episode, such as `{"is_won": True}`."""


def checked(observation: Any) -> Observation:
    """The observation, if it is one; a TypeError or ValueError that says what is wrong."""
    if isinstance(observation, str):
        observation = Observation(text=observation)
    if not isinstance(observation, Observation):
        raise TypeError(
            f"an environment gave {observation!r:.200} ({type(observation).__name__}); reset and "
            "step return an Observation, or a str"
        )
    if observation.text is not None and not isinstance(observation.text, str):
        kind = type(observation.text).__name__
        raise TypeError(f"Observation.text is {kind}, not str; decode it in the environment")
    for message in observation.messages or ():
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise TypeError(
                f"Observation.messages holds {message!r:.200}; each is a dict with a role of "
                f"{', '.join(ROLES)}"
            )
    if not all(isinstance(image, bytes) for image in observation.images):
        raise TypeError("Observation.images holds something else than bytes of image files")
    observation.done = bool(observation.done)
    if observation.reward is not None:
        observation.reward = float(observation.reward)
        if not math.isfinite(observation.reward):
            raise ValueError(f"Observation.reward is {observation.reward}; it must be finite")
    num_characters = len(json.dumps(observation.info, allow_nan=True))
    if num_characters > MAX_INFO_CHARACTERS:
        raise ValueError(
            f"Observation.info has {num_characters} characters; at most {MAX_INFO_CHARACTERS}"
        )
    return observation


class Environment(ABC):
    """One world, for one episode at a time. The methods may be coroutines."""

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools the model is offered, in OpenAI's form; asked for after `reset`."""
        return ()

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin the episode of `seed`; `row` has the plain columns of the dataset row.

        The observation's text is the first user message where the row has no prompt of its own.
        """

    @abstractmethod
    def step(self, action: Action) -> Any:
        """Do what the model said; raise `InvalidAction` for what means nothing here."""

    def close(self) -> Any:  # noqa: B027
        """Give back what the environment holds; called once, at the end of the episode too."""


Factory = Callable[..., Any]
ADAPTERS = "verl.environments.adapters"
environments = Registry[Factory](
    "environment",
    gymnasium=f"{ADAPTERS}:GymnasiumEnvironment",
    textarena=f"{ADAPTERS}:TextArenaEnvironment",
    reasoning_gym=f"{ADAPTERS}:ReasoningGymEnvironment",
    openenv="verl.environments.remote:OpenEnvEnvironment",
    verifiers="verl.environments.verifiers:VerifiersEnvironment",
    tool_methods="verl.environments.methods:ToolMethods",
)
"""Factories: those of a scheme get what follows the colon, then the keyword arguments."""


def register_environment(name: str) -> Callable[[Factory], Factory]:
    """Class decorator: `env.name=<name>` makes one. The module that uses it must be imported in
    the environment's process: list it in VERL_USE_EXTERNAL_MODULES, or use the full class name."""
    return environments.register(name)


class BadEnvironment(ValueError):
    """No environment can be made of this name and these arguments."""


def make_environment(name: str, kwargs: Mapping[str, Any]) -> Any:
    """An object with `reset(row, seed)`, `step(action)`, `close()` and `tools`."""
    scheme, colon, rest = name.partition(":")
    try:
        if name in environments:
            made = environments[name](**kwargs)
        elif colon and scheme in environments:
            made = environments[scheme](rest, **kwargs)
        elif colon and scheme.endswith(".py"):
            made = load_extern_object(scheme, rest)(**kwargs)
        elif not colon and "." in name:
            made = load_class_from_fqn(name, "environment")(**kwargs)
        else:
            raise ValueError(
                f"there is no environment {name!r}; write {', '.join(environments)} and a colon "
                "before a name of theirs, package.module.Class, or path/to/file.py:Class"
            )
        return made if defines(made, "step") else environments["tool_methods"](made)
    except (ValueError, TypeError, ImportError, AttributeError, FileNotFoundError) as error:
        raise BadEnvironment(f"cannot make the environment {name!r}: {error}") from error


def defines(world: Any, name: str) -> bool:
    """Whether the class of `world` has that method or property."""
    return any(name in vars(cls) for cls in type(world).__mro__)
