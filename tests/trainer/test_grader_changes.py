"""A second grader beside the first, and stored responses that other graders score again."""

import json
import logging

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from tests.server.engines import byte_tokenizer
from tests.toy import toy_overrides
from verl.config.load import load_config
from verl.config.ppo import PPOConfig
from verl.protocol import DataProto
from verl.trainer.ppo.audit import audit
from verl.trainer.ppo.checkpointing import RunCheckpoints
from verl.trainer.ppo.regrade import main, regrade

pytest.importorskip("math_verify")

RIGHT, WRONG = r"so \boxed{\frac{1}{2}}", r"so \boxed{0.6}"


def scored_batch(rows, source="numina_cn_k12"):
    """Rows of a response to a question whose answer is 0.5, and its score."""
    tokenizer = byte_tokenizer()
    tokens = [tokenizer.encode(text, add_special_tokens=False) for text, _ in rows]
    size = max(map(len, tokens))
    responses = torch.zeros(len(rows), size, dtype=torch.long)
    mask = torch.zeros(len(rows), size, dtype=torch.long)
    scores = torch.zeros(len(rows), size)
    for row, ids in enumerate(tokens):
        responses[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
        scores[row, len(ids) - 1] = rows[row][1]
    prompts = torch.ones(len(rows), 1, dtype=torch.long)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "response_mask": mask,
        "attention_mask": torch.cat([prompts, mask], dim=1),
        "token_level_scores": scores,
    }
    others = {
        "data_source": np.array([source] * len(rows), dtype=object),
        "reward_model": np.array([{"ground_truth": "0.5"}] * len(rows), dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=others)


def test_a_second_grader_counts_and_names_what_it_judges_differently(caplog):
    batch = scored_batch([(RIGHT, 1.0), (WRONG, 0.0), (RIGHT, 0.0)])
    before = batch.batch["token_level_scores"].clone()
    with caplog.at_level(logging.WARNING):
        found = audit(batch, byte_tokenizer(), 1.0)
    assert found == {"reward/num_audited": 3.0, "reward/num_audit_disagreements": 1.0}
    assert "the grader gives 0, math-verify says correct" in caplog.text
    assert torch.equal(batch.batch["token_level_scores"], before)


def test_sources_that_compare_texts_and_a_ratio_of_zero_are_not_audited():
    rows = [(RIGHT, 0.0)]
    assert audit(scored_batch(rows, "openai/gsm8k"), byte_tokenizer(), 1.0) == {}
    assert audit(scored_batch(rows), byte_tokenizer(), 0.0) == {}


def test_about_the_asked_share_is_audited_and_the_same_each_time():
    rows = [(f"step {number}", 0.0) for number in range(200)]  # nothing to give a verdict on
    batch = scored_batch(rows)
    assert audit(batch, byte_tokenizer(), 1e-9)["reward/num_audited"] == 0.0
    rows = [(rf"\boxed{{{number}}}", 0.0) for number in range(200)]
    found = [audit(scored_batch(rows), byte_tokenizer(), 0.04) for _ in range(2)]
    assert found[0] == found[1]
    assert 1 <= found[0]["reward/num_audited"] <= 16


def store(folder, step, entries):
    lines = [
        {"input": "?", "output": output, "gts": "0.5", "score": score, "step": step, **more}
        for output, score, more in entries
    ]
    (folder / f"{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_stored_responses_are_graded_again_and_flips_are_counted(tmp_path, capsys):
    numina = {"data_source": "numina_cn_k12"}
    store(tmp_path, 1, [(RIGHT, 1.0, numina), (WRONG, 1.0, numina)])
    store(tmp_path, 2, [(RIGHT, 0.0, numina), ("mine", 3.0, {"data_source": "a/own"})])
    found = regrade(tmp_path)
    assert list(found) == ["numina_cn_k12"]
    assert found["numina_cn_k12"].num_graded == 3
    assert [(flip["step"], flip["now"]) for flip in found["numina_cn_k12"].flips] == [
        (2, 1.0),
        (1, 0.0),
    ]
    assert regrade(tmp_path, max_responses=1)["numina_cn_k12"].num_graded == 1
    assert main([str(tmp_path)]) == 1
    assert "numina_cn_k12: 2 of 3 scores are others now" in capsys.readouterr().out


def test_files_that_do_not_name_their_source_need_it_from_the_caller(tmp_path, capsys):
    store(tmp_path, 1, [(RIGHT, 1.0, {})])
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "--data-source" in capsys.readouterr().err
    assert main([str(tmp_path), "--data-source", "numina_cn_k12"]) == 0


def test_a_grader_that_fails_is_counted_and_time_is_bounded(tmp_path, capsys):
    store(tmp_path, 1, [(RIGHT, 1.0, {"data_source": "numina_cn_k12"})] * 3)

    def fails(source, output, gold):
        raise OSError("no sandbox here")

    found = regrade(tmp_path, grade=fails)["numina_cn_k12"]
    assert (found.num_graded, found.flips, len(found.failures)) == (0, [], 3)
    assert regrade(tmp_path, max_seconds=-1.0) == {}


def resumed_with_other_graders(toy, tmp_path, *changes):
    """What the log says to a checkpoint of other graders, next to a response whose score is now
    another one."""
    rollouts = tmp_path / "rollouts"
    rollouts.mkdir()
    store(rollouts, 1, [(RIGHT, 0.0, {"data_source": "numina_cn_k12"})])
    options = [
        *(line for line in toy_overrides(toy, tmp_path) if "custom_reward" not in line),
        f"trainer.rollout_data_dir={rollouts}",
        *changes,
    ]
    config = load_config(OmegaConf.from_dotlist(options), PPOConfig).checked()
    checkpoints = RunCheckpoints(config, [], {})
    checkpoints._report_other_graders({"graders": {"verl.utils.reward_score": "another"}})


def test_a_run_that_continues_with_other_graders_says_how_many_scores_are_others(
    toy, tmp_path, caplog
):
    resumed_with_other_graders(toy, tmp_path)
    assert "of 1 stored responses of numina_cn_k12 1 have another score" in caplog.text


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(("custom_reward_function.path=/own.py",), id="a function of one's own"),
        pytest.param(
            (
                "reward_model.reward_manager=dapo",
                "reward_model.reward_kwargs.max_resp_len=8",
                "reward_model.reward_kwargs.overlong_buffer_cfg.enable=true",
                "reward_model.reward_kwargs.overlong_buffer_cfg.len=4",
                "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0",
            ),
            id="a penalty",
        ),
    ],
)
def test_scores_of_others_are_not_compared_with_those_of_built_in_graders(
    toy, tmp_path, caplog, changes
):
    resumed_with_other_graders(toy, tmp_path, *changes)
    assert "another score" not in caplog.text
