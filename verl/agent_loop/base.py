"""What an agent loop is: from one prompt to one trajectory, by talking to a rollout engine.

A loop is made for every sample and runs once. It sends token ids and receives token ids; what the
model has said is never turned into text and back. `response_mask` says which tokens of the response
are the model's own: only those are trained. Loops are chosen per row by `agent_name`.
"""

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from verl.agent_loop.gate import Row, gated_row
from verl.agent_loop.journal import TrajectoryJournal, current_journal
from verl.agent_loop.server_manager import AsyncLLMServerManager, SampledTurns, sampled_turns
from verl.protocol.trajectory import AgentLoopMetrics, InfraFault
from verl.utils.dataset.continuation import Continuation, continuation_of
from verl.utils.dataset.media import UnreadableImage, load_media, media_encoder_of
from verl.utils.dataset.prompts import Prompt, encode_prompt, has_media, render
from verl.utils.dataset.rl_dataset import get_dataset_class
from verl.utils.dataset.tables import DataError
from verl.utils.environment import refusing
from verl.utils.import_utils import load_class_from_fqn
from verl.utils.media import Media
from verl.utils.py_functional import printable
from verl.utils.registry import Registry
from verl.utils.rollout_trace import rollout_trace_attr
from verl.utils.user_files import BrokenFile, read_yaml

logger = logging.getLogger(__name__)

SINGLE_TURN = "single_turn_agent"
Loop = TypeVar("Loop", bound="type[AgentLoopBase]")


