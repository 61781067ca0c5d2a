import json
from pathlib import Path

import pytest

from benchmarks.gpu.summary import put_between_marks, summarise

ROOT = Path(__file__).parents[2]
WORK = {"prompts": 128, "samples": 8, "prompt_tokens": 256, "new_tokens": 512}
WHERE = {
    "device": "NVIDIA H200",
    "date": "2026-01-02 03:04:05",
    "versions": {"torch": "2.11.0", "trl": "1.16.0"},
    "allocator": "",
}


def run(**changes) -> dict:
    found = {"arguments": "--shape 0.5B", "status": "done", "shape": "0.5B", "workload": WORK}
    return {**found, "environment": WHERE, **changes}


def write(folder: Path, claim: str, *runs: dict) -> None:
    (folder / f"{claim}.json").write_text(json.dumps({"claim": claim, "runs": list(runs)}))


def our_step(seconds: float) -> dict:
    phases = {"step": seconds, "generate": 2.5, "prefill": 0.1, "reward": 0.2}
    phases |= {"forward_backward": 4.0, "optimizer": 0.05}
    base = {"median_seconds": phases, "peak_gib": 31.4, "utilisation": 0.512}
    return run(variants={"base": base}, samples={"base": [{}, {}, {}]})


def trl_step(seconds: float, **changes) -> dict:
    median = {"step": seconds, "generate": 15.6, "reward": 0.1, "update": 7.4}
    return run(median_seconds=median, peak_gib=39.0, samples=[{}, {}], **changes)


def test_the_step_is_compared_with_the_same_work_in_trl(tmp_path):
    write(tmp_path, "grpo_step", our_step(7.0))
    growing = {"environment": WHERE | {"allocator": "grows"}}
    write(tmp_path, "trl_step", trl_step(21.0), trl_step(14.0, **growing))
    text = summarise(tmp_path)
    assert (
        "| 0.5B | 128 x 8 x 512, 256 | base | 7.00 | 2.50 | 0.10 | 0.20 |  | 4.00 | 0.05 |" in text
    )
    assert "| TRL 1.16.0 as it comes | 21.00 | 15.60 |" in text
    assert "The 0.5B step is 3.0 times as fast as TRL 1.16.0 as it comes." in text
    assert "The 0.5B step is 2.0 times as fast as TRL 1.16.0 with `grows`." in text


def test_the_step_of_the_command_is_compared_too(tmp_path):
    median = {"step": 6.0, "generate": 2.25, "reward": 0.0, "update": 3.5}
    found = {"median_seconds": median, "peak_gib": 31.4, "utilisation": 0.5}
    ours = run(variants={"main_ppo": found}, samples={"main_ppo": [{}, {}]})
    write(tmp_path, "grpo_step", our_step(7.0), ours)
    write(tmp_path, "trl_step", trl_step(24.0))
    text = summarise(tmp_path)
    row = "| `main_ppo` | 6.00 | 2.25 |  | 0.00 |  | 3.50 with optimizer |  | 31 | 50% | 2 |"
    assert row in text
    assert "The 0.5B step of `main_ppo` is 4.0 times as fast as TRL 1.16.0 as it comes." in text


def test_other_work_is_not_compared(tmp_path):
    write(tmp_path, "grpo_step", our_step(7.0))
    write(tmp_path, "trl_step", trl_step(21.0) | {"workload": {**WORK, "new_tokens": 64}})
    assert "times as fast" not in summarise(tmp_path)


def test_generation_shows_tokens_floor_and_pairs(tmp_path):
    pair = {
        "workload": {**WORK, "new_tokens": 64},
        "seconds": {"verl": [0.5, 0.5], "generate": [3.0, 3.0]},
        "tokens_per_second": {"verl": 131072.0, "generate": 21845.3},
        "times_as_fast": 6.0,
    }
    found = run(
        tokens_per_second=191_002.3,
        seconds=[2.694, 3.036, 2.745],
        prefill_seconds=[0.11, 0.12, 0.13],
        floor_seconds={"total": 1.5},
        share_of_floor=0.547,
        peak_gib=1.67,
        cache_gib=9.0,
        ceilings={"matmul_tflops": 773.3, "copy_tb_per_s": 3.95},
        beside_generate=pair,
    )
    write(tmp_path, "decode", found)
    text = summarise(tmp_path)
    row = "| 0.5B | 128 x 8 x 512, 256 | 191,000 | 2.69 to 3.04 | 0.12 | 1.50 | 55% | 11 (9) |"
    assert row in text
    assert "| 0.5B | 128 x 8 x 64, 256 | 131,000 | 21,800 | 6.0 | 2 |" in text
    assert "NVIDIA H200, 2026-01-02, torch 2.11.0, trl 1.16.0; ceilings" in text


def test_what_failed_or_was_left_out_is_named_and_not_shown_as_measured(tmp_path):
    fault = {"status": "failed", "reason": "Traceback\nOutOfMemoryError: full\n"}
    write(tmp_path, "trl_step", trl_step(21.0) | fault)
    write(tmp_path, "grpo_step", run(**fault), run(status="left out", reason="3 s were left"))
    text = summarise(tmp_path)
    assert "- trl_step `--shape 0.5B`: failed, OutOfMemoryError: full" in text
    assert "- grpo_step `--shape 0.5B`: failed, OutOfMemoryError: full" in text
    assert "- grpo_step `--shape 0.5B`: left out, 3 s were left" in text
    assert "21.00" not in text


def test_a_step_that_was_cut_short_shows_what_it_had_measured_and_says_so(tmp_path):
    fault = {"status": "failed", "reason": "Traceback\nOutOfMemoryError: full\n"}
    write(tmp_path, "grpo_step", our_step(7.0) | fault)
    text = summarise(tmp_path)
    assert "| base (cut short) | 7.00 |" in text
    assert "- grpo_step `--shape 0.5B`: failed, OutOfMemoryError: full" in text


def test_the_tables_take_the_place_between_the_marks():
    page = "above\n<!-- gpu: begin -->\n{}\n<!-- gpu: end -->\nbelow\n"
    assert put_between_marks(page.format("old"), "gpu", "new\n") == page.format("new")
    with pytest.raises(ValueError, match="other: begin"):
        put_between_marks(page, "other", "new\n")


@pytest.mark.parametrize("name", ["gpu"])
def test_the_page_shows_the_tables_of_the_results_beside_it(name):
    page = (ROOT / "docs/performance.md").read_text()
    assert put_between_marks(page, name, summarise(ROOT / "benchmarks/results" / name)) == page
