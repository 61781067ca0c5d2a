"""What other busy processes do to a training step, and how OpenMP's wait policy changes that.

    python benchmarks/busy_machine.py [--neighbours 2] [--steps 12]

Trains the quickstart's model for a few steps in a process of its own, alone and beside processes
that keep a processor busy each, with every way to wait: OpenMP's own (spin for milliseconds), the
brief spin and the sleep that commands choose (`verl.utils.environment.choose_openmp`), one thread.
Prints milliseconds and processor time per step.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from verl.utils.environment import QUIET_SPINS, WAITING

WAYS = {
    "as OpenMP does": {},
    "brief spin": {"GOMP_SPINCOUNT": str(QUIET_SPINS)},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}


def train(model_folder: str, num_steps: int) -> None:
    """A few optimizer steps on the quickstart's shapes; one line with what a step took."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 250, (64, 48))
    for step in range(num_steps + 1):
        if step == 1:  # the first one warms up
            wall, used = time.perf_counter(), time.process_time()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - wall, time.process_time() - used)
    print(*(1000 * value / num_steps for value in seconds))


def measured(model_folder: str, num_steps: int, variables: dict[str, str]) -> list[float]:
    mine = {k: v for k, v in os.environ.items() if k not in (*WAITING, "OMP_NUM_THREADS")}
    command = [sys.executable, __file__, "--model", model_folder, "--steps", str(num_steps)]
    done = subprocess.run(
        command, env={**mine, **variables}, stdout=subprocess.PIPE, timeout=1800, check=True
    )
    return list(map(float, done.stdout.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--neighbours", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        train(options.model, options.steps)
        return
    busy = [sys.executable, "-c", "while True: pass"]
    build = Path(__file__).parents[1] / "examples" / "quickstart" / "build_model.py"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(
            [sys.executable, str(build), "--out", folder, "--seed", "0"],
            stdout=subprocess.DEVNULL,
            timeout=600,
            check=True,
        )
        print("| threads wait | neighbours | ms per step | CPU ms per step |\n|---|---|---|---|")
        for count in (0, options.neighbours):
            neighbours = [subprocess.Popen(busy) for _ in range(count)]
            try:
                for name, variables in WAYS.items():
                    wall, used = measured(folder, options.steps, variables)
                    print(f"| {name} | {count} | {wall:.0f} | {used:.0f} |", flush=True)
            finally:
                for process in neighbours:
                    process.kill()
                    process.wait(timeout=60)
    print(f"load at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")


if __name__ == "__main__":
    main()
