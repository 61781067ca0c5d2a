"""A worker that continues a whole batch of prompts at once, for loops of one's own."""

import numpy as np
import pytest
import torch

from tests.tiny_tokenizer import save_tiny_model
from tests.workers.roles.test_roles import PROMPT, RESPONSE, policy
from verl.protocol import DataProto
from verl.single_controller import WorkerError
from verl.workers.rollout.base import GenerationRequest, SamplingParams

PROMPTS = [[5, 6, 7], [5, 6, 7], [9, 10]]
SEEDS = [3, 4, 5]


@pytest.fixture(scope="module")
def workers(tmp_path_factory):
    return policy(str(save_tiny_model(tmp_path_factory.mktemp("model"))))


def as_object_column(values):
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def with_seeds(**columns):
    seeds = {"sampling_seed": as_object_column(SEEDS)}
    return DataProto(non_tensor_batch={**seeds, **columns})


def padded_prompts():
    ids = torch.zeros(3, PROMPT, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(PROMPTS):
        ids[row, PROMPT - len(prompt) :] = torch.tensor(prompt)
        mask[row, PROMPT - len(prompt) :] = 1
    batch = DataProto.from_dict({"input_ids": ids, "attention_mask": mask})
    return batch.union(with_seeds())


def alone(workers, prompt, seed):
    params = SamplingParams(max_tokens=RESPONSE, seed=seed)
    request = GenerationRequest(request_id="x", prompt_ids=prompt, params=params)
    return workers.workers[0].rollout.generate_batch([request])[0][0]


@pytest.mark.parametrize("kind", ["input_ids", "raw_prompt_ids"])
def test_each_row_is_continued_as_it_would_be_alone(workers, kind):
    given = padded_prompts()
    if kind == "raw_prompt_ids":
        given = with_seeds(raw_prompt_ids=as_object_column(PROMPTS))
    found = workers.generate_sequences(given)
    assert found.meta_info["timing"] == {}
    for row, (prompt, seed) in enumerate(zip(PROMPTS, SEEDS, strict=True)):
        expected = alone(workers, prompt, seed)
        length = len(expected.token_ids)
        assert found.batch["responses"][row, :length].tolist() == expected.token_ids
        assert found.batch["response_mask"][row].tolist() == [1] * length + [0] * (
            RESPONSE - length
        )
        assert found.batch["rollout_log_probs"][row, :length].tolist() == pytest.approx(
            expected.log_probs, abs=1e-5
        )
        mask = found.batch["attention_mask"][row].bool()
        assert found.batch["input_ids"][row][mask].tolist() == prompt + expected.token_ids
        assert found.batch["position_ids"][row][mask].tolist() == list(range(len(prompt) + length))


def test_a_prompt_in_words_is_tokenized_and_greedy_means_the_likeliest(workers):
    greedy = DataProto(
        non_tensor_batch={"raw_prompt": as_object_column(["1+1=", "1+1="])},
        meta_info={"do_sample": False},
    )
    first, second = workers.generate_sequences(greedy).batch["responses"].tolist()
    assert first == second


def test_a_batch_without_prompts_is_refused_with_what_it_has(workers):
    with pytest.raises(WorkerError, match=r"columns \['answer'\]; generate_sequences takes"):
        workers.generate_sequences(
            DataProto(non_tensor_batch={"answer": as_object_column(["a", "b"])})
        )
