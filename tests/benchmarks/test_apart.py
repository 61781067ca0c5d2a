"""Runs in processes of their own: what is done is not done again, what failed is."""

from benchmarks.apart import run_all
from benchmarks.recipe_curves import RECIPES, summary

PROGRAM = """
import json, pathlib, sys
seen = pathlib.Path(sys.argv[1])
seen.write_text(seen.read_text() + sys.argv[2] if seen.exists() else sys.argv[2])
if sys.argv[2] == "1" and seen.read_text().count("1") == 1:
    sys.exit("out of luck")
print("some words")
print(json.dumps({"seconds": 0.5, "value": int(sys.argv[2])}))
"""


def test_a_comparison_goes_on_from_what_is_done_and_repeats_what_failed(tmp_path, capsys):
    seen, finished = tmp_path / "seen", tmp_path / "runs.jsonl"
    tasks = [{"name": "a", "seed": seed} for seed in (0, 1)]

    def run():
        return run_all(
            tasks,
            lambda task: ["-c", PROGRAM, str(seen), str(task["seed"])],
            finished,
            jobs=1,
            timeout_seconds=60,
        )

    first, second = run()
    assert first == {"name": "a", "seed": 0, "seconds": 0.5, "value": 0}
    assert "out of luck" in second["error"]
    assert "out of luck" in capsys.readouterr().err
    assert run() == [first, {"name": "a", "seed": 1, "seconds": 0.5, "value": 1}]
    assert seen.read_text() == "011"
    assert len(finished.read_text().splitlines()) == 3
    run()
    assert seen.read_text() == "011"


def test_a_run_that_takes_too_long_is_named(tmp_path):
    (found,) = run_all(
        [{"name": "a", "seed": 0}],
        lambda task: ["-c", "import time; time.sleep(60)"],
        tmp_path / "runs.jsonl",
        jobs=1,
        timeout_seconds=0.5,
    )
    assert found["error"] == "not done after 0.5 s"


def test_every_recipe_has_a_control_and_ends_are_told():
    evaluation = {"r1"}
    for name in RECIPES.keys() - evaluation:
        assert len(RECIPES[name].variants) > 1, name
    run = {"name": "spin", "variant": "trained", "seed": 0, "seconds": 1.0}
    told = summary([run | {"points": [[1, 0.1], [2, 0.9]]}, run | {"seed": 1, "error": "x"}])
    assert "[0.1] -> [0.9]" in told
