"""The command `verl`: a short name for each module that is a command.

verl train data.train_files=... is python -m verl.trainer.main_ppo data.train_files=...
"""

import sys
from difflib import get_close_matches
from importlib import import_module

COMMANDS = {
    "train": ("verl.trainer.main_ppo", "reinforcement learning: PPO, GRPO, DAPO, ..."),
    "sft": ("verl.trainer.sft_trainer", "supervised fine-tuning"),
    "generate": ("verl.trainer.main_generation", "answer a file of prompts"),
    "eval": ("verl.trainer.main_eval", "score the answers of a file"),
    "serve": ("verl.trainer.main_generation_server", "serve a model with OpenAI's interface"),
    "merge": ("verl.model_merger.__main__", "make a Hugging Face folder of a checkpoint"),
    "rm": ("verl.trainer.main_rm", "train a reward model on pairs"),
    "migrate": ("verl.migrate.__main__", "translate a script of older verl, TRL or OpenRLHF"),
    "replay": ("verl.replay", "make a recorded step again, and what another algorithm would do"),
    "regenerate": ("verl.trainer.main_replay", "make the trajectories of a step again"),
    "board": ("verl.board.__main__", "look at runs in the browser"),
    "profile": ("verl.profile", "where time and memory of a run went"),
    "diff": ("verl.diff", "where two recorded runs part"),
    "doctor": ("verl.doctor", "what this machine has and lacks"),
}


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("--help", "-h", "help"):
        lines = [f"  {command:11}{what}" for command, (_, what) in COMMANDS.items()]
        sys.stdout.write("verl COMMAND [arguments]\n\n" + "\n".join(lines) + "\n")
        return
    if name not in COMMANDS:
        close = get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        sys.stderr.write(f"error: no command {name!r}; {hint}there are {', '.join(COMMANDS)}\n")
        raise SystemExit(2)
    module, _ = COMMANDS[name]
    sys.argv = [f"verl {name}", *sys.argv[2:]]
    raise SystemExit(import_module(module).main())


if __name__ == "__main__":
    main()
