"""`Publisher`: makes an update of the policy visible to the rollout engines.

    trainer                      rollout ranks                    actor ranks
      publish()                    (engines that share the trained storage: nothing to do)
      update_weights      ---------------------------------->    send to the engines they hold
      accept_weights(token) -->    open a port each, serve nothing
      receive_weights       -->    wait for a sender
      send_weights          ---------------------------------->    whole tensors in buckets
                                   verify, serve              <--    to its shard of the ports
      compare what was sent with what is held; drift check

Rollout ranks of their own get a new token for every update, so that nobody else's weights come in,
nor those of an earlier update. An engine that is lost on the way is restarted where it was, and
everything is sent again. An engine that computes with code of its own is probed before the first
token is trained on and compared with the policy after every update: that weights arrived does not
mean that they are in use.
"""

import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from verl.config.ppo import ActorRolloutRefConfig
from verl.single_controller.base.failures import WorkerDied, WorkerError, WorkerTimeout
from verl.utils.rollout_trace import rollout_trace_op
from verl.workers.rollout.base import EngineLostError, Rollout
from verl.workers.rollout.factory import has_own_process, ranks_per_engine
from verl.workers.rollout.probe import (
    METRIC,
    FixedPromptCheck,
    SamplingInUse,
    default_tolerance,
    probe_engine,
)
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.remote import RemoteRollout, remote_rollouts
from verl.workers.rollout.trained import Answer, TrainedPolicy

ATTEMPTS = 3
REASON_SECONDS = 10.0
"""How long receivers get to report why they refused, once the sender has failed."""

logger = logging.getLogger(__name__)


class Publisher(ABC):
    """Makes an update visible to the rollout engines of a run."""

    @abstractmethod
    def publish(self, *, in_flight: bool = False) -> dict[str, float]:
        """Return when every engine generates with the trained weights; the metrics of it.

        With `in_flight` requests may run meanwhile; they go on with the new weights.
        """

    @abstractmethod
    def recover(self, engine: Rollout) -> None:
        """Restart a lost engine with the published weights; others are left alone."""

    @abstractmethod
    def keep_published(self) -> None:
        """From now on engines generate while the policy is trained: keep what is published, for
        those that are lost before the next update is. Call it when that is what is trained."""


class SharedStorage(Publisher):
    """Engines that generate with the very storage that is trained."""

    @rollout_trace_op
    def publish(self, *, in_flight: bool = False) -> dict[str, float]:
        logger.info("weights published: the engines generate with the trained storage")
        return {}

    def recover(self, engine: Rollout) -> None:
        """An engine in the trainer's process is lost with it."""

    def keep_published(self) -> None:
        """What is trained is what engines generate with, always."""


