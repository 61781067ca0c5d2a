"""Before training: is an engine what it says it is?

    scrambled weights --> engine      greedy tokens    as the trainer, scrambled as well?
    true weights      --> engine      greedy tokens    a new prompt: are all weights in use?
                                                       the prompt from before: is its cache gone?
                                      drawn tokens     two temperatures, and one with top-p:
                                                       which log-probabilities are reported?

A tensor that either update left out shows as a difference, whatever the engine held before: read
from disk it may have been right by chance, and then the scrambled half tells. What does not hold
stops the run before a token is trained on. It costs two updates and seven short generations.
"""

import logging
from collections.abc import Sequence

from verl.workers.rollout.base import Rollout
from verl.workers.rollout.canary import (
    canary_lengths,
    canary_prompt,
    canary_request,
    continue_prompts,
)
from verl.workers.rollout.probe_findings import (
    COLD,
    HOT,
    Answers,
    Finding,
    SamplingInUse,
    Scored,
    as_table,
    judge,
)
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.trained import Answer, TrainedPolicy

logger = logging.getLogger(__name__)

NUM_TOKENS = 24
"""Of each answer. The more there are, the surer a wrong weight changes one of them visibly."""

TINY_TOP_P = 1e-6
"""Leaves the likeliest token alone, so that its log-probability after the filter is 0."""


class EngineProbeError(RuntimeError):
    """An engine does not do what training relies on."""


def probe_engine(
    rollout: Rollout | None,
    trained: TrainedPolicy,
    facts: EngineFacts,
    *,
    vocabulary: int,
    tolerance: float,
    sampling: SamplingInUse,
) -> list[Finding]:
    """Ask an engine what it does; EngineProbeError says what does not hold.

    Afterwards the engine holds the true weights. On a rank without an engine, which takes part in
    sending and scoring, `rollout` is None and nothing is found.
    """
    answers = ask(rollout, trained, vocabulary, facts.max_model_len)
    if rollout is None:
        return []
    findings = judge(
        answers, facts, version=trained.version, tolerance=tolerance, sampling=sampling
    )
    logger.warning(  # a run rests on it, so it is shown at the default level
        "the rollout engine %s %s was asked:\n%s", facts.name, facts.version, as_table(findings)
    )
    faults = [f"- {f.question}? {f.answer}. {f.fault}" for f in findings if f.fault]
    if faults:
        listed = "\n".join(faults)
        raise EngineProbeError(
            f"the rollout engine {facts.name} {facts.version} does not do what training relies on:"
            f"\n{listed}\nUse another version of the engine or rollout.name=native; "
            "actor_rollout_ref.rollout.probe=False goes on regardless"
        )
    return findings


def ask(
    rollout: Rollout | None, trained: TrainedPolicy, vocabulary: int, max_model_len: int
) -> Answers:
    """Every rank makes the same calls of `trained`, with or without an engine."""
    num_tokens, num_prompt_tokens = canary_lengths(max_model_len, NUM_TOKENS)
    known, unknown = (canary_prompt(vocabulary, num_prompt_tokens, n) for n in (0, 1))
    greedy = canary_request(known, "again", max_tokens=num_tokens)
    trained.send(is_scrambled=True)
    (before,) = continue_prompts(rollout, [greedy])
    scrambled = None
    if trained.can_scramble():
        with trained.as_scrambled():
            (scrambled,) = score(trained, [before], (1.0,))
    trained.send(is_scrambled=False)
    drawn = {
        "cold": {"temperature": COLD},
        "hot": {"temperature": HOT},
        "repeated": {"temperature": HOT},
        "filtered": {"temperature": HOT, "top_p": TINY_TOP_P},
    }
    requests = [greedy, canary_request(unknown, "fresh", max_tokens=num_tokens)]
    for name, options in drawn.items():
        requests.append(canary_request(unknown, name, max_tokens=num_tokens, seed=1, **options))
    found = score(trained, continue_prompts(rollout, requests), (1.0, COLD, HOT))
    named = dict(zip((request.request_id for request in requests), found, strict=True))
    return Answers(before=before, scrambled=scrambled, **named)


def score(
    trained: TrainedPolicy, answers: Sequence[Answer], temperatures: Sequence[float]
) -> list[Scored]:
    """The answers beside what training gives for them at each temperature."""
    columns = {t: trained.log_probs(answers, temperature=t) for t in temperatures}
    return [
        Scored(answer=answer, expected={t: column[row] for t, column in columns.items()})
        for row, answer in enumerate(answers)
    ]
