"""Probe and drift check: does an engine with its own weights generate with those that were sent?

Before training, the probe:

    scrambled weights --> engine      greedy tokens    as the trainer, scrambled as well?
    true weights      --> engine      greedy tokens    a new prompt: are all weights in use?
                                                       the prompt from before: is its cache gone?
                                      drawn tokens     two temperatures, and one with top-p:
                                                       which log-probabilities are reported?

A tensor that either update left out shows as a difference, whatever the engine held before. What
does not hold stops the run before a token is trained on. It costs two updates and seven short
generations. Every finding has numbers: the largest difference between the log-probabilities that
the engine reported and those of training, beside what rounding explains.

After every update, the drift check: the engine continues a fixed prompt, and its log-probabilities
are compared with the trainer's. A fingerprint proves that the bytes arrived; this proves that they
are in use. A tensor that was copied but not loaded, or stale keys and values in a prefix cache,
show as a difference far beyond rounding.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.utils.scramble import uniform
from verl.workers.rollout.base import GenerationRequest, Rollout, SamplingParams, TokenOutput
from verl.workers.rollout.process.hosted import EngineFacts
from verl.workers.rollout.trained import Answer, TrainedPolicy

logger = logging.getLogger(__name__)

PROBE_TOKENS = 24
"""Tokens of each answer. With more of them a wrong weight changes one more surely."""

TINY_TOP_P = 1e-6
"""Leaves the likeliest token alone, so that its log-probability after the filter is 0."""

PROMPT_TOKENS = 144
"""More than a block of any engine's cache (128 at most), so that a cached prefix can be used."""

DRIFT_TOKENS = 8
"""Tokens with which the drift check continues the prompt."""

TOLERANCES = {
    "float32": 0.05,
    "float16": 0.05,
    "bfloat16": 0.25,
    "fp8": 1.0,
    "torchao": 1.0,
}
"""Largest difference of a log-probability that can be rounding, by number format.

In fp32 engines agree to about 1e-4; 0.05 leaves room for other kernels. bf16 has 8 significant
bits: a logit between 16 and 32 is off by up to 1/16 when it is rounded, on both sides, and once
more by what was rounded before it: 4/16. fp16 has 11 bits, an eighth of that. With weights in 8
bits or fewer only a wrong model can be told from a right one. A stale tensor is far beyond all of
these: it gives other tokens."""

SPELLINGS = {
    "fp32": "float32",
    "float": "float32",
    "32": "float32",
    "fp16": "float16",
    "half": "float16",
    "16": "float16",
    "bf16": "bfloat16",
}

METRIC = "rollout/canary_max_diff"


class StaleEngineError(RuntimeError):
    """An engine does not generate with the weights it was sent."""


def default_tolerance(*formats: str | None) -> float:
    """The tolerance of a comparison between these number formats; None is skipped."""
    names = [SPELLINGS.get(name, name) for name in formats if name is not None]
    unknown = [name for name in names if name not in TOLERANCES]
    if unknown:
        raise ValueError(
            f"no tolerance is known for the number format {unknown[0]!r} "
            f"(known: {', '.join(TOLERANCES)}); set actor_rollout_ref.rollout.canary_tolerance"
        )
    return max((TOLERANCES[name] for name in names), default=TOLERANCES["float32"])