class SentWeights(Publisher):
    """Engines with weights of their own, on the actor's ranks or on ranks of the rollout.

    Where rollout ranks are apart, further groups of them may join and leave.
    """

    def __init__(self, config: ActorRolloutRefConfig, actor: Any, rollout: Any) -> None:
        """`actor` and `rollout` are worker groups; the same one where they share ranks."""
        self._config, self._actor = config, actor
        self._groups = [rollout]
        self._is_apart = rollout is not actor
        self._keeps = False
        self._one_transfer = threading.Lock()  # lost engines are recovered on a thread
        self._check: DriftCheck | None = None
        if self._is_apart and has_own_process(config.rollout.name):
            self._check = DriftCheck(self._compared_of(rollout), actor.check_settings()[0])
            if config.rollout.probe:
                self._check.probe()

    def join(self, engine: RemoteRollout) -> None:
        """Bring a further group, which has this one engine, to the published weights; from now on
        it gets every update. Called while the actor is idle."""
        assert self._is_apart, "engines beside the actor's ranks are as many as those"
        with self._one_transfer:
            compared = [] if self._check is None else self._compared_of(engine.group)
            if compared and self._config.rollout.probe:
                DriftCheck(compared, self._actor.check_settings()[0]).probe()
            self.send(engine, is_kept=self._keeps)
            self._groups.append(engine.group)
            if self._check is not None:
                self._check.add(compared)

    def send_published(self, group: Any) -> None:
        """Bring a group that gets no updates to the published weights, for a while."""
        with self._one_transfer:
            self._send_once([group], None, False, False, self._keeps)

    def leave(self, engine: RemoteRollout) -> None:
        """Send it no further update; after this its processes may end."""
        with self._one_transfer:
            self._forget(engine.group)

    def _forget(self, group: Any) -> None:
        if group in self._groups:
            self._groups.remove(group)
            if self._check is not None:
                self._check.remove(group)

    @rollout_trace_op
    def publish(self, *, in_flight: bool = False) -> dict[str, float]:
        """With `in_flight` engines pause while they take the weights in (`timing_s/update_weights/
        stall`); one that cannot refuses."""
        logger.info("weights published: sent to the engines")
        with self._one_transfer:
            metrics = self._publish(in_flight)
            if self._keeps:
                self._actor.keep_weights()
        return metrics

    def keep_published(self) -> None:
        with self._one_transfer:
            self._keeps = True
            self._actor.keep_weights()

    def _publish(self, in_flight: bool) -> dict[str, float]:
        if self._is_apart:
            start = time.perf_counter()
            self.send(in_flight=in_flight)
            sent, metrics = time.perf_counter(), {}
            if self._check is not None:
                metrics = self._check.after_update()
            phases = {
                "transfer": sent - start,
                "check": time.perf_counter() - sent,
                "stall": max(self._groups[0].stall_seconds()),  # all take it in at once
            }
            return metrics | update_timing(time.perf_counter() - start, phases)
        reports: list[dict[str, float]] = self._actor.update_weights(in_flight)
        names = {name for report in reports for name in report}
        return {name: max(r[name] for r in reports if name in r) for name in sorted(names)}

    def recover(self, engine: Rollout) -> None:
        with self._one_transfer:
            if self._is_apart:
                assert isinstance(engine, RemoteRollout)
                self.send(engine, is_kept=self._keeps)
            elif self._keeps:
                self._actor.restore_weights()
            else:
                self._actor.update_weights()

    def send(
        self,
        engine: RemoteRollout | None = None,
        *,
        is_scrambled: bool = False,
        in_flight: bool = False,
        is_kept: bool = False,
    ) -> int:
        """Bring the ranks of an engine, or all, to the actor's weights; their version then.

        Raises unless all of them hold the sender's fingerprint; until then they generate nothing. A
        probe asks for scrambled weights; `is_kept` are those that were published last.
        """
        for attempt in range(ATTEMPTS):
            chosen = None if engine is None else engine.ranks
            groups = list(self._groups) if engine is None else [engine.group]
            try:
                return self._send_once(groups, chosen, is_scrambled, in_flight, is_kept)
            except WorkerError as error:
                if attempt == ATTEMPTS - 1 or not self._has_lost_any(groups):
                    raise
                logger.warning("an engine was lost while it was sent weights; resending: %s", error)
        raise AssertionError("the last attempt returns or raises")

    def _has_lost_any(self, groups: Sequence[Any]) -> bool:
        """Whether an engine of these groups is lost, so that it may work without it or once it is
        restarted. A group that joined and whose processes have ended is forgotten."""
        has_lost = False
        for group in groups:
            try:
                has_lost |= not all(group.rollout_is_alive())
            except WorkerDied as error:
                if group not in self._groups[1:]:
                    raise
                logger.warning("a rollout replica that had joined is gone: %s", error)
                self._forget(group)
                has_lost = True
        return has_lost

    def _send_once(
        self,
        groups: Sequence[Any],
        ranks: tuple[int, ...] | None,
        is_scrambled: bool,
        in_flight: bool,
        is_kept: bool,
    ) -> int:
        actor, token = self._actor, secrets.token_hex(16)
        ports = [
            address
            for group in groups
            for address in group.accept_weights(token, ranks, in_flight)
            if address is not None
        ]
        receiving = [(group, group.execute_all_async("receive_weights")) for group in groups]
        try:
            if is_kept:
                results = actor.send_kept_weights(tuple(ports), token)
            else:
                results = actor.send_weights(tuple(ports), token, is_scrambled)
        except WorkerError:
            self._raise_reason(receiving)
            raise
        sent = {published for published in results if published is not None}
        held = {p for group, answers in receiving for p in group.resolve(answers) if p is not None}
        if held != sent or len(held) != 1:
            raise RuntimeError(
                f"the actor's ranks sent {sent} (version, fingerprint), and the rollout's hold "
                f"{held}; all of them must be the same: the ranks of the actor have drifted apart"
            )
        return held.pop().version

    def _raise_reason(self, receiving: Sequence[tuple[Any, list[Any]]]) -> None:
        """Raise the receiver's error, if it has ended too; it explains the sender's."""
        try:
            for group, answers in receiving:
                group.with_deadline(REASON_SECONDS).resolve(answers)
        except WorkerTimeout:
            logger.error("the weights could not be sent, and the rollout still waits for them")

    def _compared_of(self, group: Any) -> "list[Compared]":
        """The driver asks both sides: engines continue a prompt, the actor's ranks score it."""
        size = ranks_per_engine(self._config.rollout)
        is_expendable = group is not self._groups[0]
        engines = remote_rollouts(group, size, first_rank_leads=True, is_expendable=is_expendable)
        facts = [facts for facts in group.rollout_facts() if facts is not None]
        return [
            Compared(engine, GroupPolicy(self._actor, self, engine), engine_facts)
            for engine, engine_facts in zip(engines, facts, strict=True)
        ]


