"""Watch a language model learn to look things up, on a CPU, with a search server of its own.

    python examples/search/run.py [--seed 0] [--out runs/search]

Makes a corpus, starts the retrieval server over it, fine-tunes a small model on conversations that
mostly guess, and trains it with `recipe.search_r1.main_search_r1`. Each command is printed before
it runs.
"""

import os
import re
import secrets
import subprocess
import sys
from functools import partial
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_run import Run, arguments_of, follow, quickstart

COMMAND = "recipe.search_r1.main_search_r1"
CONFIG = Path(__file__).parents[1] / "sglang_multiturn/config/tool_config/search_tool_config.yaml"


def tool_config(run: Run, url: str) -> str:
    """The usual tool, at this server, with one passage per query as plain text."""
    config = yaml.safe_load(CONFIG.read_text())
    config["tools"][0]["config"] |= {"retrieval_service_url": url, "topk": 1, "reply": "text"}
    path = Path(run.path("tools.yaml"))
    path.write_text(yaml.safe_dump(config))
    return str(path)


def main() -> None:
    arguments = arguments_of(
        "Learn to look things up.", "search", sft_steps=350, grpo_steps=20, prompts_per_step=32
    )
    run = Run("search", arguments)
    os.environ["VERL_RETRIEVAL_TOKEN"] = secrets.token_urlsafe(24)
    run.prepare()
    command = [
        str(run.here / "retrieval_server.py"),
        "--corpus",
        run.path("corpus.jsonl"),
        "--port",
        "0",
    ]
    print(f"\n$ python {' '.join(command)} &")
    server = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=partial(quickstart.die_with_parent, os.getpid()),
    )
    try:
        assert server.stdout is not None
        found = re.fullmatch(r"url: (\S+)\n", server.stdout.readline())
        if found is None:
            sys.exit("the search server did not start")
        tools = tool_config(run, found[1])
        follow(run, lambda: run.reinforce(COMMAND, run.fine_tune(), tools))
    finally:
        server.terminate()
        server.wait(timeout=30)


if __name__ == "__main__":
    main()
