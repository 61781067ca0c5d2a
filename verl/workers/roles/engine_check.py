"""What the policy's worker asks of an engine in a process of its own: probe and canary.

Such an engine computes with code of its own, so that weights arrived does not mean that they are in
use. It is probed once, before the first token is trained on, and compared with the trainer after
every update. All ranks check together: they put weights together and score together, also those
that lead no engine.
"""

import logging
from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedModel

from verl.config.ppo import ActorRolloutRefConfig
from verl.config.rollout import RolloutConfig
from verl.workers.engine.base import BaseEngine
from verl.workers.roles.process_copy import ProcessCopy
from verl.workers.rollout.base import EngineLostError
from verl.workers.rollout.canary import METRIC, Canary, default_tolerance
from verl.workers.rollout.probe import probe_engine
from verl.workers.rollout.probe_findings import SamplingInUse
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.trained import LocalPolicy

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EngineTerms:
    """What an engine is compared by."""

    vocabulary: int
    tolerance: float
    sampling: SamplingInUse

    @classmethod
    def of(
        cls, config: ActorRolloutRefConfig, model: PreTrainedModel, *, dtype: str, device: str
    ) -> "EngineTerms":
        """For a policy that is trained in `dtype`."""
        rollout = config.rollout
        formats = [dtype, rollout.quantization]
        if device != "cpu" or rollout.dtype == "fp8":  # there engines compute as training does
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


class EngineCheck:
    """Of the engine with the weights `copy` against the policy that `engine` trains."""

    def __init__(
        self, rollout: RolloutConfig, engine: BaseEngine, copy: ProcessCopy, terms: EngineTerms
    ) -> None:
        self._rollout = rollout
        self._process = copy.process
        self._policy = LocalPolicy(engine, copy.replace)
        self._terms = terms

    def probe(self) -> None:
        """Raise if the engine does not do what training relies on."""
        probe_engine(
            self._process,
            self._policy,
            self._facts,
            vocabulary=self._terms.vocabulary,
            tolerance=self._terms.tolerance,
            sampling=self._terms.sampling,
        )

    def after_update(self) -> dict[str, float]:
        """Raise if the engine does not generate with the new weights; how far it is off."""
        nothing = {METRIC: 0.0}
        try:
            return nothing | self._canary.check(self._process, self._policy)
        except EngineLostError as error:
            logger.warning("a rollout engine was lost right after an update: %s", error)
            # It is started again when it is next needed. The other ranks score now.
            return nothing | self._canary.check(None, self._policy)

    @cached_property
    def _canary(self) -> Canary:
        return Canary(
            vocabulary=self._terms.vocabulary,
            max_model_len=self._facts.max_model_len,
            tolerance=self._terms.tolerance,
        )

    @property
    def _facts(self) -> EngineFacts:
        if self._process is not None:
            return self._process.facts
        rollout = self._rollout
        return EngineFacts(  # of this only the length matters to a rank that leads no engine
            name=rollout.name,
            version="",
            log_probs="tempered",
            can_sleep=False,
            max_model_len=rollout.prompt_length + rollout.response_length,
        )
