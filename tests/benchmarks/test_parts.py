"""Every part runs as a whole, on a CPU with a tiny model."""

import json
import time
import zipfile
from argparse import Namespace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from benchmarks import host_cost, kept_cache
from benchmarks.gpu import (
    decode,
    distillation,
    filtered,
    grpo_step,
    gsm8k,
    kernels,
    publish_stall,
    train,
    trainer_step,
)
from benchmarks.gpu.policy import whole_groups
from benchmarks.gpu.summary import summarise
from benchmarks.gpu.workload import Workload

SIZES = {"prompts": 2, "samples": 2, "prompt-tokens": 6, "new-tokens": 7}
TINY = ["--shape=tiny", "--device=cpu", *(f"--{name}={size}" for name, size in SIZES.items())]


@pytest.fixture
def run(tmp_path):
    """Run a part and give what it wrote."""

    def run(part, *arguments):
        path = tmp_path / "result.json"
        part.main(["--out", str(path), *TINY, *arguments])
        return json.loads(path.read_text())

    return run


def test_decoding_stands_beside_its_floor_and_beside_generate(run):
    found = run(decode, "--repeats", "2", "--generate-pairs", "2", "--generate-tokens", "3")
    assert len(found["seconds"]) == 2
    assert found["tokens_per_second"] == pytest.approx(28 / (sum(found["seconds"]) / 2))
    assert found["share_of_floor"] == pytest.approx(
        found["floor_seconds"]["total"] / (sum(found["seconds"]) / 2)
    )
    assert 0 <= found["difference_from_training"]["max"] < 1e-5
    pair = found["beside_generate"]
    assert pair["workload"]["new_tokens"] == 3
    assert {len(samples) for samples in pair["seconds"].values()} == {2}
    assert pair["times_as_fast"] == pytest.approx(
        pair["tokens_per_second"]["verl"] / pair["tokens_per_second"]["generate"]
    )


def test_filters_stand_beside_generation_without_them(run, tmp_path):
    found = run(filtered, "--rounds", "2")
    assert set(found["variants"]) == set(found["seconds"]) == set(filtered.VARIANTS)
    for name, variant in found["variants"].items():
        seconds = sum(found["seconds"][name]) / 2
        assert variant["tokens_per_second"] == pytest.approx(28 / seconds)
        without = sum(found["seconds"]["none"]) / 2
        assert variant["share_of_none"] == pytest.approx(without / seconds)
    runs = [{"arguments": "", "status": "done", **found}]
    (tmp_path / "filtered.json").write_text(json.dumps({"claim": "filtered", "runs": runs}))
    assert "| tiny | 2 x 2 x 7, 6 | top_p 0.9 |" in summarise(tmp_path)


def test_training_counts_all_tokens_and_leaves_the_warm_up_out(run):
    found = run(train, "--rounds", "2")
    for name, variant in found["variants"].items():
        assert len(found["samples"][name]) == 2
        seconds = variant["median_seconds"]
        assert variant["tokens_per_second"] == pytest.approx(52 / seconds["forward_backward"])
        assert seconds["train"] > seconds["forward_backward"] > 0
    assert set(found["warm_up_seconds"]) == set(found["variants"])


def test_the_seconds_of_kernels_are_told_by_what_they_are_for(run, tmp_path):
    found = run(kernels, "--micro-tokens", "26")
    assert found["passes"] == 2
    seconds = found["seconds"]
    assert seconds["products"] > 0
    assert seconds["other"] > 0
    assert sum(kernel["seconds"] for kernel in found["kernels"].values()) <= sum(seconds.values())
    runs = [{"arguments": "", "status": "done", **found}]
    (tmp_path / "kernels.json").write_text(json.dumps({"claim": "kernels", "runs": runs}))
    assert f"| tiny | 2 x 2 x 7, 6 | {seconds['products']:.3f} (" in summarise(tmp_path)


