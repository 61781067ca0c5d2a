import time
from pathlib import Path

import pytest

from benchmarks.gpu.measuring import Phases, back_and_forth, ceilings, environment, module_name
from benchmarks.gpu.workload import Workload, prompt_ids, requests, reward, word_tokenizer


def test_variants_take_turns_back_and_forth():
    assert "".join(back_and_forth("abc", 3)) == "abccbaabc"


def test_a_phase_holds_the_seconds_of_what_happens_inside_it():
    phases = Phases("cpu")
    nap = phases.inside("nap", time.sleep)
    with phases.phase("day"):
        nap(0.01)
        nap(0.02)
        time.sleep(0.01)
    assert 0.03 <= phases.seconds["nap"] < phases.seconds["day"]
    assert phases.seconds["day"] >= 0.04
    assert phases.peak_gib == {"day": 0.0}


def test_the_ceilings_are_rates():
    found = ceilings("cpu")
    assert 1e-4 < found["matmul_tflops"] < 100
    assert 1e-5 < found["copy_tb_per_s"] < 10


def test_the_record_names_versions_and_seed():
    record = environment("cpu", seed=3)
    assert record["seed"] == 3
    assert record["device"] == "cpu"
    assert "torch" in record["versions"]
    assert "trl" not in record["versions"] or record["versions"]["trl"]


def test_the_record_has_the_command_of_a_file_of_this_folder_and_of_the_one_above():
    root = Path(__file__).parents[2] / "benchmarks"
    assert module_name(str(root / "gpu" / "decode.py")) == "benchmarks.gpu.decode"
    assert module_name(str(root / "kept_cache.py")) == "benchmarks.kept_cache"
    assert module_name("/elsewhere/pytest") == "pytest"


def test_a_workload_counts_its_tokens():
    work = Workload(prompts=2, samples=3, prompt_tokens=4, new_tokens=5)
    assert (work.sequences, work.generated_tokens, work.tokens) == (6, 30, 54)


def test_equal_seeds_give_equal_prompts_of_the_asked_length():
    work = Workload(prompts=2, samples=3, prompt_tokens=4, new_tokens=5)
    batch = requests(work, 512, seed=1)
    assert [list(request.prompt_ids) for request in batch] == prompt_ids(work, 512, seed=1)
    assert prompt_ids(work, 512, seed=1) != prompt_ids(work, 512, seed=2)
    assert {len(request.prompt_ids) for request in batch} == {4}
    assert all(request.params.ignore_eos and request.num_samples == 3 for request in batch)


def test_text_is_one_word_per_token_and_the_reward_is_a_rule_on_it():
    tokenizer = word_tokenizer(512)
    text = tokenizer.decode([17, 3, 471, 8])
    assert text == "t17 t3 t471 t8"
    assert tokenizer.encode(text).ids == [17, 3, 471, 8]
    assert reward(text) == pytest.approx(2 / 7)  # 4 and 8 of 1 7 3 4 7 1 8
    assert reward("") == 0.0
