"""The simulated users of a run: read from YAML, held by trajectories.

    interaction:
      - name: teacher
        class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
        config: {timeout: 30}

Without a name it is the class's, without "Interaction" and in lower case.
Code of users runs beside the event loop of the agent loops, with a deadline per call. A user that
fails or does not answer is a broken world (`InfraFault`): the model cannot have caused it.
"""

import asyncio
import inspect
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from verl.interactions.base import BaseInteraction
from verl.protocol.trajectory import InfraFault
from verl.tools.running import DeadlineExceeded, Threads, ToolLoop
from verl.utils.breaker import Outage
from verl.utils.environment import BadData
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.user_files import read_yaml

logger = logging.getLogger(__name__)

MAX_FILE_BYTES = 1_000_000
MAX_REPLY_CHARS = 1_000_000
MAX_THREADS = 64
FIELDS = ("name", "class_name", "config")


class UnknownInteraction(BadData, ValueError):
    """A row that names a user whom the run does not have."""


def get_interaction_class(class_name: str) -> type[BaseInteraction]:
    """The class behind a full name such as `my_users.CustomerInteraction`."""
    return load_class_from_fqn(class_name, "interaction")


def initialize_interactions_from_config(interaction_config_file: str) -> dict[str, BaseInteraction]:
    """The interactions that a YAML file lists, by name."""
    file = Path(interaction_config_file).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"there is no interaction file {interaction_config_file!r}")
    if file.stat().st_size > MAX_FILE_BYTES:
        raise ValueError(f"{file} has more than {MAX_FILE_BYTES} bytes; that is no list of users")
    content = read_yaml(file)
    entries = content.get("interaction") if isinstance(content, dict) else None
    if not isinstance(entries, list):
        raise ValueError(f"{file} must hold `interaction:` with a list of {{name, class_name}}")
    users: dict[str, BaseInteraction] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not isinstance(entry.get("class_name"), str):
            raise ValueError(
                f"{file} lists {entry!r:.200}; an interaction needs class_name, the full name of "
                "its class"
            )
        unknown = sorted(set(entry) - set(FIELDS))
        if unknown:
            raise ValueError(
                f"{file}: {entry['class_name']} has the fields {unknown}, which nobody reads; known"
                f": {', '.join(FIELDS)}"
            )
        cls = get_interaction_class(entry["class_name"])
        name = entry.get("name") or cls.__name__.removesuffix("Interaction").lower()
        if name in users:
            raise ValueError(
                f"Duplicate interaction name {name!r} found in {file}; rename one of them"
            )
        users[name] = cls({**(entry.get("config") or {}), "name": name})
        users[name].name = name
    return users


@dataclass(frozen=True, kw_only=True)
class UserReply:
    """What a simulated user answered."""

    should_terminate: bool
    text: str
    score: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def checked(cls, name: str, reply: Any) -> "UserReply":
        """(should_terminate, text, score, extra) as `generate_response` must return it."""
        if not isinstance(reply, tuple | list) or len(reply) != 4:
            raise InfraFault(
                f"interaction {name!r} returned {reply!r:.200}; generate_response returns "
                "(should_terminate, text, score, extra)"
            )
        should_terminate, text, score, extra = reply
        if not isinstance(text, str) or len(text) > MAX_REPLY_CHARS:
            raise InfraFault(
                f"interaction {name!r} said {text!r:.200}; it must be text of at most "
                f"{MAX_REPLY_CHARS} characters"
            )
        if score is not None and not math.isfinite(score):
            raise InfraFault(f"interaction {name!r} gave the score {score}; it must be finite")
        return cls(
            should_terminate=bool(should_terminate),
            text=text,
            score=None if score is None else float(score),
            extra=dict(extra or {}),
        )


