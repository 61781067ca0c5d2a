"""Watch a language model learn to compute with programs, on a CPU, in verl's own sandbox.

    python examples/code_interpreter/run.py [--seed 0] [--out runs/code_interpreter]

Fine-tunes a small model on conversations that mostly answer at once, and trains it with
`recipe.retool.main_retool`. Each command is printed before it runs.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_run import Run, arguments_of, follow

COMMAND = "recipe.retool.main_retool"
CONFIG = Path(__file__).parents[1] / (
    "sglang_multiturn/config/tool_config/sandbox_fusion_tool_config.yaml"
)


def main() -> None:
    arguments = arguments_of(
        "Learn to compute with programs.",
        "code_interpreter",
        sft_steps=350,
        grpo_steps=15,
        prompts_per_step=16,
    )
    run = Run("code_interpreter", arguments)
    run.prepare()
    follow(run, lambda: run.reinforce(COMMAND, run.fine_tune(), os.path.relpath(CONFIG)))


if __name__ == "__main__":
    main()
