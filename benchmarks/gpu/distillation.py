"""What a teacher costs: an update with each way of comparing with it, and its memory.

    python -m benchmarks.gpu.distillation --out distillation.json [--shape 0.5B --teacher 1.5B]

Student and teacher have random weights of these shapes. Rows come in groups with one prompt. A
variant is what a step of training does after generation: the teacher's answers in advance (none for
the modes over the whole vocabulary) and one optimizer step. `none` has no teacher. Variants take
turns, so that what drifts weighs on all alike; medians are over rounds.
"""

import argparse
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.gpu.measuring import Phases, back_and_forth, environment, write
from benchmarks.gpu.policy import build_engine, whole_groups
from benchmarks.gpu.shapes import random_model
from benchmarks.gpu.train import random_rows
from benchmarks.gpu.workload import Workload, workload_parser
from verl.config.actor import FSDPActorConfig
from verl.config.distillation import DistillationLossConfig
from verl.workers.actor.distiller import Distiller
from verl.workers.actor.dp_actor import Policy
from verl.workers.actor.teacher import (
    Teacher,
    answers_in_advance,
    num_top_tokens,
    teacher_columns,
)
from verl.workers.engine.one_device import OneDeviceEngine

VARIANTS = (
    "none", "k3", "forward_kl_topk", "forward_kl_full", "reverse_kl_full", "jsd",
)  # fmt: skip


class Contest:
    """One student, one teacher, and a policy for each variant."""

    def __init__(self, options: argparse.Namespace, work: Workload) -> None:
        self.device = options.device
        self.student = build_engine(options)
        build = partial(random_model, options.teacher, options.device, options.seed + 1)
        engine = OneDeviceEngine(build, None, prefix_sharing=True)
        engine.initialize()
        self.student.prefix_sharing = True
        self.teacher = Teacher(engine)
        self.passes = whole_groups(work, options.micro_tokens)
        vocabulary = int(self.student.module.config.vocab_size)
        self.rows = random_rows(work, vocabulary, options.seed)
        found = self.student.infer_batch(self.rows, micro_batching=self.passes)
        self.rows["old_log_probs"] = found["log_probs"].cpu()
        self.actor = FSDPActorConfig(
            use_dynamic_bsz=True, ppo_max_token_len_per_gpu=options.micro_tokens
        )

    def measure(self, variant: str) -> Phases:
        phases, rows = Phases(self.device), self.rows.copy()
        distiller = None
        if variant != "none":
            loss = DistillationLossConfig(loss_mode=variant)
            distiller = Distiller(loss, self.actor, [self.teacher])
            if answers_in_advance(loss):
                with phases.phase("answers"):
                    found = teacher_columns(
                        [self.teacher],
                        rows,
                        micro_batching=self.passes,
                        temperature=1.0,
                        top_k=num_top_tokens(loss),
                    )
                rows.update(found)
        policy = Policy(self.actor, self.student, distiller)
        with phases.phase("update"):
            metrics = policy.update_policy(rows, rows_per_step=len(rows), temperature=1.0)
        self.metrics = {name: float(value) for name, value in metrics.items()}
        return phases


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(__doc__.partition("\n")[0], prompts=8)
    parser.add_argument("--teacher", default="1.5B", help="shape of the teacher")
    parser.add_argument("--micro-tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    work = Workload.of(options)
    contest = Contest(options, work)
    samples: dict[str, list[Phases]] = {name: [] for name in VARIANTS}
    metrics: dict[str, Any] = {}
    for name in VARIANTS:  # kernels are compiled, optimizer state is allocated
        contest.measure(name)
        metrics[name] = {k: v for k, v in contest.metrics.items() if k.startswith("distillation/")}
    for name in back_and_forth(VARIANTS, options.rounds):
        samples[name].append(contest.measure(name))
    variants: dict[str, Any] = {}
    for name, phases in samples.items():
        seconds = {
            part: statistics.median(p.seconds[part] for p in phases) for part in phases[0].seconds
        }
        peaks = {part: max(p.peak_gib[part] for p in phases) for part in phases[0].peak_gib}
        total = sum(seconds.values())
        variants[name] = {
            "seconds": seconds,
            "total_seconds": total,
            "peak_gib": peaks,
            "tokens_per_second": work.tokens / total,
            "metrics": metrics[name],
        }
        print(f"{name:16} {total:8.3f} s   {max(peaks.values()):6.1f} GiB   {metrics[name]}")
    write(
        options.out,
        {
            "environment": environment(options.device, options.seed),
            "student": options.shape,
            "teacher": options.teacher,
            "rows": work.sequences,
            "tokens": work.tokens,
            "response_tokens": work.sequences * work.new_tokens,
            "variants": variants,
        },
    )


if __name__ == "__main__":
    main()
