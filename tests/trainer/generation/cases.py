"""A file of prompts, a tiny model, and engines in this process."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import save_tiny_model
from verl.config.generation import GenerationConfig
from verl.config.load import load_config
from verl.trainer.generation.engines import Engines
from verl.trainer.generation.run import generate
from verl.workers.rollout.base import Rollout
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

CONTENT_ONLY = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def saved_model(folder: Path) -> str:
    return str(save_tiny_model(folder / "model"))


def rows(num_rows: int) -> list[dict[str, Any]]:
    """Prompts of two to five characters, beside columns that must come through unchanged."""
    return [
        {
            "data_source": "quiz",
            "prompt": "abcdefgh"[number % 4 : number % 4 + 2 + number % 3],
            "reward_model": {"style": "rule", "ground_truth": str(number)},
            "weights": [0.5, None, float(number)],
        }
        for number in range(num_rows)
    ]


def written(file: Path, table_rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(table_rows), file, row_group_size=4)
    return str(file)


def config_of(model: str, path: str, output: Path, **data: Any) -> GenerationConfig:
    rollout = {"prompt_length": 8, "response_length": 6, "top_k": -1, "top_p": 1.0}
    sections = ("rollout", "trainer")
    values = {
        "data": {
            "path": path,
            "output_path": str(output),
            "n_samples": 2,
            "batch_size": 3,
            **{name: value for name, value in data.items() if name not in sections},
        },
        "model": {"path": model},
        "rollout": {**rollout, **data.get("rollout", {})},
        "trainer": {"n_gpus_per_node": 1, "device": "cpu", **data.get("trainer", {})},
    }
    return load_config(values, GenerationConfig).checked()


def native() -> NativeEngine:
    limits = EngineLimits(max_num_seqs=16, max_prompt_tokens=8, max_response_tokens=8)
    return NativeEngine(tiny_model("llama"), limits, eos_token_ids=[2])


class Starts:
    """Gives engines over `rollouts` and remembers for how many batches it was asked."""

    def __init__(self, *rollouts: Rollout) -> None:
        self.rollouts = rollouts or (native(),)
        self.num_batches: list[int] = []
        self.num_restarts = 0
        self.num_closed = 0

    def __call__(self, model_path: str, num_batches: int) -> Engines:
        self.num_batches.append(num_batches)
        return Engines(self.rollouts, restart=self._restart, close=self._close)

    def _restart(self, engine: Rollout) -> None:
        self.num_restarts += 1

    def _close(self) -> None:
        self.num_closed += 1


def responses_of(file: Path) -> list[list[str]]:
    return pq.read_table(file)["responses"].to_pylist()


def generated(config: GenerationConfig, *rollouts: Rollout) -> list[list[str]]:
    """Run, and read what was written."""
    generate(config, Starts(*rollouts))
    return responses_of(Path(config.data.output_path))
