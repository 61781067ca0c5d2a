"""Generate once, train many times: a debugging aid for everything that follows generation.

The first run with `actor_rollout_ref.rollout.skip_rollout=true` writes what it generated in each
step; later runs of the same experiment read it back instead of generating. A dump serves only the
prompts it was made for: with other prompts the rewards would belong to other questions, so that
is an error and not a surprise in the reward curve. Validation always generates.

    RolloutSkip(config, async_rollout_manager).wrap_generate_sequences()

A method of one's own that generates is marked instead, and asks its object's configuration:

    @SkipManager.annotate(role="rollout")
    def generate_sequences(self, prompts): ...
"""

import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, Protocol

from verl.protocol import DataProto
from verl.utils.fs import own_folder

__all__ = ["DataProto", "RolloutSkip", "SkipManager"]

logger = logging.getLogger(__name__)

_FINGERPRINT = "rollout_skip_prompts"


class Generator(Protocol):
    """The object that generates: an agent loop manager, or a worker group."""

    generate_sequences: Callable[..., Any]


class RolloutSkip:
    """`rollout_wg` is the object whose `generate_sequences` the trainer calls.

    The dumps of an experiment are `{skip_dump_dir}/{experiment}_{project}_GBS{prompts}__N{n}/`,
    one per training step, so a dump is reused only with the same batch size and samples per prompt.
    """

    def __init__(self, config: Any, rollout_wg: Generator | None = None) -> None:
        rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
        section = _skip_section(config)
        self.n, self.gbs = rollout["n"], _prompts_per_generation(config.data)
        name = (
            f"{trainer.get('experiment_name', '')}_{trainer.get('project_name', '')}"
            f"_GBS{self.gbs}__N{self.n}"
        )
        folder = section.get("dump_dir") or rollout.get("skip_dump_dir", "/tmp/rollout_dump")
        self.dumped_dir = Path(folder).expanduser() / name.replace("/", "_")
        self.steps = set(section.get("steps") or rollout.get("skip_steps") or ())
        self._rollout_wg = rollout_wg

    @property
    def curr_path_dump(self) -> Path:
        """The folder of this experiment's dumps."""
        return self.dumped_dir

    def wrap_generate_sequences(self) -> None:
        """From now on `rollout_wg.generate_sequences` reads the dump where there is one."""
        if self._rollout_wg is None:
            raise ValueError("rollout_wg is None; pass the object whose generations are dumped")
        self._rollout_wg.generate_sequences = self.around(self._rollout_wg.generate_sequences)
        logger.warning("skip_rollout is on: generations are read from %s", self.dumped_dir)

    def around(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        """`generate`, which reads the dump where there is one."""
        wrap = self._wrapped_async if inspect.iscoroutinefunction(generate) else self._wrapped
        return wrap(generate)

    def _wrapped(self, generate: Callable[..., DataProto]) -> Callable[..., DataProto]:
        def generate_or_load(prompts: DataProto, **kwargs: Any) -> DataProto:
            if not self._is_chosen(prompts):
                return generate(prompts, **kwargs)
            loaded = self._load(prompts)
            if loaded is not None:
                return loaded
            generated = generate(prompts, **kwargs)
            self._dump(prompts, generated)
            return generated

        return generate_or_load

    def _wrapped_async(self, generate: Callable[..., Any]) -> Callable[..., Any]:
        async def generate_or_load(prompts: DataProto, **kwargs: Any) -> DataProto:
            if not self._is_chosen(prompts):
                return await generate(prompts, **kwargs)
            loaded = self._load(prompts)
            if loaded is not None:
                return loaded
            generated = await generate(prompts, **kwargs)
            self._dump(prompts, generated)
            return generated

        return generate_or_load

    def _is_chosen(self, prompts: DataProto) -> bool:
        """Whether the generations of these prompts are dumped and read; those of validation and of
        steps that `skip_steps` leaves out are not."""
        step = prompts.meta_info.get("global_steps", 0)
        return not prompts.meta_info.get("validate") and (not self.steps or step in self.steps)

    def _load(self, prompts: DataProto) -> DataProto | None:
        path = self._path(prompts)
        if not path.exists():
            return None
        own_folder(self.dumped_dir)  # the default is where anybody may write
        generated = DataProto.load_from_disk(path)
        if generated.meta_info.pop(_FINGERPRINT) != fingerprint(prompts):
            raise ValueError(
                f"the generations in {path} were made for other prompts than this step has; "
                "delete that folder, or set another trainer.experiment_name or skip_dump_dir"
            )
        if "uid" in prompts.non_tensor_batch and "uid" in generated.non_tensor_batch:
            # A run draws new ids; the groups are the same, for the prompts are.
            generated.non_tensor_batch["uid"] = prompts.non_tensor_batch["uid"]
        return generated

    def _dump(self, prompts: DataProto, generated: DataProto) -> None:
        path = self._path(prompts)
        own_folder(self.dumped_dir)
        dump = DataProto(
            batch=generated.batch,
            non_tensor_batch=generated.non_tensor_batch,
            meta_info={**generated.meta_info, _FINGERPRINT: fingerprint(prompts)},
        )
        dump.save_to_disk(path)

    def _path(self, prompts: DataProto) -> Path:
        return self.dumped_dir / f"step_{prompts.meta_info.get('global_steps', 0)}"


class SkipManager:
    """Dumps of generations for methods that are marked with `annotate`.

    No page states its parameters: the role is a section of `skip`, as in the keys of verl 0.9.
    """

    @staticmethod
    def annotate(role: str = "rollout") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Use on a method `generate(self, prompts, **kwargs)` of an object with a `config`.

        Where `skip.<role>.enable` (or `rollout.skip_rollout`) of that configuration is on, the
        method reads a dump if there is one, and writes one if there is none.
        """
        if role != "rollout":
            raise ValueError(
                f"skip.{role} is not there: dumps are of whole steps; use role='rollout'"
            )

        def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(method)
            def call(self: Any, prompts: DataProto, **kwargs: Any) -> Any:
                skip = _skip_of(self.config)
                generate = method.__get__(self)
                return (generate if skip is None else skip.around(generate))(prompts, **kwargs)

            return call

        return decorate


def _skip_of(config: Any) -> RolloutSkip | None:
    """The dumps that a run's configuration asks for, in today's keys or in those of verl 0.9."""
    section = _skip_section(config)
    is_on = config.actor_rollout_ref.rollout.get("skip_rollout", False)
    if not (is_on or section.get("enable", False)):
        return None
    if section.get("action", "cache") != "cache":
        raise ValueError(
            f"skip.rollout.action is {section['action']!r}; a dump serves the step that it was "
            "made in: use cache"
        )
    return RolloutSkip(config)


def _skip_section(config: Any) -> Mapping[str, Any]:
    """`skip.rollout` of a configuration that was not loaded by us; empty in ours."""
    skip = config.get("skip") if isinstance(config, Mapping) else None
    return (skip or {}).get("rollout") or {}


def fingerprint(prompts: DataProto) -> str:
    """What tells two batches of prompts apart: their token ids if present, else the messages."""
    digest = hashlib.sha256(str(len(prompts)).encode())
    if prompts.batch is not None and "input_ids" in prompts.batch.keys():  # noqa: SIM118
        digest.update(prompts.batch["input_ids"].cpu().numpy().tobytes())
    elif "raw_prompt" in prompts.non_tensor_batch:
        messages = list(prompts.non_tensor_batch["raw_prompt"])
        digest.update(json.dumps(messages, default=repr, sort_keys=True).encode())
    return digest.hexdigest()


def _prompts_per_generation(data: Mapping[str, Any]) -> int:
    named = data.get("gen_batch_size")  # not every configuration has the key
    return data["train_batch_size"] if named is None else named
