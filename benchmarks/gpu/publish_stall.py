"""How long generation stands still when an update is published while requests run.

    python -m benchmarks.gpu.publish_stall --out stall.json [--shape 0.5B] [--updates 8]

Trainer and engine are on one device, and 64 rows are in flight. `shared` generates with the trained
storage: nothing is sent. `copy` has weights of its own in the same process, `process` in another
one; both are sent every tensor, with fingerprints on both sides. `pause` is how long no step may
begin; `first step` how much longer the step after an update takes than the others: with recomputed
keys and values it computes every token in flight again. Milliseconds, median and worst of the
updates after the first.
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.gpu import trainer_step
from benchmarks.gpu.measuring import environment, timed, write
from benchmarks.gpu.shapes import number_format, random_model
from benchmarks.gpu.workload import Workload, hf_tokenizer, requests, vocabulary_of, workload_parser
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.engine_weights import ModuleWeights
from verl.workers.rollout.native.core import EngineCore
from verl.workers.rollout.native.engine import EngineLimits
from verl.workers.rollout.process.client import EngineProcess, EngineSpec
from verl.workers.rollout.process.native import BUILD as BUILD_NATIVE
from verl.workers.rollout.process.native import native_options

BUCKET_BYTES = 256 << 20
Sample = dict[str, float]


def in_process(
    options: argparse.Namespace, work: Workload, *, is_copy: bool, keeps_cache: bool
) -> list[Sample]:
    """An engine in the trainer's process, on the trained storage or on a copy of it."""
    trained = OneDeviceEngine(lambda: random_model(options.shape, options.device, options.seed))
    trained.initialize()
    weights, module = None, trained.module
    if is_copy:
        module = random_model(options.shape, options.device, options.seed).requires_grad_(False)
        weights = ModuleWeights(module, bucket_bytes=BUCKET_BYTES, is_sharded=False)
        weights.update(trained)
    core = EngineCore(
        module,
        limits(work),
        eos_token_ids=[0],
        version=lambda: trained.policy_version if weights is None else weights.version,
        keeps_cache=keeps_cache,
    )
    for request in requests(work, vocabulary_of(options.shape), options.seed):
        core.add(request)
    for _ in range(options.between):
        core.step()
    samples = []
    for _ in range(options.updates):
        trained.policy_version += 1
        pause = (
            0.0 if weights is None else timed(lambda: weights.update(trained), options.device)[0]
        )
        steps = [timed(core.step, options.device)[0] for _ in range(options.between)]
        samples.append({"pause": pause, "first_step": steps[0] - median(steps[1:])})
    return samples


def limits(work: Workload) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=work.sequences,
        max_prompt_tokens=work.prompt_tokens,
        max_response_tokens=work.new_tokens,
        tokens_per_step=4,
    )


def other_process(
    options: argparse.Namespace, work: Workload, *, keeps_cache: bool, folder: Path
) -> list[Sample]:
    """The built-in engine in a process of its own, which says how long it was paused."""
    trained = OneDeviceEngine(lambda: random_model(options.shape, options.device, options.seed))
    trained.initialize()
    dtype = str(number_format(options.device)).removeprefix("torch.")
    engine = EngineProcess(
        EngineSpec(
            build=BUILD_NATIVE,
            options=native_options(
                str(folder / "model"),
                limits(work),
                device=options.device,
                dtype=dtype,
                tokenizer_path=str(folder / "tokenizer"),
                keeps_cache=keeps_cache,
            ),
            bucket_bytes=BUCKET_BYTES,
        )
    )
    engine.start()
    try:
        engine.update_weights(trained.get_per_tensor_param(), 1)
        running: list[Future[Any]] = [
            engine.submit(request)
            for request in requests(work, vocabulary_of(options.shape), options.seed)
        ]
        samples = []
        for version in range(2, options.updates + 2):
            time.sleep(options.pause_seconds)
            engine.update_weights(trained.get_per_tensor_param(), version, in_flight=True)
            samples.append({"pause": engine.stall_seconds, "load": engine.load_seconds})
        in_flight = sum(not future.done() for future in running)
        if not in_flight:
            raise SystemExit("all rows had ended before the last update; raise --new-tokens")
        return samples
    finally:
        engine.close()


def shown(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Milliseconds, median and worst; the first update warms up."""
    counted = samples[1:] or samples
    return {
        name: [round(1000 * pick(s[name] for s in counted), 3) for pick in (median, max)]
        for name in counted[0]
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = workload_parser(
        (__doc__ or "").partition("\n")[0],
        prompts=8,
        samples=8,
        prompt_tokens=256,
        new_tokens=4096,
    )
    parser.add_argument("--updates", type=int, default=8)
    parser.add_argument("--between", type=int, default=12, help="engine steps between updates")
    parser.add_argument("--pause-seconds", type=float, default=0.5, help="between those of process")
    options = parser.parse_args(arguments)
    work = Workload.of(options)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trainer_step.write_model(folder / "model", options)
        hf_tokenizer(vocabulary_of(options.shape)).save_pretrained(folder / "tokenizer")
        for keeps_cache in (True, False):
            ways: dict[str, Callable[[], list[Sample]]] = {
                "shared": lambda k=keeps_cache: in_process(
                    options, work, is_copy=False, keeps_cache=k
                ),
                "copy": lambda k=keeps_cache: in_process(
                    options, work, is_copy=True, keeps_cache=k
                ),
                "process": lambda k=keeps_cache: other_process(
                    options, work, keeps_cache=k, folder=folder
                ),
            }
            for way, measure in ways.items():
                label = f"{way}, {'kept' if keeps_cache else 'recomputed'}"
                found[label] = shown(measure())
                print(label, found[label], flush=True)
                write(
                    options.out,
                    {
                        "shape": options.shape,
                        "workload": dataclasses.asdict(work),
                        "milliseconds_median_and_worst": found,
                        "environment": environment(options.device, options.seed),
                    },
                )


if __name__ == "__main__":
    main()