@pytest.mark.parametrize(
    ("kernel", "meant"),
    [
        ("nvjet_sm90_tst_128x192_64x5_1x2_h_bz_coopB_NNN", "products"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "products"),
        ("_key_gradients", "attention"),
        ("_gate_backward", "gates"),
        ("_overwrite_with_gradient", "log-probs"),
        ("_norm_backward", "norms and rotary embedding"),
        ("void at::native::multi_tensor_apply_kernel<FusedOptimizer<4>>", "optimizer"),
        ("Memset (Device)", "other"),
    ],
)  # fmt: skip
def test_kernels_are_known_by_their_names(kernel, meant):
    assert kernels.purpose(kernel) == meant


def test_a_step_is_the_sum_of_its_phases_and_learns_something(run):
    found = run(grpo_step, "--rounds", "1", "--variants", "base,old_log_probs")
    for name in ("base", "old_log_probs"):
        (sample,) = found["samples"][name]
        seconds = sample["seconds"]
        phases = ["generate", "rows", "reward", "update"]
        phases += ["old_log_probs"] if name == "old_log_probs" else []
        assert seconds["step"] == pytest.approx(sum(seconds[phase] for phase in phases))
        assert seconds["update"] == pytest.approx(
            seconds["forward_backward"] + seconds["optimizer"]
        )
        assert seconds["prefill"] + seconds["decode"] <= seconds["generate"]
        assert sample["metrics"]["actor/grad_norm"] > 0


def test_passes_hold_whole_groups_and_at_least_one():
    work = Workload(prompts=3, samples=2, prompt_tokens=3, new_tokens=2)
    assert whole_groups(work, micro_tokens=25) == [[0, 1, 2, 3], [4, 5]]
    assert whole_groups(work, micro_tokens=5) == [[0, 1], [2, 3], [4, 5]]


def test_computing_prompts_once_changes_the_numbers_by_rounding_only(run):
    found = run(grpo_step, "--rounds", "1", "--variants", "base,whole_prompts")
    norms = [
        found["samples"][name][0]["metrics"]["actor/grad_norm"]
        for name in ("base", "whole_prompts")
    ]
    assert [found["variants"][name]["shares_prefix"] for name in found["variants"]] == [True, False]
    assert norms[0] == pytest.approx(norms[1], rel=0.01)  # one tiny update lies between them


def test_the_exact_variant_gives_rollout_and_training_the_same_bits(run, tmp_path):
    found = run(grpo_step, "--rounds", "1", "--variants", "exact")
    (exact,) = found["samples"]["exact"]
    assert exact["difference_from_rollout"] == {"mean": 0.0, "max": 0.0}
    runs = [{"arguments": "", "status": "done", **found}]
    (tmp_path / "exact.json").write_text(json.dumps({"claim": "exact", "runs": runs}))
    assert "Equal bits in rollout and training" in summarise(tmp_path)


def test_the_exact_variant_does_not_run_beside_others(run):
    with pytest.raises(SystemExit, match="run it alone"):
        run(grpo_step, "--rounds", "1", "--variants", "approximate,exact")


@pytest.mark.slow
def test_the_command_makes_the_same_step(run):
    found = run(trainer_step, "--steps", "3")
    (name,) = found["variants"]
    assert [len(found["samples"][name]), found["mean_response_tokens"]] == [2, [7.0] * 3]
    assert all(norm > 0 for norm in found["gradient_norms"])
    seconds = found["variants"][name]["median_seconds"]
    assert seconds["step"] > seconds["generate"] + seconds["update"] > 0


def test_the_host_cost_of_a_rollout_is_measured_beside_the_bare_engine(tmp_path):
    path = tmp_path / "host_cost.json"
    sizes = [f"--{name}={size}" for name, size in SIZES.items()]
    host_cost.main(["--runs=2", "--output", str(path), *sizes, "--new-tokens=24"])
    found = json.loads(path.read_text())
    assert set(found) == {"equal", "unequal"}
    assert set(found["equal"]) == {"bare", "loops", "per_row"}


def test_every_way_of_comparing_with_a_teacher_is_measured(run):
    found = run(distillation, "--teacher", "tiny", "--rounds", "1")
    assert tuple(found["variants"]) == distillation.VARIANTS
    assert "answers" not in found["variants"]["jsd"]["seconds"]
    assert "answers" in found["variants"]["k3"]["seconds"]
    exact, estimate = (found["variants"][name]["metrics"] for name in ("reverse_kl_full", "k3"))
    assert exact["distillation/divergence"] > 0
    assert estimate["distillation/divergence"] > 0


