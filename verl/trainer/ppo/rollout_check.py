"""Engines on ranks of their own, compared with the policy that the actor's ranks train.

The driver asks both sides: the engines continue a prompt, the actor's ranks score what they said.
Where engine and policy share ranks, the ranks do this themselves (`verl.workers.roles`).
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from verl.config.ppo import ActorRolloutRefConfig
from verl.trainer.ppo.rollout_sync import renew_rollout
from verl.workers.roles.engine_check import EngineTerms
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.canary import METRIC, Canary
from verl.workers.rollout.probe import probe_engine
from verl.workers.rollout.remote import RemoteRollout
from verl.workers.rollout.replica import engines_of
from verl.workers.rollout.trained import Answer, TrainedPolicy

logger = logging.getLogger(__name__)


class GroupPolicy(TrainedPolicy):
    """The policy of the group `actor`, which sends its weights to `ranks` of `rollout`."""

    def __init__(self, actor: Any, rollout: Any, ranks: Sequence[int]) -> None:
        self._actor, self._rollout, self._ranks = actor, rollout, ranks

    @property
    def version(self) -> int:
        return self._actor.trained_version()[0]

    def send(self, *, is_scrambled: bool) -> None:
        renew_rollout(self._actor, self._rollout, self._ranks, is_scrambled=is_scrambled)

    def log_probs(self, answers: Sequence[Answer], *, temperature: float) -> list[Tensor]:
        return self._actor.score_answers(tuple(answers), temperature)[0]

    def can_scramble(self) -> bool:
        return False

    def as_scrambled(self) -> AbstractContextManager[None]:
        raise NotImplementedError(
            "the actor's weights are not scrambled in place; see can_scramble"
        )


class RolloutCheck:
    """Probe and canary of all engines of the group `rollout`."""

    def __init__(
        self, config: ActorRolloutRefConfig, actor: Any, rollout: Any, terms: EngineTerms
    ) -> None:
        engines = engines_of(rollout, config.rollout)
        self._engines = [engine for engine in engines if isinstance(engine, RemoteRollout)]
        self._policies = [GroupPolicy(actor, rollout, engine.ranks) for engine in self._engines]
        self._facts = [facts for facts in rollout.rollout_facts() if facts is not None]
        self._terms = terms
        self._canary = Canary(
            vocabulary=terms.vocabulary,
            max_model_len=min(facts.max_model_len for facts in self._facts),
            tolerance=terms.tolerance,
        )

    def probe(self) -> None:
        """Raise if an engine does not do what training relies on."""
        for engine, policy, facts in zip(self._engines, self._policies, self._facts, strict=True):
            probe_engine(
                engine,
                policy,
                facts,
                vocabulary=self._terms.vocabulary,
                tolerance=self._terms.tolerance,
                sampling=self._terms.sampling,
            )

    def after_update(self) -> dict[str, float]:
        """Raise if an engine does not generate with the new weights; how far they are off."""
        differences = [0.0]
        for engine, policy in zip(self._engines, self._policies, strict=True):
            try:
                differences.append(self._canary.check(engine, policy)[METRIC])
            except EngineLostError as error:  # it is started again when it is next needed
                logger.warning("a rollout engine was lost right after an update: %s", error)
        return {METRIC: max(differences)}
