"""Watch a language model learn to use a tool, on two CPU cores, through a real MCP server.

    python examples/guess_number/run.py [--seed 0] [--sham] [--out runs/guess_number]

Prepares a small model and its games, fine-tunes it on games of which most are played at random,
and trains it with GRPO in `verl.trainer.main_ppo`: each guess is a tool call that the server
answers. Each command is printed before it runs; what it writes goes to a log file, which is shown
when it fails.
"""

import json
import os
import sys
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_agent"))

from tiny_game import GameRun, follow, options_of

TURNS = "actor_rollout_ref.rollout.multi_turn"


def write_tools(run: GameRun) -> None:
    """The server that answers (`--sham`: at random), and the tool that asks it."""
    sham = ["--sham"] if run.options.sham else []
    server = [str(run.here / "server.py"), run.path("targets.json"), *sham]
    servers = {"mcpServers": {"guess": {"command": sys.executable, "args": server}}}
    Path(run.path("mcp_servers.json")).write_text(json.dumps(servers))
    tool = {
        "class_name": "guess_tool.GuessTool",
        "config": {"type": "mcp", "timeout": 30},
        "mcp": {"mcp_servers_config_path": run.path("mcp_servers.json")},
    }
    Path(run.path("tools.yaml")).write_text(yaml.safe_dump({"tools": [tool]}))
    paths = filter(None, (str(run.here.resolve()), os.environ.get("PYTHONPATH")))
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)  # where guess_tool is


def main() -> None:
    options = options_of(
        "Learn to use a tool.",
        "guess_number",
        "sham",
        sft_steps=300,
        grpo_steps=60,
        prompts_per_step=16,
    )
    run = GameRun("guess_number", options)

    def train() -> str:
        run.prepare(run.here / "prepare.py")
        write_tools(run)
        settings = {
            f"{TURNS}.enable": True,
            f"{TURNS}.tool_config_path": run.path("tools.yaml"),
            f"{TURNS}.max_assistant_turns": 7,
            "trainer.test_freq": 10,
        }
        return run.reinforce(run.fine_tune(batch=32), run.here / "reward.py", **settings)

    follow(run, train)


if __name__ == "__main__":
    main()
