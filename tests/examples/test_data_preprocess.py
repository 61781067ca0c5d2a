"""Each script is run as a user runs it, on raw rows in the form in which they are published."""

import io
import json
import runpy
import sys
from pathlib import Path

import datasets
import pyarrow.parquet as parquet
import pytest
import yaml
from PIL import Image

from tests.tiny_tokenizer import tiny_tokenizer
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.prompts import CHATML
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.rm_dataset import RMDataset
from verl.utils.dataset.sft_dataset import SFTDataset
from verl.utils.reward_score import grading_fault, gsm8k

FOLDER = Path(__file__).parents[2] / "examples" / "data_preprocess"
GSM8K = Path(__file__).parents[3] / "shared" / "data" / "gsm8k"

PROBLEM = {
    "question": "Natalia sold 48 clips in April and half as many in May. How many in all?",
    "answer": "In May 48/2 = <<48/2=24>>24.\nIn all 48+24 = <<48+24=72>>72.\n#### 72",
}
EXPENSIVE = {"question": "How much is a house?", "answer": "It is $1,234,567.\n#### 1,234,567"}


@pytest.fixture(autouse=True)
def _caches_in_tmp(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.syspath_prepend(str(FOLDER))


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a script; give the rows of the files it wrote, by their names."""

    def run_script(script, *arguments, results=""):
        out = tmp_path / "out"
        command = [script, "--local_save_dir", str(out), *map(str, arguments)]
        monkeypatch.setattr(sys, "argv", command)
        runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
        files = sorted((out / results).iterdir())
        return {file.stem: parquet.read_table(file).to_pylist() for file in files}

    return run_script


def raw_folder(tmp_path, **splits):
    """A folder with a JSON Lines file per split."""
    folder = tmp_path / "raw"
    folder.mkdir(exist_ok=True)
    for name, rows in splits.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def chatty_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML
    return tokenizer


def dataset_of(file, tmp_path, **config):
    settings = {"cache_dir": str(tmp_path / "cache"), "max_prompt_length": 2000, **config}
    return RLHFDataset(str(file), chatty_tokenizer(), settings)


def trained_text(file, row):
    """What fine-tuning on a conversation trains, as far as the tiny tokenizer knows the letters."""
    tokenizer = chatty_tokenizer()
    item = MultiTurnSFTDataset(str(file), tokenizer, {"max_length": 2000})[row]
    return without_blanks(tokenizer.decode(item["input_ids"][item["loss_mask"].bool()]))


def without_blanks(text):
    return "".join(text.replace("<pad>", " ").split())


# ---- GSM8K ---------------------------------------------------------------------------------------


def test_gsm8k_rows_have_the_question_the_number_and_where_they_come_from(run, tmp_path):
    raw = raw_folder(tmp_path, train=[PROBLEM, EXPENSIVE], test=[EXPENSIVE])
    rows = run("gsm8k", "--local_dataset_path", raw)
    assert {name: len(part) for name, part in rows.items()} == {"train": 2, "test": 1}
    assert rows["train"][0] == {
        "data_source": "openai/gsm8k",
        "prompt": [
            {
                "role": "user",
                "content": f"{PROBLEM['question']} Let's think step by step and output the final "
                'answer after "####".',
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "72"},
        "extra_info": {"split": "train", "index": 0, **PROBLEM},
    }
    assert rows["train"][1]["reward_model"]["ground_truth"] == "1234567"
    assert rows["train"][1]["extra_info"]["index"] == 1
    assert rows["test"][0]["extra_info"]["split"] == "test"


def test_gsm8k_rows_load_in_the_training_dataset(run, tmp_path):
    run("gsm8k", "--local_dataset_path", raw_folder(tmp_path, train=[PROBLEM], test=[PROBLEM]))
    item = dataset_of(tmp_path / "out" / "train.parquet", tmp_path)[0]
    assert item["raw_prompt"][0]["content"].startswith(PROBLEM["question"])
    assert item["reward_model"]["ground_truth"] == "72"
    assert item["data_source"] == "openai/gsm8k"


@pytest.mark.skipif(not GSM8K.exists(), reason="the dataset is not here")
def test_every_answer_of_gsm8k_is_right_by_its_own_measure(run):
    rows = run("gsm8k", "--local_dataset_path", GSM8K)
    assert {name: len(part) for name, part in rows.items()} == {"train": 7473, "test": 1319}
    for row in rows["train"] + rows["test"]:
        answer, truth = row["extra_info"]["answer"], row["reward_model"]["ground_truth"]
        assert gsm8k.compute_score(answer, truth, method="strict") == 1.0, row
        assert gsm8k.compute_score(answer, truth, method="flexible") == 1.0, row


def test_gsm8k_for_fine_tuning_is_a_conversation_that_ends_with_the_solution(run, tmp_path):
    raw = raw_folder(tmp_path, train=[PROBLEM], test=[EXPENSIVE])
    rows = run("gsm8k_multiturn_sft", "--local_dataset_path", raw)
    turns = rows["train"][0]["messages"]
    assert [turn["role"] for turn in turns] == ["user", "assistant"]
    assert turns[1]["content"] == PROBLEM["answer"]
    assert list(rows["test"][0]) == ["messages"]
    assert trained_text(tmp_path / "out" / "train.parquet", row=0) == without_blanks(
        f"{PROBLEM['answer']}<|im_end|>"
    )


# ---- other mathematics ---------------------------------------------------------------------------


def test_math_takes_the_last_box_of_the_solution_as_the_answer(run, tmp_path):
    problem = {
        "problem": "What is half of one?",
        "level": "Level 1",
        "solution": "Not \\boxed{2}. It is $\\boxed{\\frac{1}{2}}$.",
        "type": "Algebra",
    }
    raw = raw_folder(tmp_path, train=[problem], test=[problem])
    row = run("math_dataset", "--local_dataset_path", raw)["test"][0]
    assert row["data_source"] == "DigitalLearningGmbH/MATH-lighteval"
    assert row["reward_model"] == {"style": "rule", "ground_truth": "\\frac{1}{2}"}
    assert row["prompt"][0]["content"].startswith("What is half of one? Let's think step by step")
    assert len(dataset_of(tmp_path / "out" / "test.parquet", tmp_path)) == 1


# ---- language ------------------------------------------------------------------------------------

SCENE = {
    "ind": 4,
    "activity_label": "Roof shingle removal",
    "ctx_a": "A man is sitting on a roof.",
    "ctx_b": "he",
    "ctx": "A man is sitting on a roof. he",
    "endings": ["wraps skis.", "is ripping [step] tiles.", "holds a cube.", "starts pulling."],
    "source_id": "activitynet~v_-JhWjGDPHMY",
    "split": "train",
    "split_type": "indomain",
    "label": "3",
}


def test_hellaswag_lettered_endings_and_the_labelled_validation_split(run, tmp_path):
    unlabelled = {**SCENE, "label": ""}
    raw = raw_folder(tmp_path, train=[SCENE], validation=[SCENE, SCENE], test=[unlabelled])
    rows = run("hellaswag", "--local_dataset_path", raw)
    assert {name: len(part) for name, part in rows.items()} == {"train": 1, "test": 2}
    assert rows["train"][0]["prompt"][0]["content"] == (
        "Roof shingle removal: A man is sitting on a roof. He\n\n"
        "A. wraps skis.\nB. is ripping tiles.\nC. holds a cube.\nD. starts pulling.\n\n"
        "Which ending fits best? Answer with its letter."
    )
    assert rows["train"][0]["reward_model"]["ground_truth"] == "D"


def test_a_scene_without_a_label_is_refused_by_its_row(run, tmp_path):
    raw = raw_folder(tmp_path, train=[SCENE, {**SCENE, "label": ""}])
    with pytest.raises(SystemExit, match="train row 2: label is ''"):
        run("hellaswag", "--local_dataset_path", raw)


HELPFUL = {
    "prompt": "\n\nHuman: Hi\n\nAssistant: Hello!\n\nHuman: How do I\n\nboil an egg?\n\nAssistant:",
    "response": " In water.",
    "chosen": " In water.",
    "rejected": " No idea.",
}
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello!"},
    {"role": "user", "content": "How do I\n\nboil an egg?"},
]


def test_hh_rlhf_for_reinforcement_learning_is_a_conversation(run, tmp_path):
    raw = raw_folder(tmp_path, train=[HELPFUL], test=[HELPFUL])
    rows = run("full_hh_rlhf", "--split", "rl", "--local_dataset_path", raw, results="rl")
    assert rows["test"] == [
        {
            "data_source": "Dahoas/full-hh-rlhf",
            "prompt": TURNS,
            "ability": "alignment",
            "reward_model": {"style": "model", "ground_truth": "In water."},
            "extra_info": {"split": "test", "index": 0},
        }
    ]
    assert dataset_of(tmp_path / "out" / "rl" / "train.parquet", tmp_path)[0]["raw_prompt"] == TURNS


def test_hh_rlhf_for_fine_tuning_has_the_preferred_answer(run, tmp_path):
    raw = raw_folder(tmp_path, train=[HELPFUL])
    rows = run("full_hh_rlhf", "--split", "sft", "--local_dataset_path", raw, results="sft")
    assert rows == {"train": [{"prompt": TURNS, "response": "In water."}]}
    config = {"prompt_key": "prompt", "response_key": "response", "max_length": 500}
    rows = SFTDataset(str(tmp_path / "out" / "sft" / "train.parquet"), chatty_tokenizer(), config)
    assert int(rows[0]["loss_mask"].sum()) == len("In water.") + 1  # and the end


def test_hh_rlhf_for_a_reward_model_has_both_answers(run, tmp_path):
    raw = raw_folder(tmp_path, train=[HELPFUL])
    rows = run("full_hh_rlhf", "--split", "rm", "--local_dataset_path", raw, results="rm")
    assert rows == {"train": [{"prompt": TURNS, "chosen": "In water.", "rejected": "No idea."}]}
    pair = RMDataset(str(tmp_path / "out" / "rm" / "train.parquet"), chatty_tokenizer())[0]
    lengths = pair["attention_mask"].sum(-1).tolist()
    assert lengths[0] - lengths[1] == len("In water.") - len("No idea.")


def test_hh_rlhf_refuses_text_that_is_no_transcript(run, tmp_path):
    raw = raw_folder(tmp_path, train=[{**HELPFUL, "prompt": "How do I boil an egg?"}])
    with pytest.raises(SystemExit, match="train row 1: the prompt is no transcript"):
        run("full_hh_rlhf", "--split", "rl", "--local_dataset_path", raw)


def test_the_multi_turn_conversations_are_right_and_train_both_answers(run, tmp_path):
    rows = run("multiturn")
    assert {name: len(part) for name, part in rows.items()} == {"train": 40, "test": 10}
    for row in rows["train"] + rows["test"]:
        roles = [message["role"] for message in row["messages"]]
        assert roles[-4:] == ["user", "assistant"] * 2
        total, _, eaten, _, left = row["messages"][-1]["content"].split()[:5]
        assert int(total) - int(eaten) == int(left)
    said = [turn["content"] for turn in rows["test"][1]["messages"] if turn["role"] == "assistant"]
    assert trained_text(tmp_path / "out" / "test.parquet", row=1) == without_blanks(
        "".join(f"{answer}<|im_end|>" for answer in said)
    )


# ---- rows for tools and simulated users ----------------------------------------------------------

DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"role": "user", "content": "Solve: 6 * 7\n\nPut it after Answer:."}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "42", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
NQ = {
    "id": "train_0",
    "question": "who wrote it?",
    "golden_answers": ["Ann", "Ann B."],
    "data_source": "nq",
}
TOOLS = FOLDER.parent / "sglang_multiturn" / "config" / "tool_config"


def tool_name(config):
    (entry,) = yaml.safe_load((TOOLS / f"{config}.yaml").read_text())["tools"]
    return entry["tool_schema"]["function"]["name"]


@pytest.mark.parametrize(
    ("script", "raw", "config", "made_with"),
    [
        ("gsm8k_multiturn_w_tool", PROBLEM, "gsm8k_tool_config", {"ground_truth": "72"}),
        ("gsm8k_tool_agent_loop", PROBLEM, "gsm8k_tool_config", {"ground_truth": "72"}),
        ("dapo_multiturn_w_tool", DAPO, "sandbox_fusion_tool_config", {"ground_truth": "42"}),
        ("aime2024_multiturn_w_tool", DAPO, "sandbox_fusion_tool_config", {"ground_truth": "42"}),
        (
            "preprocess_search_r1_dataset",
            NQ,
            "search_tool_config",
            {
                "ground_truth": {"target": ["Ann", "Ann B."]},
                "question": "who wrote it?",
                "data_source": "searchR1_nq",
            },
        ),
    ],
)
def test_rows_for_tools_name_the_loop_and_what_each_tool_is_made_with(
    run, tmp_path, script, raw, config, made_with
):
    rows = run(script, "--local_dataset_path", raw_folder(tmp_path, train=[raw]))
    (row,) = rows["train"]
    tool = tool_name(config)
    info = row["extra_info"]
    assert row["agent_name"] == "tool_agent"
    assert info["need_tools_kwargs"] is True
    assert info["tools_kwargs"] == {tool: {"create_kwargs": made_with}}
    assert [message["role"] for message in row["prompt"]] == ["system", "user"]
    if script != "preprocess_search_r1_dataset":
        assert tool in row["prompt"][0]["content"]  # the model is told to use it
    assert grading_fault(row["data_source"], row["reward_model"]["ground_truth"]) is None
    settings = {"need_tools_kwargs": True, "filter_overlong_prompts": True}
    item = dataset_of(tmp_path / "out" / "train.parquet", tmp_path, **settings)[0]
    assert item["agent_name"] == "tool_agent"
    assert item["tools_kwargs"] == info["tools_kwargs"]


def test_rows_with_a_simulated_user_name_it_and_the_answer(run, tmp_path):
    raw = raw_folder(tmp_path, train=[PROBLEM], test=[EXPENSIVE])
    rows = run("gsm8k_multiturn_w_interaction", "--local_dataset_path", raw)
    assert rows["train"][0]["agent_name"] == "tool_agent"
    assert rows["train"][0]["extra_info"]["interaction_kwargs"] == {
        "name": "gsm8k",
        "query": PROBLEM["question"],
        "ground_truth": "72",
    }
    assert rows["test"][0]["extra_info"]["interaction_kwargs"]["ground_truth"] == "1234567"
    folder = TOOLS.parent / "interaction_config"
    config = yaml.safe_load((folder / "gsm8k_interaction_config.yaml").read_text())
    assert config["interaction"][0]["name"] == "gsm8k"


@pytest.mark.parametrize("script", ["geo3k", "geo3k_multiturn_w_tool"])
def test_geometry_rows_keep_their_pictures(run, tmp_path, script):
    picture = Image.new("RGB", (8, 8), "red")
    raw = datasets.Dataset.from_list(
        [{"images": [picture], "problem": "<image>Find x.", "answer": "7"}]
    )
    datasets.DatasetDict({"train": raw, "test": raw}).save_to_disk(str(tmp_path / "saved"))
    row = run(script, "--local_dataset_path", tmp_path / "saved")["train"][0]
    assert row["prompt"][-1]["content"].startswith("<image>Find x.")
    assert Image.open(io.BytesIO(row["images"][0]["bytes"])).size == (8, 8)
    assert grading_fault(row["data_source"], row["reward_model"]["ground_truth"]) is None
    if script != "geo3k":
        tool = tool_name("geo3k_tool_config")
        made_with = row["extra_info"]["tools_kwargs"][tool]["create_kwargs"]
        assert made_with == {"ground_truth": "7"}


def test_a_question_without_an_answer_is_refused(run, tmp_path):
    raw = raw_folder(tmp_path, train=[{**NQ, "golden_answers": []}])
    with pytest.raises(SystemExit, match="train row 1: the row has no answer"):
        run("preprocess_search_r1_dataset", "--local_dataset_path", raw)


# ---- what all scripts share ----------------------------------------------------------------------


def test_raw_rows_may_be_a_parquet_file_whose_name_tells_the_split(run, tmp_path):
    file = tmp_path / "gsm8k_test.parquet"
    datasets.Dataset.from_list([PROBLEM]).to_parquet(str(file))
    assert list(run("gsm8k", "--local_dataset_path", file)) == ["test"]


def test_raw_rows_may_be_a_saved_dataset(run, tmp_path):
    split = datasets.Dataset.from_list([PROBLEM])
    datasets.DatasetDict({"train": split, "test": split}).save_to_disk(str(tmp_path / "saved"))
    assert list(run("gsm8k", "--local_dataset_path", tmp_path / "saved")) == ["test", "train"]


def test_a_folder_with_several_configurations_is_read_as_the_hub_says(run, tmp_path):
    for config, row in (("main", PROBLEM), ("socratic", EXPENSIVE)):
        (tmp_path / "raw" / config).mkdir(parents=True)
        file = tmp_path / "raw" / config / "train-00000-of-00001.parquet"
        datasets.Dataset.from_list([row]).to_parquet(str(file))
    (tmp_path / "raw" / "README.md").write_text(
        "---\nconfigs:\n"
        "- config_name: main\n  data_files:\n  - split: train\n    path: main/train-*\n"
        "- config_name: socratic\n  data_files:\n  - split: train\n    path: socratic/train-*\n"
        "---\n"
    )
    rows = run("gsm8k", "--local_dataset_path", tmp_path / "raw")
    assert [row["reward_model"]["ground_truth"] for row in rows["train"]] == ["72"]


def test_the_old_name_of_the_folder_still_works_and_says_so(tmp_path, monkeypatch, capsys):
    raw = raw_folder(tmp_path, train=[PROBLEM])
    old = ["--local_dir", str(tmp_path / "old")]
    monkeypatch.setattr(sys, "argv", ["gsm8k", "--local_dataset_path", str(raw), *old])
    runpy.run_path(str(FOLDER / "gsm8k.py"), run_name="__main__")
    assert parquet.read_table(tmp_path / "old" / "train.parquet").num_rows == 1
    shown = capsys.readouterr()
    assert "--local_dir is now --local_save_dir" in shown.err
    assert shown.out == f"{tmp_path / 'old' / 'train.parquet'}: 1 rows\n"


def test_two_different_folders_for_the_results_are_refused(run, tmp_path):
    raw = raw_folder(tmp_path, train=[PROBLEM])
    with pytest.raises(SystemExit, match="give one of them"):
        run("gsm8k", "--local_dataset_path", raw, "--local_dir", tmp_path / "other")


def test_the_results_are_copied_to_hdfs_dir(run, tmp_path):
    raw = raw_folder(tmp_path, train=[PROBLEM])
    run("gsm8k", "--local_dataset_path", raw, "--hdfs_dir", tmp_path / "copy")
    assert parquet.read_table(tmp_path / "copy" / "train.parquet").num_rows == 1


def test_hdfs_that_cannot_be_reached_is_said_in_one_line(run, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    raw = raw_folder(tmp_path, train=[PROBLEM])
    with pytest.raises(SystemExit, match="`hdfs` is not on the PATH"):
        run("gsm8k", "--local_dataset_path", raw, "--hdfs_dir", "hdfs://cluster/data")


def test_without_a_network_the_script_says_how_to_bring_the_data(run):
    with pytest.raises(SystemExit) as refusal:
        run("gsm8k")
    message = str(refusal.value)
    assert "cannot get openai/gsm8k from the Hugging Face hub" in message
    assert "hf download openai/gsm8k --repo-type dataset --local-dir raw" in message
    assert "--local_dataset_path raw" in message


def test_a_path_that_does_not_exist_is_refused(run, tmp_path):
    with pytest.raises(SystemExit, match="there is no file or folder"):
        run("gsm8k", "--local_dataset_path", tmp_path / "nowhere")


def test_an_empty_folder_is_refused(run, tmp_path):
    with pytest.raises(SystemExit, match=r"cannot read .* \(--local_dataset_path\)"):
        run("gsm8k", "--local_dataset_path", raw_folder(tmp_path))


def test_splits_of_another_name_are_refused(run, tmp_path):
    raw = raw_folder(tmp_path, validation=[PROBLEM])
    with pytest.raises(SystemExit, match="has the splits validation; expected one of train, test"):
        run("gsm8k", "--local_dataset_path", raw)


def test_a_row_of_another_dataset_is_refused_with_the_columns_it_has(run, tmp_path):
    raw = raw_folder(tmp_path, train=[{"problem": "1+1", "answer": "#### 2"}])
    with pytest.raises(SystemExit, match="train row 1 has no 'question'; columns: problem, answer"):
        run("gsm8k", "--local_dataset_path", raw)


def test_a_row_without_an_answer_stops_the_script_and_leaves_no_file(run, tmp_path):
    raw = raw_folder(tmp_path, train=[PROBLEM, {**PROBLEM, "answer": "seventy-two"}])
    with pytest.raises(SystemExit, match="train row 2: the solution does not end in"):
        run("gsm8k", "--local_dataset_path", raw)
    assert not list(tmp_path.glob("out/*"))


def test_every_script_of_the_folder_shows_its_help(monkeypatch, capsys):
    scripts = sorted(file.stem for file in FOLDER.glob("*.py") if file.stem != "preparation")
    assert len(scripts) == 14
    for script in scripts:
        monkeypatch.setattr(sys, "argv", [script, "--help"])
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(FOLDER / f"{script}.py"), run_name="__main__")
        assert end.value.code == 0
        text = capsys.readouterr().out
        for flag in ("--local_dataset_path", "--local_save_dir", "--local_dir", "--hdfs_dir"):
            assert flag in text, script