@pytest.mark.slow
def test_the_stall_of_an_update_is_measured_for_every_place_of_an_engine(run):
    found = run(publish_stall, "--updates=3", "--between=3", "--new-tokens=400",
                "--pause-seconds=0.01")  # fmt: skip
    lines = found["milliseconds_median_and_worst"]
    assert set(lines) == {
        f"{way}, {cache}"
        for way in ("shared", "copy", "process")
        for cache in ("kept", "recomputed")
    }
    for label, line in lines.items():
        middle, worst = line["pause"]
        assert (middle == worst == 0) if label.startswith("shared") else (0 < middle <= worst)


def test_kept_keys_and_values_are_compared_with_recomputed_ones_at_every_age(tmp_path):
    path = tmp_path / "kept.json"
    kept_cache.main(["--shape=tiny", "--device=cpu", "--ages=2", "--segment=4", "--rates=1e-3",
                     "--prompts=2", "--samples=2", f"--out={path}"])  # fmt: skip
    lines = json.loads(path.read_text())["lines"]
    assert [line["kept"]["age"] for line in lines] == [0, 1, 2]
    assert lines[0]["kept"]["kl"] < 1e-10 < lines[2]["kept"]["kl"]
    assert max(line["recomputed"]["kl"] for line in lines) < 1e-10


def test_a_part_of_the_gsm8k_page_that_is_cut_short_may_save_and_keeps_its_curve(
    tmp_path, monkeypatch
):
    line = json.dumps({"step": 5, "data": {gsm8k.ACCURACY: 0.25}})
    command = f"trap 'echo saved; exit' TERM; echo '{line}' > $VERL_FILE_LOGGER_PATH; "
    command += "echo halfway; sleep 60 & wait"
    monkeypatch.setattr(gsm8k, "commands", lambda: {"grpo": [command]})
    found = gsm8k.run("grpo", of_gsm8k(tmp_path, deadline=time.monotonic() + 2))
    assert found["steps"] == [{"step": 5, "accuracy": 0.25}]
    assert found["failure"] == "TimeoutExpired: halfway\nsaved\n"


def test_results_of_an_earlier_call_are_not_taken_for_those_of_this_one(tmp_path, monkeypatch):
    (tmp_path / "eval.json").write_text('{"part": "eval"}')
    monkeypatch.setattr(gsm8k, "commands", lambda: {"sft": ["false"]})
    monkeypatch.setattr("sys.argv", ["gsm8k", "--home", str(tmp_path), "--out", str(tmp_path)])
    with pytest.raises(SystemExit, match="not done: sft"):
        gsm8k.main()
    page = json.loads((tmp_path / "page.json").read_text())
    assert [part["part"] for part in page["parts"]] == ["sft"]


LATEST = "latest_checkpointed_iteration.txt"


def of_gsm8k(folder, **changes):
    options = {"device": "cpu", "tiny": False, "only": [], "resume": False} | changes
    return Namespace(out=folder, home=folder, **{"deadline": time.monotonic() + 60} | options)


def test_a_part_of_the_gsm8k_page_that_goes_on_has_one_curve(tmp_path, monkeypatch):
    def run(lines, **changes):
        text = "\n".join(json.dumps({"step": s, "data": data}) for s, data in lines)
        command = f"echo '{text}' >> $VERL_FILE_LOGGER_PATH; touch {saved / 'step'}"
        monkeypatch.setattr(gsm8k, "commands", lambda: {"grpo": [command]})
        return gsm8k.run("grpo", of_gsm8k(tmp_path, **changes))["steps"]

    saved = tmp_path / "runs/gsm8k/grpo"
    saved.mkdir(parents=True)
    reward, accuracy = gsm8k.WANTED["reward"], gsm8k.ACCURACY
    first, cut = (20, {accuracy: 0.1, reward: 0.5}), (21, {reward: 0.6})
    again, last = (20, {accuracy: 0.1}), (22, {reward: 0.8})
    run([first, cut], resume=True)
    assert run([again, (21, {reward: 0.7}), last], resume=True) == [
        {"step": 20, "accuracy": 0.1, "reward": 0.5},
        {"step": 21, "reward": 0.7},
        {"step": 22, "reward": 0.8},
    ]
    assert (saved / "step").exists()
    monkeypatch.setattr(gsm8k, "commands", lambda: {"grpo": ["true"]})
    assert gsm8k.run("grpo", of_gsm8k(tmp_path))["steps"] == []
    assert not saved.exists()


