"""A second grader looks at some of the responses that were scored.

The built-in mathematics graders compare values by our own arithmetic; math-verify, which shares
nothing with it, grades a small share of the same responses (`reward_model.audit_ratio`). Scores
stay as they are. The metrics count what it looked at and where it disagrees, the log names the
answers, and `Tripwires` raises an alarm when that is too often: one of the two graders is wrong.
"""

import logging
import zlib
from typing import Any

from verl.algos.sessions import one_row_per_session
from verl.protocol import DataProto
from verl.trainer.ppo.validation import texts_of
from verl.utils.import_utils import is_available
from verl.utils.reward_score import scorers
from verl.utils.reward_score.math_grader import Abstain, Correct
from verl.utils.reward_score.math_verify import second_opinion

logger = logging.getLogger(__name__)

MAX_PER_BATCH = 16
"""math-verify takes up to a second for a hostile answer; the step waits for it."""

RIGHT_ABOVE = 0.5
"""Both graders that are audited give more than this to a right answer, and less to a wrong one."""


def is_graded_by_value(data_source: Any) -> bool:
    """Whether its built-in grader compares values, as math-verify does, and not texts."""
    by_value = (scorers["numina_cn_k12"], scorers["hiyouga/geometry3k"])
    return data_source in scorers and scorers[data_source] in by_value


def audit(batch: DataProto, tokenizer: Any, ratio: float) -> dict[str, float]:
    """How many scored responses math-verify had a verdict on, and how many it judged otherwise.

    Empty where there is nothing to audit. Which responses are looked at follows from their tokens.
    """
    sources = batch.non_tensor_batch.get("data_source", ())
    if not ratio or not any(map(is_graded_by_value, set(sources))):
        return {}
    if not is_available("math_verify"):
        return {}
    ends = one_row_per_session(batch)
    chosen = [
        row
        for row, source in enumerate(ends.non_tensor_batch["data_source"])
        if is_graded_by_value(source)
        and zlib.crc32(ends.batch["responses"][row].numpy().tobytes()) < ratio * 2**32
    ][:MAX_PER_BATCH]
    num_audited = num_disagreements = 0
    if chosen:
        audited = ends.select_idxs(chosen)
        scores = audited.batch["token_level_scores"].sum(-1).tolist()
        golds = [str(entry["ground_truth"]) for entry in audited.non_tensor_batch["reward_model"]]
        _, responses = texts_of(audited, tokenizer)
        for response, gold, score in zip(responses, golds, scores, strict=True):
            verdict = second_opinion(response, gold)
            if isinstance(verdict, Abstain):
                continue
            num_audited += 1
            if isinstance(verdict, Correct) != (score > RIGHT_ABOVE):
                num_disagreements += 1
                logger.warning(
                    "the grader gives %g, math-verify says %s: gold answer %r, response ends %r",
                    *(score, type(verdict).__name__.lower(), gold[:200], response[-200:]),
                )
    return {
        "reward/num_audited": float(num_audited),
        "reward/num_audit_disagreements": float(num_disagreements),
    }
