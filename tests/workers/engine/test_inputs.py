"""Rows become packed tokens, each prompt once where rows share it, and outputs return to rows."""

import pytest
import torch
from tensordict import TensorDict

from tests.tiny_models import tiny_model
from verl.config.optimizer import FSDPOptimizerConfig
from verl.workers.engine.inputs import (
    MEDIA_HASH,
    PROMPT_INDEX,
    ModelInputs,
    first_appearance,
    prompt_groups,
    prompt_owners,
)
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.schedule import MicroBatching

# [pad pad 5 6 | 7 8 0], [0 9 10 11 | 12 0 0], [pad pad pad 3 | - - -]
IDS = torch.tensor([[0, 0, 5, 6, 7, 8, 0], [0, 9, 10, 11, 12, 0, 0], [0, 0, 0, 3, 0, 0, 0]])
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 0, 0, 0]])
POSITIONS = (MASK.cumsum(1) - 1).clamp_min(0)


def whole(ids=IDS, mask=MASK, positions=POSITIONS):
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": positions,
        "responses": ids[:, 4:],
    }
    return ModelInputs.of(TensorDict(columns, batch_size=len(ids)), prefix_sharing=False)


def test_rows_are_laid_end_to_end_without_their_padding():
    inputs = whole()
    assert inputs.input_ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12, 3]
    assert inputs.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert inputs.parts == [4, 4, 1]


def test_a_response_token_is_predicted_by_the_token_before_it():
    inputs = whole()
    assert inputs.targets.tolist() == [7, 8, 12]
    assert inputs.input_ids[inputs.sources].tolist() == [6, 7, 11]


def test_values_return_to_their_places_and_nowhere_else():
    inputs = whole()
    unpacked = inputs.unpack(torch.tensor([0.1, 0.2, 0.3]))
    expected = torch.tensor([[0.1, 0.2, 0.0], [0.3, 0.0, 0.0], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(unpacked, expected)


def test_a_response_without_a_prompt_is_refused_with_its_row():
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0]])
    with pytest.raises(ValueError, match="row 1 has a response but no prompt"):
        whole(IDS[:2], mask, POSITIONS[:2])


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
    return ModelInputs.of(data, prefix_sharing=True)


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
        pass_.sources.tolist(), pass_.targets.tolist(), pass_.index.tolist(), strict=True
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


def test_prompts_are_numbered_by_their_first_appearance():
    assert first_appearance(["b", "a", "b", "c", "a"]) == [0, 1, 0, 2, 1]
    assert prompt_groups(rows()) == [0, 0, 1, 0, 1, 2]
    parts = packed(rows()).parts
    assert parts.prompts == [3, 1, 4]
    assert parts.owners == [0, 0, 0, 1, 1, 2]


def test_uid_tells_which_rows_share_a_prompt():
    data = rows([[3, 4]] * 4, [[5], [6], [7], [8]])
    data[PROMPT_INDEX] = torch.tensor([7, 2, 7, 2])
    assert prompt_groups(data) == [7, 2, 7, 2]
    parts = packed(data).parts
    assert (parts.prompts, parts.owners) == ([2, 2], [0, 0, 1, 1]), "equal tokens, two prompts"


def test_samples_of_one_uid_with_other_prompts_are_not_mixed_up():
    data = rows([[3, 4], [3, 5], [3, 4]], [[5], [6], [7]])
    data[PROMPT_INDEX] = torch.tensor([0, 0, 0])
    assert prompt_owners(data, PROMPT_COLUMNS) == [0, 1, 0]
    parts = packed(data).parts
    assert (parts.prompts, parts.owners) == ([2, 2], [0, 0, 1])


def test_equal_tokens_with_other_images_are_another_prompt():
    data = rows([[3, 4]] * 3, [[5], [6], [7]])
    data[MEDIA_HASH] = torch.tensor([1, 2, 1])
    assert prompt_groups(data) == [0, 1, 0]
    assert packed(data).parts.owners == [0, 0, 1]


@pytest.mark.parametrize("prefix_sharing", [False, True])
def test_positions_may_have_three_axes(prefix_sharing):
    data = rows()
    axes = torch.stack([data["position_ids"] + axis for axis in (0, 100, 200)], dim=1)
    plain = ModelInputs.of(data, prefix_sharing=prefix_sharing)
    inputs = ModelInputs.of(
        data.copy().update({"position_ids": axes}), prefix_sharing=prefix_sharing
    )
    assert inputs.position_ids.shape == (3, len(inputs.input_ids))
    for axis, offset in zip(inputs.position_ids, (0, 100, 200), strict=True):
        assert torch.equal(axis, plain.position_ids + offset)


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