class FixedPromptCheck:
    """Compares an engine, whose sequences have `max_model_len` tokens at most, with the trainer."""

    def __init__(self, *, vocabulary: int, max_model_len: int, tolerance: float) -> None:
        self.num_tokens, num_prompt_tokens = prompt_lengths(max_model_len, DRIFT_TOKENS)
        self.prompt_ids = fixed_prompt(vocabulary, num_prompt_tokens)
        self.tolerance = tolerance

    def check(self, rollout: Rollout | None, trained: TrainedPolicy) -> dict[str, float]:
        """Compute the metric `rollout/canary_max_diff`; raise StaleEngineError above the tolerance.

        A rank without an engine only helps to score and has no metric.
        """
        request = fixed_request(self.prompt_ids, max_tokens=self.num_tokens)
        (answer,) = continue_prompts(rollout, [request])
        (expected,) = trained.log_probs([answer], temperature=1.0)
        if rollout is None:
            return {}
        difference = largest_difference(answer, expected)
        versions = sorted(set(answer.output.policy_versions))
        if versions != [trained.version] or not difference <= self.tolerance:
            raise StaleEngineError(
                f"the engine says it generated with version {versions} of the weights, the trainer "
                f"has version {trained.version}; on {len(expected)} drift-check tokens their "
                f"log-probabilities differ by up to {difference:.3g}, rounding explains "
                f"{self.tolerance}. The engine does not use what it was sent, so nothing it "
                "generates can be trained on: restart it. If it is known to round more than that, "
                "raise actor_rollout_ref.rollout.canary_tolerance"
            )
        return {METRIC: difference}


def prompt_lengths(max_model_len: int, num_tokens: int) -> tuple[int, int]:
    """Tokens of the response, `num_tokens` if they fit, and of the prompt."""
    num_tokens = max(1, min(num_tokens, max_model_len // 2))
    return num_tokens, max(1, min(PROMPT_TOKENS, max_model_len - num_tokens))


def fixed_prompt(vocabulary: int, num_tokens: int, number: int = 0) -> list[int]:
    """Token ids that look random; another prompt for each number.

    From the middle half of the vocabulary: special tokens are at its ends, and some of them (a
    place for an image) may not stand alone.
    """
    draws = uniform(torch.full((num_tokens,), number), torch.arange(num_tokens))
    first, size = vocabulary // 4, max(1, vocabulary // 2)
    return [first + int(draw * size) for draw in draws.tolist()]


def fixed_request(
    prompt_ids: Sequence[int], request_id: str = "drift-check", **options: float
) -> GenerationRequest:
    """The likeliest continuation, unless `options` of `SamplingParams` say otherwise."""
    chosen = {"temperature": 0.0, "ignore_eos": True, **options}
    params = SamplingParams(**chosen)  # pyright: ignore[reportArgumentType]
    return GenerationRequest(request_id=request_id, prompt_ids=list(prompt_ids), params=params)


def continue_prompts(
    rollout: Rollout | None, requests: Sequence[GenerationRequest]
) -> list[Answer]:
    """One answer to each; without an engine something of the right shape that can be scored."""
    if rollout is None:
        return [Answer(r.prompt_ids, _any_output(r)) for r in requests]
    outputs = rollout.generate_batch(requests)
    return [Answer(r.prompt_ids, output) for r, (output,) in zip(requests, outputs, strict=True)]


def largest_difference(answer: Answer, expected: torch.Tensor) -> float:
    """Between what the engine reported and `expected`; infinite if either is not finite."""
    difference = (torch.tensor(answer.output.log_probs) - expected).abs()
    return float(difference.nan_to_num(nan=torch.inf).max())


def _any_output(request: GenerationRequest) -> TokenOutput:
    num_tokens = request.params.max_tokens
    return TokenOutput(token_ids=[int(request.prompt_ids[0])] * num_tokens)


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


def evaluate_answers(
    answers: Answers,
    facts: EngineFacts,
    *,
    version: int,
    tolerance: float,
    sampling: SamplingInUse,
) -> list[Finding]:
    """One finding per question, from the answers of an engine."""
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
    elif sampling.is_filtered:
        told += "; they do not show what the filters took away, nor does rollout correction"
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
    findings = evaluate_answers(
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
    num_tokens, num_prompt_tokens = prompt_lengths(max_model_len, PROBE_TOKENS)
    known, unknown = (fixed_prompt(vocabulary, num_prompt_tokens, n) for n in (0, 1))
    greedy = fixed_request(known, "again", max_tokens=num_tokens)
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
    requests = [greedy, fixed_request(unknown, "fresh", max_tokens=num_tokens)]
    for name, options in drawn.items():
        requests.append(fixed_request(unknown, name, max_tokens=num_tokens, seed=1, **options))
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