@dataclass(kw_only=True)
class AgentLoopOutput:
    """One trajectory. `metrics` may be given as a mapping with the fields of `AgentLoopMetrics`."""

    prompt_ids: list[int]
    response_ids: list[int]
    """Everything after the prompt, replies of tools included."""

    response_mask: list[int]
    """1 for tokens of the model, 0 for what tools and users said."""

    response_logprobs: list[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    """Images of the trajectory, by kind, where `media` does not say more: they are found again in
    the order of their tokens."""

    media: Sequence[Media] = ()
    """Images of the trajectory; their places are in prompt and response together."""

    reward_score: float | None = None
    """Set when the loop has scored the trajectory itself."""

    num_turns: int = 0
    stop_reason: str = ""
    """Why the model's last turn ended: `stop`, `length` or `abort`."""

    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """Columns to add to the batch."""

    mm_processor_kwargs: dict[str, Any] | None = None
    """What the processor of images and videos was called with."""

    def as_dict(self) -> dict[str, Any]:
        """Every field by name; `metrics` as a mapping."""
        return {**vars(self), "metrics": dict(vars(self.metrics))}

    def __post_init__(self) -> None:
        if isinstance(self.metrics, Mapping):
            self.metrics = AgentLoopMetrics(**self.metrics)
        if len(self.response_mask) != len(self.response_ids):
            raise ValueError(
                f"response_mask has {len(self.response_mask)} entries for "
                f"{len(self.response_ids)} response_ids; each token needs one"
            )
        log_probs = self.response_logprobs
        if log_probs is not None and len(log_probs) != len(self.response_ids):
            raise ValueError(
                f"response_logprobs has {len(log_probs)} entries for {len(self.response_ids)} "
                "response_ids; tokens that were not sampled need 0.0"
            )


LoopResult = AgentLoopOutput | Sequence[AgentLoopOutput] | None
"""What `run` returns: a row, the rows of a session in order, or None: nothing to train on."""


def require_outputs(result: Any, loop: "AgentLoopBase") -> None:
    rows = [result] if isinstance(result, AgentLoopOutput) else result or []
    if isinstance(rows, Sequence) and all(isinstance(row, AgentLoopOutput) for row in rows):
        return
    kind = type(loop)
    raise TypeError(
        f"{kind.__module__}.{kind.__qualname__}.run returned {type(result).__name__}: "
        f"{printable(result, max_characters=80)}; it must return an AgentLoopOutput, a list of "
        "them, or None"
    )


@dataclass(frozen=True)
class DictConfigWrap:
    """A section of the configuration, handed to loops whole."""

    config: Any


def unwrapped(section: Any) -> Any:
    return section.config if isinstance(section, DictConfigWrap) else section


@dataclass(eq=False)
class LoopSample:
    """One sample that a loop is to make: what it is given, and who is told of its end."""

    params: dict[str, Any]
    """Sampling parameters, the seed of this sample among them."""

    row: Mapping[str, Any]
    """The columns of the dataset row, handed to `run` as keyword arguments."""

    end: Callable[[LoopResult | InfraFault, SampledTurns], None]
    """Called on the event loop with the output and the turns that engines sampled for it; with the
    fault if what the model talks to is broken."""

    trace: Mapping[str, Any] | None = None
    """Which trajectory it is, for `rollout_trace_attr`; None while nothing is traced."""

    journal: TrajectoryJournal | None = None
    """Where replies from outside are written, and taken from; None while nothing is journalled."""

    gated: Row | None = None
    """Its place in the schedule of an asynchronous run."""

    async def run_in(self, loop: "AgentLoopBase") -> None:
        turns = SampledTurns()
        # In the context of this task, and of those that the loop starts.
        sampled_turns.set(turns)
        current_journal.set(self.journal)
        gated_row.set(self.gated)
        output: LoopResult | InfraFault
        try:
            if self.trace is None:
                output = await loop.run(self.params, **self.row)
            else:
                with rollout_trace_attr(name="agent_loop", **self.trace):
                    output = await loop.run(self.params, **self.row)
            require_outputs(output, loop)
            await loop.find_media(output)
        except InfraFault as fault:
            output = fault
        if self.journal is not None:
            self.journal.end(output)
        self.end(output, turns)


def prompt_of(row: Mapping[str, Any]) -> Any:
    """What a built-in loop starts from; a dataset of a user's own may have left it out."""
    if "raw_prompt" not in row:
        raise DataError(
            "a row has no raw_prompt, the messages that an agent loop starts from; its columns are "
            f"{sorted(row)}. A dataset of your own (data.custom_cls) gives rows as RLHFDataset "
            "does: subclass it, or add raw_prompt (docs/data.md)"
        )
    return row["raw_prompt"]


class AgentLoopBase(ABC):
    """One prompt on its way to a trajectory.

    `trainer_config` is the whole configuration, `dataset_config` (or `data_config`) its data
    section, each in a `DictConfigWrap` or bare.
    Subclasses take `**kwargs` and pass them on: what their YAML entry adds arrives there too.
    """

    def __init__(
        self,
        trainer_config: Any,
        server_manager: AsyncLLMServerManager,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: type[Any] | None = None,
        dataset_config: Any = None,
        *,
        data_config: Any = None,
        hf_model_type: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.config = unwrapped(trainer_config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        section = dataset_config if data_config is None else data_config
        self.data_config = self.config.data if section is None else unwrapped(section)
        self.hf_model_type = hf_model_type
        self.apply_chat_template_kwargs = dict(self.data_config.apply_chat_template_kwargs)
        self.mm_processor_kwargs: dict[str, Any] = dict(self.data_config.mm_processor_kwargs or {})
        self.media = media_encoder_of(
            tokenizer,
            processor,
            self.mm_processor_kwargs,
            max_images=self.rollout_config.limit_images,
        )
        self.loop = asyncio.get_running_loop()

    @classmethod  # noqa: B027
    def close_class(cls, config: Any) -> None:
        """Called once when the run ends, not on the event loop: end what `init_class` began."""

    @classmethod  # noqa: B027
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        """Called once per class before its first loop is made: for tools, clients and the like."""

    @classmethod
    async def run_group(
        cls, make_loop: Callable[[], "AgentLoopBase"], samples: Sequence[LoopSample]
    ) -> None:
        """Run all samples of one prompt and end each; by default in a loop and a task per sample.

        The tasks are made in order, so the samples reach an engine together.
        """
        tasks = [asyncio.create_task(sample.run_in(make_loop())) for sample in samples]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> LoopResult:
        """Make the trajectory. `kwargs` are the columns of the row, `raw_prompt` among them.

        A list is the rows of one session, in order. None is nothing to train on. An `InfraFault`
        ends this trajectory without a reward; any other exception ends the run.
        """

    async def apply_chat_template(
        self,
        messages: Prompt,
        tools: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        remove_system_prompt: bool = False,
    ) -> list[int]:
        """Token ids of a prompt, within `data.max_prompt_length` as `data.truncation` says.

        With `remove_system_prompt` they are messages that follow a turn of the model, ready to be
        appended: without what the template writes at the beginning of a conversation, and with what
        it writes between the end of that turn and the next.
        """
        if videos:
            raise ValueError("the prompt has videos; give their frames as images")
        if not remove_system_prompt:
            ids, media = await self.encode_with_media(messages, tools)
        else:
            if isinstance(messages, str):
                raise ValueError("remove_system_prompt is for messages; the prompt is text")
            follow = partial(self.continuation(tools).ids_after_turn, None)
            if has_media(messages):
                ids, media = await asyncio.to_thread(self.media.encode, messages, follow)
            else:
                ids, media = follow(messages), ()
        if images is not None and len(images) != len(media):
            raise ValueError(
                f"{len(images)} images were given for messages with {len(media)} parts of type "
                "image; each belongs to one, in order"
            )
        return ids

    async def encode_with_media(
        self, messages: Prompt, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[list[int], tuple[Media, ...]]:
        """Token ids of a prompt, and its images with their places among these.

        Rows were checked when the data was opened; an image that cannot be read any more is a
        fault of the world.
        """
        if isinstance(messages, str) or not has_media(messages):
            return self.encode(messages, tools), ()
        try:
            return await asyncio.to_thread(
                self.media.encode_prompt,
                messages,
                max_tokens=self.rollout_config.prompt_length,
                tools=tools,
                template_kwargs=self.apply_chat_template_kwargs,
            )
        except UnreadableImage as error:
            raise InfraFault(str(error), reason="image") from error

    async def find_media(self, result: LoopResult) -> None:
        """Find the images of outputs that have `multi_modal_data` and no `media`."""
        for output in [result] if isinstance(result, AgentLoopOutput) else result or ():
            data = output.multi_modal_data or {}
            images = data.get("images") or data.get("image")
            if images and not output.media:
                ids = output.prompt_ids + output.response_ids
                output.media = await asyncio.to_thread(self.media.find, ids, images)

    async def prepare_images(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Load and resize the images of messages, so that encoding these does not hold the event
        loop up; what has been prepared is remembered."""
        if has_media(messages):
            try:
                await asyncio.to_thread(self.media.prepare, messages)
            except UnreadableImage as error:
                raise InfraFault(str(error), reason="image") from error

    @property
    def system_prompt(self) -> list[int]:
        """The ids that the chat template writes before the first message."""
        message = {"role": "user", "content": "a"}
        texts = [
            render(
                [message] * number,
                self.tokenizer,
                add_generation_prompt=False,
                template_kwargs=self.apply_chat_template_kwargs,
            )
            for number in (1, 2)
        ]
        one, two = (self.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts)
        return one[: max(0, 2 * len(one) - len(two))]

    async def process_vision_info(self, messages: Prompt) -> dict[str, list[Any]]:
        """The images and videos of messages, by kind; a kind without any is left out."""
        if isinstance(messages, str):
            return {}
        images, videos = await asyncio.to_thread(load_media, messages)
        found = {"images": images, "videos": videos}
        return {kind: media for kind, media in found.items() if media}

    def continuation(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        stop_token_ids: Sequence[int] = (),
    ) -> Continuation:
        """How messages follow a turn of the model, after a prompt that offered these tools."""
        return continuation_of(
            self.tokenizer,
            template_kwargs=self.apply_chat_template_kwargs,
            tools=tools,
            stop_token_ids=stop_token_ids,
        )

    def encode(
        self, messages: Prompt, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """`apply_chat_template` of text, for any thread."""
        return encode_prompt(
            messages,
            self.tokenizer,
            max_tokens=self.config.actor_rollout_ref.rollout.prompt_length,
            truncation=self.data_config.truncation,
            tools=tools,
            template_kwargs=self.apply_chat_template_kwargs,
        )


agent_loops = Registry[type[AgentLoopBase]](
    "agent loop",
    single_turn_agent="verl.agent_loop.single_turn:SingleTurnAgentLoop",
    env_agent="verl.agent_loop.env_agent:EnvAgentLoop",
    tool_agent="verl.agent_loop.tool_agent:ToolAgentLoop",
    collabllm_agent="verl.trainer.recipes.collabllm:CollabLLMAgentLoop",
    program_agent="verl.server.program_agent:ProgramAgentLoop",
)


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Class decorator: rows whose `agent_name` is this name run this loop."""
    return agent_loops.register(agent_name)


@dataclass(frozen=True)
class LoopClass:
    """A class and the further arguments its YAML entry gives it."""

    cls: type[AgentLoopBase]
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def listed_loops(path: str | None) -> dict[str, LoopClass]:
    """The loops of a YAML file: a list of `{name, _target_, ...}`, `_target_` being a class."""
    if path is None:
        return {}
    entries = read_yaml(Path(path).expanduser())
    if not isinstance(entries, list):
        raise BrokenFile(f"{path} holds {entries!r:.80}; it must list agent loops")
    loops: dict[str, LoopClass] = {}
    for entry in entries:
        if not isinstance(entry, dict) or not {"name", "_target_"} <= entry.keys():
            raise ValueError(
                f"{path} lists {entry!r}; every agent loop needs a name and a _target_, the full "
                "name of its class"
            )
        kwargs = {key: value for key, value in entry.items() if key not in ("name", "_target_")}
        loops[entry["name"]] = LoopClass(
            load_class_from_fqn(entry["_target_"], "agent loop"), kwargs
        )
    return loops


class PreparedLoops:
    """The loop classes of a run, each prepared (`init_class`) when a row first names it."""

    def __init__(self, config: Any, tokenizer: Any, processor: Any) -> None:
        rollout = config.actor_rollout_ref.rollout
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.default: str = rollout.agent.default_agent_loop
        """The loop of rows that name none: with tools or users, where the run is multi-turn."""

        if rollout.multi_turn.enable and self.default == SINGLE_TURN:
            logger.info("multi_turn.enable: rows that name no agent run tool_agent")
            self.default = "tool_agent"
        self._listed = listed_loops(rollout.agent.agent_loop_config_path)
        self._prepared: dict[str, LoopClass] = {}
        self._preparing = threading.Lock()
        self._dataset_cls = get_dataset_class(config.data)

    def name_of(self, row: Mapping[str, Any]) -> str:
        return row.get("agent_name") or self.default

    @refusing()
    def prepare(self, name: str) -> LoopClass:
        """The class of that name; on first use it may connect to servers."""
        with self._preparing:
            if name not in self._prepared:
                chosen = self._listed.get(name) or LoopClass(agent_loops[name])
                if chosen.cls not in {other.cls for other in self._prepared.values()}:
                    prepare = chosen.cls.init_class
                    prepare(self.config, self.tokenizer, self.processor, **chosen.kwargs)
                self._prepared[name] = chosen
            return self._prepared[name]

    def make(self, chosen: LoopClass, servers: AsyncLLMServerManager) -> AgentLoopBase:
        """A loop for one sample."""
        return chosen.cls(
            trainer_config=DictConfigWrap(self.config),
            server_manager=servers,
            tokenizer=self.tokenizer,
            processor=self.processor,
            dataset_cls=self._dataset_cls,
            dataset_config=DictConfigWrap(self.config.data),
            **chosen.kwargs,
        )

    def close(self) -> None:
        """End what the classes keep for the run; whoever prepares them again begins anew."""
        with self._preparing:
            classes, self._prepared = self._prepared, {}
        for cls in {chosen.cls for chosen in classes.values()}:
            cls.close_class(self.config)
