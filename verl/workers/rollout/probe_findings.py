"""What an engine's answers to the probe say about it; see `probe` for the questions.

Every finding has numbers: the largest difference between the log-probabilities that the engine
reported and those of training, beside what rounding explains.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.workers.rollout.canary import largest_difference
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.trained import Answer

COLD, HOT = 0.5, 2.0
"""Temperatures at which log-probabilities are compared."""

DRAWN_FACTOR = 2.0
"""Drawn tokens are less likely than greedy ones, and at `COLD` logits and their errors count
twice."""

SHORTEST_CACHED = 64
"""Engines reuse whole blocks of a prompt; one of fewer tokens may have none."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One question, what came of it, and what is wrong with that."""

    question: str
    answer: str
    fault: str = ""
    """Empty if the run may go on."""


@dataclass(frozen=True, kw_only=True)
class SamplingInUse:
    """What of an engine's log-probabilities the run relies on."""

    temperature: float = 1.0
    is_filtered: bool = False
    """Whether top-k, top-p, min-p or a repetition penalty are in use."""

    uses_log_probs: bool = True
    """Whether the engine's log-probabilities reach training at all."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What an engine drew, and what training gives for it, by temperature."""

    answer: Answer
    expected: Mapping[float, Tensor]

    def difference(self, temperature: float = 1.0) -> float:
        return largest_difference(self.answer, self.expected[temperature])


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Everything the engine was asked for."""

    before: Answer
    """Greedy, with scrambled weights."""

    scrambled: Scored | None
    """The same, scored by the trainer with scrambled weights; None where it cannot."""

    again: Scored
    """The same prompt with the true weights."""

    fresh: Scored
    """A prompt that no other weights have seen."""

    cold: Scored
    hot: Scored
    repeated: Scored
    """As `hot`, with the same seed."""

    filtered: Scored
    """As `hot`, among the likeliest token alone."""


def judge(
    answers: Answers,
    facts: EngineFacts,
    *,
    version: int,
    tolerance: float,
    sampling: SamplingInUse,
) -> list[Finding]:
    weights = weights_finding(answers, tolerance)
    findings = [weights, version_finding(answers, version)]
    if not weights.fault:  # else nothing can be compared with the trainer
        findings += [
            cache_finding(answers, tolerance),
            log_probs_finding(answers, facts, sampling, DRAWN_FACTOR * tolerance),
        ]
    return [*findings, seed_finding(answers)]


def weights_finding(answers: Answers, tolerance: float) -> Finding:
    """Whether all tensors of both updates are in use."""
    fresh = answers.fresh.difference()
    shown = f"after the true weights {fresh:.2g} from the trainer"
    fault = ""
    if answers.scrambled is not None:
        scrambled = answers.scrambled.difference()
        shown = f"after scrambled weights {scrambled:.2g}, {shown}"
        is_right = max(scrambled, fresh) <= tolerance
    else:
        change = change_between(answers.before, answers.again.answer)
        shown = f"scrambled weights change log-probs by {change:.2g}, {shown}"
        is_right = fresh <= tolerance < change
    if not is_right:
        fault = (
            "Some weights that were sent are not in use; often an output layer that is tied to the "
            "embedding but kept twice, or a quantized copy"
        )
    return Finding(
        question="an update reaches every tensor",
        answer=f"{shown}; rounding explains {tolerance:g}",
        fault=fault,
    )


def version_finding(answers: Answers, version: int) -> Finding:
    outputs = (answers.again.answer.output, answers.fresh.answer.output)
    named = sorted({v for output in outputs for v in output.policy_versions})
    return Finding(
        question="tokens carry the version of the weights",
        answer=f"sent was {version}, they carry {named}",
        fault="" if named == [version] else "Stale tokens could not be told from fresh ones",
    )


def cache_finding(answers: Answers, tolerance: float) -> Finding:
    """The prompt ran before the update: what was kept of it must be gone."""
    question = "an update clears the prefix cache"
    num_tokens = len(answers.again.answer.prompt_ids)
    again = answers.again.difference()
    answer = f"a prompt from before differs by {again:.2g}; rounding explains {tolerance:g}"
    if again > tolerance:
        return Finding(
            question=question,
            answer=answer,
            fault="Keys and values of older weights are still used: turn prefix caching off "
            "(actor_rollout_ref.rollout.enable_prefix_caching=False)",
        )
    if num_tokens < SHORTEST_CACHED:
        answer = f"not known: there is room for prompts of {num_tokens} tokens only"
    return Finding(question=question, answer=answer)


def log_probs_finding(
    answers: Answers, facts: EngineFacts, sampling: SamplingInUse, tolerance: float
) -> Finding:
    """Which of three formulas the log-probabilities follow, and whether the run can use them.

    raw         log softmax(z)             tempered    log softmax(z / T)
    processed   log softmax(z / T) among what the filters leave: 0 where that is one token
    """
    distances = formula_distances(answers)
    fitting = [kind for kind, distance in distances.items() if distance <= tolerance]
    listed = ", ".join(f"{kind} {distance:.2g}" for kind, distance in distances.items())
    told = f"says {facts.log_probs}; differences: {listed}; rounding explains {tolerance:g}"
    fault = ""
    if facts.log_probs not in fitting:
        found = " or ".join(fitting) or "none of the three"
        fault = f"They are {found}: importance weights made from them would be wrong"
    elif facts.log_probs == "raw" and sampling.temperature not in (0, 1):
        if sampling.uses_log_probs:
            fault = (
                f"Training needs them at temperature {sampling.temperature}: set "
                "rollout.temperature=1, let the engine report processed ones "
                "(rollout.logprobs_mode=processed_logprobs), or do not use them "
                "(rollout.calculate_log_probs=False)"
            )
    elif facts.log_probs == "processed" and sampling.is_filtered:
        told += "; with filters a policy ratio starts below 1"
    return Finding(question="log-probs are of the stated kind", answer=told, fault=fault)


def formula_distances(answers: Answers) -> dict[str, float]:
    """How far what the engine reported is from each formula, over the three ways to draw."""
    cold, hot, filtered = answers.cold, answers.hot, answers.filtered
    certain = torch.zeros_like(filtered.expected[HOT])
    drawn = max(cold.difference(COLD), hot.difference(HOT))
    return {
        "raw": max(cold.difference(), hot.difference(), filtered.difference()),
        "tempered": max(drawn, filtered.difference(HOT)),
        "processed": max(drawn, largest_difference(filtered.answer, certain)),
    }


def seed_finding(answers: Answers) -> Finding:
    first, second = (a.answer.output.token_ids for a in (answers.hot, answers.repeated))
    return Finding(
        question="equal seeds give equal tokens",
        answer="they did" if first == second else "they did not: runs cannot be repeated exactly",
    )


def change_between(one: Answer, other: Answer) -> float:
    """How much the answers to one prompt differ; infinite if the tokens do."""
    if one.output.token_ids != other.output.token_ids:
        return torch.inf
    return largest_difference(one, torch.tensor(other.output.log_probs))


def as_table(findings: Sequence[Finding]) -> str:
    width = max(len(finding.question) for finding in findings)
    lines = [("NO" if f.fault else "ok", f) for f in findings]
    return "\n".join(f"  {mark}  {f.question:<{width}}  {f.answer}" for mark, f in lines)
