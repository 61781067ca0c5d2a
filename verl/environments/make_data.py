"""Rows for episodes of an environment, one for each seed.

    python -m verl.environments.make_data --env textarena:GuessTheNumber-v0 --num 512 \
        --out train.parquet

A row has a prompt (what the environment shows first, after `--system` if there is one), the
environment with its arguments, the seed of its episode, and the loop that plays it. The prompt is
the one that the episode begins with again when the row is trained on.
"""

import argparse
import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.environments.pool import EnvironmentPool, EnvironmentSpec

MAX_ROWS = 10_000_000


async def make_rows(
    spec: EnvironmentSpec, seeds: Sequence[int], *, system: str = "", num_workers: int = 4
) -> list[dict[str, Any]]:
    pool = EnvironmentPool(num_workers=num_workers)
    interpreter = {"python": spec.python} if spec.python else {}

    async def row_of(index: int, seed: int) -> dict[str, Any]:
        lease = pool.lease(f"seed {seed}")
        try:
            first, _ = await lease.reset(spec, {}, seed)
        finally:
            await lease.release()
        messages = first.messages or [{"role": "user", "content": first.text or ""}]
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        return {
            "data_source": spec.name,
            "agent_name": "env_agent",
            "prompt": messages,
            "reward_model": {"style": "env", "ground_truth": ""},
            # As text: arguments differ from row to row, and a table has one type for all.
            "env": {"name": spec.name, "kwargs": json.dumps(dict(spec.kwargs)), **interpreter},
            "extra_info": {"index": index, "seed": seed},
        }

    try:
        return list(await asyncio.gather(*(row_of(i, seed) for i, seed in enumerate(seeds))))
    finally:
        pool.close()


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m verl.environments.make_data", description="Rows for episodes, by seed."
    )
    parser.add_argument("--env", required=True, help="such as textarena:GuessTheNumber-v0")
    parser.add_argument("--kwargs", default="{}", help="arguments of the environment, as JSON")
    parser.add_argument("--num", type=int, required=True, help="number of rows")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--system", default="", help="a system message to put before")
    parser.add_argument("--python", help="interpreter of the environment")
    parser.add_argument("--out", type=Path, required=True, help="a .parquet or .jsonl file")
    options = parser.parse_args(arguments)
    if not 0 < options.num <= MAX_ROWS:
        parser.error(f"--num is {options.num}; it must be between 1 and {MAX_ROWS}")
    try:
        json.loads(options.kwargs)
    except ValueError as error:
        parser.error(f"--kwargs is {options.kwargs!r}, which is no JSON: {error}")
    if options.out.suffix not in (".parquet", ".jsonl"):
        parser.error(f"--out is {options.out}; write a .parquet or .jsonl file")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    # Rows are read in other folders too. A link stays one: it is what makes an interpreter its own.
    python = str(Path(options.python).expanduser().absolute()) if options.python else None
    spec = EnvironmentSpec.of({"name": options.env, "kwargs": options.kwargs, "python": python})
    seeds = range(options.first_seed, options.first_seed + options.num)
    rows = asyncio.run(make_rows(spec, seeds, system=options.system))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.out.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), options.out)
    else:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(f"wrote {len(rows)} rows of {options.env} to {options.out}")  # noqa: T201


if __name__ == "__main__":
    main()
