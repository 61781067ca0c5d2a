"""The command `verl`: short names for the modules that are commands.

verl train data.train_files=... is python -m verl.trainer.main_ppo data.train_files=...
"""

import sys
from difflib import get_close_matches
from importlib import import_module

from verl.utils.import_utils import uncollected

COMMANDS = {
    "train": ("verl.trainer.main_ppo", "reinforcement learning: PPO, GRPO, DAPO, ..."),
    "sft": ("verl.trainer.sft_trainer", "supervised fine-tuning"),
    "generate": ("verl.trainer.main_generation", "generate responses to a file of prompts"),
    "eval": ("verl.trainer.main_eval", "score generated responses"),
    "serve": ("verl.trainer.main_generation_server", "serve a model over an OpenAI-compatible API"),
    "merge": ("verl.model_merger.__main__", "convert a checkpoint to a Hugging Face folder"),
    "rm": ("verl.trainer.main_rm", "train a reward model on preference pairs"),
    "migrate": ("verl.migrate.__main__", "translate a script of older verl, TRL or OpenRLHF"),
    "replay": ("verl.replay", "recompute a recorded step, or try another algorithm on it"),
    "regenerate": (
        "verl.trainer.main_replay",
        "regenerate the trajectories of a step from the journal",
    ),
    "board": ("verl.board.__main__", "view runs in the browser"),
    "profile": ("verl.profile", "show time and memory by stage"),
    "diff": ("verl.diff", "find the first difference between two runs"),
    "doctor": ("verl.doctor", "check this machine and a configuration"),
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        lines = [f"  {command:12}{what}" for command, (_, what) in COMMANDS.items()]
        usage = "usage: verl COMMAND [arguments]; verl COMMAND --help shows them"
        sys.stdout.write(f"{usage}\n\n" + "\n".join(lines) + "\n")
        return
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        sys.stderr.write(f"error: no command {name!r}; {hint}commands: {', '.join(COMMANDS)}\n")
        raise SystemExit(2)
    module, _ = COMMANDS[name]
    sys.argv = [f"verl {name}", *sys.argv[2:]]
    with uncollected():
        command = import_module(module)
    raise SystemExit(command.main())


if __name__ == "__main__":
    main()
