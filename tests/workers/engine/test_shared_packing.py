"""Samples that share their prompt in a pass: the numbers of rows that do not."""

import pytest
import torch
from tensordict import TensorDict

from tests.tiny_models import tiny_model
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.inputs import pack_shared_rows, same_rows
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.schedule import MicroBatching

PROMPTS = [[5, 6, 7], [5, 6, 7], [8], [5, 6, 7], [8], [9, 9, 9, 9]]
RESPONSES = [[11, 12], [13], [14, 15, 16, 17], [], [18], [19, 20, 21]]
PROMPT_COLUMNS, RESPONSE_COLUMNS = 5, 4


def rows(prompts=PROMPTS, responses=RESPONSES):
    shape = (len(prompts), PROMPT_COLUMNS + RESPONSE_COLUMNS)
    ids, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.long)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        first, end = PROMPT_COLUMNS - len(prompt), PROMPT_COLUMNS + len(response)
        ids[row, first:end] = torch.tensor(prompt + response)
        mask[row, first:end] = 1
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, PROMPT_COLUMNS:],
            "weight": torch.randn(len(prompts), RESPONSE_COLUMNS),
        },
        batch_size=len(prompts),
    )


def packed(data):
    columns = (data[name] for name in ("input_ids", "attention_mask", "position_ids"))
    return pack_shared_rows(*columns, RESPONSE_COLUMNS)


def test_a_prompt_stands_once_and_its_responses_follow_in_the_order_of_the_rows():
    pass_ = packed(rows())
    parts = pass_.parts
    samples = [
        (parts.prompts[owner], length)
        for owner, length in zip(parts.owners, parts.samples, strict=True)
    ]
    assert sorted(samples) == sorted(
        (len(prompt), len(response)) for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
    )
    assert sum(parts.prompts) == 3 + 1 + 4
    assert len(pass_.input_ids) == parts.num_tokens == 8 + 11


def test_each_response_token_is_predicted_from_the_token_before_it_and_returns_to_its_place():
    data = rows()
    pass_ = packed(data)
    whole = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    for source, target, place in zip(
        pass_.sources.tolist(), pass_.targets.tolist(), pass_.places.tolist(), strict=True
    ):
        row, column = divmod(place, RESPONSE_COLUMNS)
        at = len(PROMPTS[row]) + column
        assert target == whole[row][at]
        assert int(pass_.input_ids[source]) == whole[row][at - 1]
        assert int(pass_.position_ids[source]) == at - 1


def test_rows_with_prompts_of_their_own_are_packed_as_they_are():
    pass_ = packed(rows([[3], [4], [3, 4]], [[5], [6], [7]]))
    assert pass_.parts == [2, 2, 3]


def test_equal_tokens_at_other_positions_are_another_prompt():
    data = rows([[3, 4], [3, 4]], [[5], [6]])
    data["position_ids"][1] += 1
    assert packed(data).parts == [3, 3]


def test_rows_are_the_same_only_if_all_their_columns_are():
    a = torch.tensor([[1, 2], [2, 1], [1, 2], [0, 0], [1, 2]])
    b = torch.tensor([[0], [0], [1], [0], [0]])
    number = same_rows(a, b).tolist()
    assert number[0] == number[4]
    assert len(set(number)) == 4


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gpt_oss"])
def test_log_probs_and_gradients_are_those_of_whole_rows(architecture):
    data = rows()

    def columns_and_gradients(prefix_sharing):
        engine = OneDeviceEngine(
            lambda: tiny_model(architecture),
            FSDPOptimizerConfig(lr=1e-3),
            prefix_sharing=prefix_sharing,
        )
        engine.initialize()
        found = engine.forward(data, 1.0)
        loss = (found["log_probs"] * data["weight"]).sum() + found["entropy"].sum()
        loss.backward()
        return found, {name: p.grad for name, p in engine.module.named_parameters()}

    shared, shared_grads = columns_and_gradients(True)
    whole, whole_grads = columns_and_gradients(False)
    for name in whole:
        torch.testing.assert_close(shared[name], whole[name], atol=1e-5, rtol=1e-5)
    for name, gradient in whole_grads.items():
        torch.testing.assert_close(shared_grads[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


def test_inference_gives_every_row_its_own_columns():
    data = rows()
    engines = [
        OneDeviceEngine(lambda: tiny_model("llama"), None, prefix_sharing=sharing)
        for sharing in (True, False)
    ]
    found = []
    for engine in engines:
        engine.initialize()
        found.append(engine.infer_batch(data, micro_batching=MicroBatching(rows=4)))
    torch.testing.assert_close(found[0]["log_probs"], found[1]["log_probs"], atol=1e-6, rtol=1e-6)