def test_what_is_done_of_the_gsm8k_page_is_not_run_again_and_a_failure_keeps_only_its_lane(
    tmp_path, monkeypatch
):
    begun = tmp_path / "begun"
    commands = {
        "sft": [f"echo sft >> {begun}"],
        "grpo": [f"echo grpo >> {begun}; test -e {tmp_path / 'cured'}"],
        "ppo": [f"echo ppo >> {begun}; mkdir -p runs/gsm8k/ppo; echo 1 > runs/gsm8k/ppo/{LATEST}"],
        "eval": [f"echo eval >> {begun}"],
    }
    monkeypatch.setattr(gsm8k, "commands", lambda: commands)
    assert gsm8k.run_page(of_gsm8k(tmp_path)) == ["grpo"]
    assert sorted(begun.read_text().split()) == ["eval", "eval", "grpo", "ppo", "sft"]
    begun.unlink()
    (tmp_path / "cured").touch()
    (tmp_path / "runs/gsm8k/grpo").mkdir()
    (tmp_path / "runs/gsm8k/grpo" / LATEST).write_text("1")
    assert gsm8k.run_page(of_gsm8k(tmp_path, resume=True)) == []
    assert sorted(begun.read_text().split()) == ["eval", "grpo"]


@pytest.mark.parametrize(
    ("part", "weights"),
    [
        ("eval", "grpo/global_step_40/actor/huggingface"),
        ("eval_ppo", "ppo/global_step_60/actor/huggingface"),
        ("eval_sft", "sft/latest"),
    ],
)
def test_the_newest_weights_that_a_part_has_saved_are_evaluated(
    tmp_path, monkeypatch, part, weights
):
    for trained, step in (("grpo", 40), ("ppo", 60)):
        saved = tmp_path / "runs/gsm8k" / trained / LATEST
        saved.parent.mkdir(parents=True)
        saved.write_text(f"{step}\n")
    command = "echo model.path=runs/gsm8k/grpo/global_step_400/actor/huggingface path=x"
    monkeypatch.setattr(gsm8k, "commands", lambda: {"eval": [command]})
    found = gsm8k.run(part, of_gsm8k(tmp_path))
    assert found["printed"] == f"model.path=runs/gsm8k/{weights} path=x\n"
    assert found["commands"] == [f"echo model.path=runs/gsm8k/{weights} path=x"]


def test_the_page_of_gsm8k_has_the_commands_of_every_part():
    found = gsm8k.commands()
    assert [
        command.split()[2] for part in ("sft", "grpo", "ppo") for command in found[part][:1]
    ] == [
        "verl.trainer.fsdp_sft_trainer",
        *["verl.trainer.main_ppo"] * 2,
    ]
    assert [command.split()[2] for command in found["eval"]] == [
        "verl.trainer.main_generation",
        "verl.trainer.main_eval",
    ]


def test_a_wheel_in_pieces_gives_its_model(tmp_path):
    path = Path(__file__).parents[2] / "examples/smollm2/prepare.py"
    spec = spec_from_file_location("prepare_smollm2", path)
    assert spec is not None
    assert spec.loader is not None
    prepare = module_from_spec(spec)
    spec.loader.exec_module(prepare)
    with zipfile.ZipFile(tmp_path / "whole", "w") as archive:
        archive.writestr("package/small.gguf", b"weights" * 100)
    whole = (tmp_path / "whole").read_bytes()
    pieces = [tmp_path / "piece.0", tmp_path / "piece.1"]
    for piece, content in zip(pieces, (whole[:300], whole[300:]), strict=True):
        piece.write_bytes(content)
    assert prepare.model_file(tmp_path, pieces).read_bytes() == b"weights" * 100