class InteractionSet:
    """The users of a run and where their code runs."""

    def __init__(
        self, users: Mapping[str, BaseInteraction], *, default_timeout: float = 60.0
    ) -> None:
        self.users = dict(users)
        self.default_timeout = default_timeout
        self.num_open = 0
        """Trajectories whose user is not finalized."""

        self.num_faults = 0
        """Trajectories whose user could not be finalized."""

        self.keeper = ToolLoop()
        """Finalizes, so that nobody's event loop has to live for that."""

        self._threads = Threads(MAX_THREADS)
        self._loop = ToolLoop()

    @classmethod
    def of_file(cls, path: str | None, *, default_timeout: float = 60.0) -> "InteractionSet":
        users = {} if path is None else initialize_interactions_from_config(path)
        return cls(users, default_timeout=default_timeout)

    def close(self) -> None:
        """End the threads; users that are still talked to are not finalized."""
        self.keeper.close()
        self._loop.close()

    async def start(self, interaction_kwargs: Mapping[str, Any]) -> "UserLease":
        """The user of one trajectory, which the row's `interaction_kwargs` name."""
        kwargs = dict(interaction_kwargs)
        name = kwargs.pop("name", None)
        if name not in self.users:
            raise UnknownInteraction(
                f"extra_info.interaction_kwargs.name of a row is {name!r}; it must name one of the "
                f"interactions of this run: {sorted(self.users)}"
            )
        lease = UserLease(self, self.users[name], uuid.uuid4().hex, kwargs)
        self.num_open += 1
        try:
            await lease.start()
        except BaseException:
            await lease.finalize()
            raise
        return lease

    def not_finalized(self, name: str, error: Exception) -> None:
        self.num_faults += 1
        if self.num_faults == 1:  # the rest are only counted
            logger.warning("interaction %r was not finalized", name, exc_info=error)

    async def run(self, user: BaseInteraction, method: Callable[..., Any], *args: Any, **kw: Any):
        """Call code of a user where it belongs, within its deadline."""
        seconds = float(user.config.get("timeout") or self.default_timeout)
        place = self._loop if inspect.iscoroutinefunction(method) else self._threads
        try:
            return await place.run(user.name, lambda: method(*args, **kw), seconds)
        except DeadlineExceeded as error:
            raise InfraFault(
                f"interaction {user.name!r}: {method.__name__} took longer than {seconds:g} s; "
                "raise its config.timeout if it may"
            ) from error


class UserLease:
    """The simulated user of one trajectory."""

    def __init__(
        self,
        users: InteractionSet,
        interaction: BaseInteraction,
        instance_id: str,
        kwargs: Mapping[str, Any],
    ) -> None:
        self.interaction = interaction
        self.instance_id = instance_id
        self._users = users
        self._kwargs = dict(kwargs)
        self._finalizing: Any = None

    async def start(self) -> None:
        start = self.interaction.start_interaction
        made = await self._users.run(self.interaction, start, self.instance_id, **self._kwargs)
        self.instance_id = made if isinstance(made, str) else self.instance_id

    async def reply(self, messages: Sequence[Mapping[str, Any]]) -> UserReply:
        """What the user says after `messages`; `InfraFault` if that fails."""
        copies = [dict(message) for message in messages]
        name, respond = self.interaction.name, self.interaction.generate_response
        try:
            reply = await self._users.run(
                self.interaction, respond, self.instance_id, copies, **self._kwargs
            )
        except (InfraFault, Outage):
            raise
        except Exception as error:
            raise InfraFault(f"interaction {name!r} failed: {error!r}") from error
        return UserReply.checked(name, reply)

    async def finalize(self) -> None:
        """Let the user forget the trajectory, once; cancelling the caller does not stop it."""
        if self._finalizing is None:
            self._users.num_open -= 1
            self._finalizing = self._users.keeper.start(self._finalize())
        await asyncio.shield(asyncio.wrap_future(self._finalizing))

    async def _finalize(self) -> None:
        end = self.interaction.finalize_interaction
        try:
            await self._users.run(self.interaction, end, self.instance_id)
        except Exception as error:
            self._users.not_finalized(self.interaction.name, error)
