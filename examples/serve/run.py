"""Talk to a model in the browser, or through OpenAI's API: `make serve`.

    python examples/serve/run.py [--model FOLDER] [--engine native_process] [--port 8000]

Without `--model` it serves what `make quickstart` has trained. The engine has a process of its own,
the server runs here and answers this machine alone. The address that is printed holds the token
behind `#`, where browsers keep it to themselves.
"""

import argparse
import signal
import sys
from pathlib import Path

from transformers import AutoConfig

from verl.config.rollout import RolloutConfig
from verl.server import RunningServer, ServerOptions, serve
from verl.utils.device import get_device_name
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.factory import engine_spec
from verl.workers.rollout.process.client import EngineProcess, EngineStartError

QUICKSTART = Path("runs/quickstart")
MAX_TOKENS = 4096
"""Longest prompt plus response, where the model allows more."""


def quickstart_model(folder: Path = QUICKSTART) -> Path:
    """The newest weights that the quickstart's reinforcement has left."""
    found = folder.glob("grpo/global_step_*/actor/huggingface")
    steps = {int(path.parts[-3].removeprefix("global_step_")): path for path in found}
    if not steps:
        sys.exit(
            f"there is no trained model in {folder}: run `make quickstart` first, or "
            "serve another one with `make serve MODEL=path/to/model`"
        )
    return steps[max(steps)]


def start_engine(model: str, max_tokens: int, name: str, python: str | None) -> EngineProcess:
    """An engine with the model's weights, ready to answer."""
    device = get_device_name()
    rollout = RolloutConfig(
        name=name,
        python=python,
        prompt_length=max_tokens // 2,
        response_length=max_tokens - max_tokens // 2,
        max_num_seqs=16,
        load_format="auto",
    )
    dtype = "float32" if device == "cpu" else "bfloat16"
    engine = EngineProcess(
        engine_spec(rollout, model, device=device, has_weights=True, dtype=dtype)
    )
    engine.start()
    return engine


def longest(model: str) -> int:
    config = AutoConfig.from_pretrained(model).get_text_config()
    return min(MAX_TOKENS, config.max_position_embeddings)


def page_address(page: str, *, with_history: bool) -> str:
    """Where the page is, and whether it sends earlier messages along."""
    return page if with_history else f"{page}{'&' if '#' in page else '#'}history=off"


def wait_for_the_end(server: RunningServer) -> None:
    """Until the server ends, or somebody presses Ctrl-C or sends SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        while not server.wait(1.0):
            pass
    except KeyboardInterrupt:
        print("\nstopping", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--model", help="folder of a Hugging Face model; the quickstart's if absent"
    )
    parser.add_argument("--engine", default="native_process", help="or vllm, sglang")
    parser.add_argument("--python", help="interpreter of an environment that has that engine")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    try:
        chat(parser.parse_args())
    except (OSError, ValueError, EngineStartError) as refused:
        sys.exit(f"cannot serve: {refused}")


def chat(options: argparse.Namespace) -> None:
    """Serve the model until somebody ends it."""
    model = options.model or str(quickstart_model())
    tokens = longest(model)
    print(f"loading {model}", flush=True)
    engine = start_engine(model, tokens, options.engine, options.python)
    try:
        serving = ServerOptions(
            model=options.model or "quickstart", max_model_len=tokens, port=options.port
        )
        with serve([engine], hf_tokenizer(model), serving) as server:
            api, token, page = server.where().values()
            page = page_address(page, with_history=options.model is not None)
            print(f"\nchat     {page}\nAPI      {api}\ntoken    {token}")
            print("\nCtrl-C stops it", flush=True)
            wait_for_the_end(server)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
