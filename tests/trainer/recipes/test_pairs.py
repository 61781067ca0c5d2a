"""Pairs: which responses are chosen and rejected, what is left out, and that it is counted."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.tiny_tokenizer import tiny_tokenizer
from verl.protocol import DataProto
from verl.protocol.padded import SESSION_UID
from verl.trainer.recipes.spin import (
    PREFERENCE,
    against_answers,
    in_pairs,
    pair_counts,
    preferences,
    prompts_of_sessions,
)

PROMPTS = np.array(["a", "a", "a", "b", "b", "c", "d", "d", "d"], dtype=object)
REWARDS = np.array([0.5, 1.0, 0.0, 2.0, 2.0, 3.0, 1.0, 0.0, 1.0])


def test_the_best_is_chosen_and_the_worst_rejected_and_ties_give_no_pair():
    found = preferences(REWARDS, PROMPTS)
    assert found.tolist() == [0, 1, -1, 0, 0, 0, 1, -1, 0]
    assert pair_counts(found, PROMPTS) == {
        "preference/num_pairs": 2,
        "preference/num_prompts_tied": 1,
        "preference/num_prompts_alone": 1,
    }


def rows(texts: list[str], prompts: list[str], **columns: Any) -> DataProto:
    """Responses of characters after a prompt of two tokens, in six places."""
    tokenizer = tiny_tokenizer()
    ids = [[*tokenizer.encode(text, add_special_tokens=False), 1] for text in texts]
    responses = torch.tensor([one + [0] * (6 - len(one)) for one in ids])
    mask = torch.tensor([[1] * len(one) + [0] * (6 - len(one)) for one in ids])
    before = torch.ones(len(texts), 2, dtype=torch.long)
    attention = torch.cat([before, mask], 1)
    return DataProto.from_dict(
        tensors={
            "prompts": before * 5,
            "responses": responses,
            "response_mask": mask,
            "input_ids": torch.cat([before * 5, responses], 1),
            "attention_mask": attention,
            "position_ids": attention.cumsum(1) - 1,
            "token_level_scores": torch.ones(len(texts), 6),
            "rollout_log_probs": torch.zeros(len(texts), 6),
        },
        non_tensors={"uid": np.array(prompts, dtype=object), **columns},
        meta_info={"policy_version": 3},
    )


def test_a_session_of_several_rows_is_one_response():
    sessions = np.array(["s", "s", "t"], dtype=object)
    batch = rows(["1", "2", "3"], ["a", "a", "a"], **{SESSION_UID: sessions})
    assert prompts_of_sessions(batch).tolist() == ["a", "a"]


def test_without_any_pair_the_first_prompt_stays_and_teaches_nothing():
    batch = rows(["1", "2", "3"], ["a", "a", "b"])
    batch.batch[PREFERENCE] = torch.zeros(3)
    assert in_pairs(batch).non_tensor_batch["uid"].tolist() == ["a", "a"]


def test_answers_of_the_dataset_are_chosen_and_responses_rejected():
    tokenizer = tiny_tokenizer()
    eos = tokenizer.eos_token_id
    answers = np.array(["77", "77", "12345678", "9", "9"], dtype=object)
    batch = rows(["12", "3", "4", "9", "5"], ["a", "a", "b", "c", "c"], answer=answers)
    batch.batch["responses"][3, 1] = batch.batch["input_ids"][3, 3] = eos  # says the answer itself
    batch.batch["positive_weights"] = batch.batch["response_mask"].float()
    paired, counts = against_answers(batch, "answer", tokenizer)
    assert counts == {
        "preference/num_pairs": 3,
        "preference/num_same_as_answer": 1,
        "preference/num_answers_too_long": 1,
    }
    assert paired.batch[PREFERENCE].tolist() == [-1, -1, 0, 0, -1, 1, 1]
    kept = in_pairs(paired)
    assert kept.non_tensor_batch["uid"].tolist() == ["a", "a", "c", "a", "c"]
    answer = [*tokenizer.encode("77", add_special_tokens=False), eos]
    chosen = kept.batch[3]
    assert chosen["responses"][:3].tolist() == answer
    assert chosen["input_ids"].tolist()[:5] == [5, 5, *answer]
    assert chosen["response_mask"].tolist() == [1, 1, 1, 0, 0, 0]
    assert chosen["attention_mask"].tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert chosen["position_ids"].tolist()[:5] == [0, 1, 2, 3, 4]
    assert kept.batch["positive_weights"].sum(-1).tolist() == [3, 2, 2, 0, 0]
    assert "rollout_log_probs" not in kept.batch.keys()  # noqa: SIM118
    assert "policy_version" not in kept.meta_info
    assert batch.batch[0]["responses"].tolist() != kept.batch[3]["responses"].tolist()


def test_a_session_of_several_rows_loses_against_the_answer_as_a_whole():
    sessions = np.array(["s", "s", "t"], dtype=object)
    answers = np.array(["1", "1", "1"], dtype=object)
    columns = {SESSION_UID: sessions, "answer": answers}
    batch = rows(["1", "2", "3"], ["a", "a", "a"], **columns)
    eos = tiny_tokenizer().eos_token_id
    batch.batch["responses"][0, 1] = batch.batch["input_ids"][0, 3] = eos
    paired, counts = against_answers(batch, "answer", tiny_tokenizer())
    assert counts["preference/num_pairs"] == 2
    assert paired.batch[PREFERENCE].tolist() == [-1, -1, -1, 1]
    assert len(set(paired.non_tensor_batch[SESSION_UID])) == 3


@pytest.mark.parametrize("answer", [None, "", 7])
def test_an_answer_that_is_no_text_is_named(answer):
    batch = rows(["1"], ["a"], answer=np.array([answer], dtype=object))
    with pytest.raises(ValueError, match=r"data\.chosen_key=answer"):
        against_answers(batch, "answer", tiny_tokenizer())