def update_timing(seconds: float, phases: Mapping[str, float]) -> dict[str, float]:
    """The metrics of what an update took."""
    named = {f"timing_s/update_weights/{phase}": taken for phase, taken in phases.items()}
    return {"timing_s/update_weights": seconds, **named}


def publisher_of(config: ActorRolloutRefConfig, actor: Any, rollout: Any) -> Publisher:
    """The publisher between two worker groups, or of one that both trains and generates."""
    is_shared = rollout is actor and all(actor.shares_weights())
    return SharedStorage() if is_shared else SentWeights(config, actor, rollout)


# ---- engines that compute with code of their own ------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class CheckSettings:
    """What an engine is compared by."""

    vocabulary: int
    tolerance: float
    sampling: SamplingInUse

    @classmethod
    def of(
        cls, config: ActorRolloutRefConfig, model: PreTrainedModel, *, dtype: str, device: str
    ) -> "CheckSettings":
        """Settings for a policy that is trained in `dtype`."""
        rollout = config.rollout
        formats = [dtype, rollout.quantization]
        if device != "cpu" or rollout.dtype == "fp8":  # on a CPU engines compute as training does
            formats.append(rollout.dtype)
        is_filtered = rollout.top_k > 0 or rollout.top_p < 1 or rollout.repetition_penalty != 1
        return cls(
            vocabulary=model.config.get_text_config().vocab_size,
            tolerance=rollout.canary_tolerance or default_tolerance(*formats),
            sampling=SamplingInUse(
                temperature=rollout.temperature,
                is_filtered=is_filtered,
                uses_log_probs=rollout.calculate_log_probs or config.actor.use_rollout_log_probs,
            ),
        )


class Compared(NamedTuple):
    """An engine and the policy that it should be; None on a rank that only scores."""

    engine: Rollout | None
    policy: TrainedPolicy
    facts: EngineFacts


class DriftCheck:
    """Compares engines with the policy under training, once by a probe and after every update."""

    def __init__(
        self, compared: Sequence[Compared], settings: CheckSettings, *, on_ranks: bool = False
    ) -> None:
        """With `on_ranks` the actor's ranks check their own engines and score together, also those
        that lead no engine or have just lost one."""
        self._compared = list(compared)
        self._settings = settings
        self._on_ranks = on_ranks

    def add(self, compared: Sequence[Compared]) -> None:
        """Check these engines too."""
        self._compared += compared

    def remove(self, group: Any) -> None:
        """Do not check the engines of a group any more."""
        self._compared = [
            one
            for one in self._compared
            if not (isinstance(one.engine, RemoteRollout) and one.engine.group is group)
        ]

    def probe(self) -> None:
        """Raise if an engine does not do what training relies on."""
        for engine, policy, facts in self._compared:
            probe_engine(
                engine,
                policy,
                facts,
                vocabulary=self._settings.vocabulary,
                tolerance=self._settings.tolerance,
                sampling=self._settings.sampling,
            )

    def after_update(self) -> dict[str, float]:
        """Raise if an engine does not generate with the new weights; how far they are off."""
        differences = [0.0]
        for engine, policy, _ in self._compared:
            try:
                differences.append(self._fixed_prompt.check(engine, policy).get(METRIC, 0.0))
            except EngineLostError as error:  # it is restarted when it is next needed
                logger.warning("a rollout engine was lost right after an update: %s", error)
                if self._on_ranks:
                    self._fixed_prompt.check(None, policy)
        return {METRIC: max(differences)}

    @cached_property
    def _fixed_prompt(self) -> FixedPromptCheck:
        return FixedPromptCheck(
            vocabulary=self._settings.vocabulary,
            max_model_len=min(facts.max_model_len for _, _, facts in self._compared),
            tolerance=self._settings.tolerance,
        )


class GroupPolicy(TrainedPolicy):
    """The policy of the group `actor`, whose weights a publisher sends to `engine`."""

    def __init__(self, actor: Any, publisher: SentWeights, engine: RemoteRollout) -> None:
        self._actor, self._publisher, self._engine = actor, publisher, engine

    @property
    def version(self) -> int:
        return self._actor.trained_version()[0]

    def send(self, *, is_scrambled: bool) -> None:
        self._publisher.send(self._engine, is_scrambled=is_scrambled)

    def log_probs(self, answers: Sequence[Answer], *, temperature: float) -> list[Tensor]:
        return self._actor.score_answers(tuple(answers), temperature)[0]

    def can_scramble(self) -> bool:
        return False

    def as_scrambled(self) -> AbstractContextManager[None]:
        raise NotImplementedError(
            "the actor's weights are not scrambled in place; see can_scramble"
        )
