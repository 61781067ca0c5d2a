"""The reward model's worker, called through a worker group in this process."""

import numpy as np
import pytest
import torch

from tests.workers.reward_model.models import TEMPLATE, character_tokenizer, reward_model, save
from verl.config.reward import FSDPRewardModelConfig, FSDPRewardModelModelConfig
from verl.protocol import DataProto
from verl.single_controller import ClassWithInitArgs, ResourcePool
from verl.single_controller.base.failures import WorkerError
from verl.single_controller.local import LocalWorkerGroup
from verl.utils.metric import reduce_metrics
from verl.workers.roles import RewardModelWorker

PROMPTS = ["2+2=", "7-3=?"]
RESPONSES = ["4", "it_is_4"]
PROMPT, RESPONSE = 8, 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A reward model with the policy's tokenizer, and one with a tokenizer of its own."""
    root = tmp_path_factory.mktemp("models")
    own = character_tokenizer(first="A", template=TEMPLATE)
    return {
        "same": save(reward_model("llama"), root / "same"),
        "own": save(reward_model("qwen2"), root / "own", own),
        "policy": str(root / "same"),
    }


def workers(path, *, input_tokenizer=None, **options):
    model = FSDPRewardModelModelConfig(path=path, input_tokenizer=input_tokenizer)
    config = FSDPRewardModelConfig(enable=True, model=model, **options)
    group = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(RewardModelWorker, config))
    group.init_model()
    return group


def batch() -> DataProto:
    """Prompts padded on the left, responses on the right; the first one was not finished."""
    tokenizer = character_tokenizer()
    ids = torch.full((2, PROMPT + RESPONSE), tokenizer.pad_token_id)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        before = tokenizer(prompt)["input_ids"]
        after = tokenizer(response)["input_ids"] + [tokenizer.eos_token_id] * row
        span = slice(PROMPT - len(before), PROMPT + len(after))
        ids[row, span] = torch.tensor(before + after)
        mask[row, span] = 1
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "responses": ids[:, PROMPT:]},
        non_tensors={"raw_prompt": np.array(PROMPTS, dtype=object)},
    )


def own_score(model, ids):
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids])).logits[0, 0].item()


def test_the_score_of_a_response_stands_on_its_last_token(folders):
    found = workers(folders["same"]).compute_rm_score(batch())
    scores = found.batch["rm_scores"]
    assert scores.shape == (2, RESPONSE)
    assert scores.nonzero().tolist() == [[0, 0], [1, 7]]
    tokenizer, model = character_tokenizer(), reward_model("llama")
    first = own_score(model, tokenizer("2+2=4")["input_ids"])
    second = own_score(model, tokenizer("7-3=?it_is_4</s>")["input_ids"])
    assert scores.sum(1).tolist() == pytest.approx([first, second], abs=1e-5)


def test_with_an_input_tokenizer_the_model_reads_its_own_template(folders):
    group = workers(folders["own"], input_tokenizer=folders["policy"])
    found = group.compute_rm_score(batch())
    tokenizer, model = character_tokenizer(first="A", template=TEMPLATE), reward_model("qwen2")
    texts = [
        "<s><turn>u:2+2=</turn><turn>a:4</turn>",
        "<s><turn>u:7-3=?</turn><turn>a:it_is_4</turn>",
    ]
    expected = [own_score(model, tokenizer(text)["input_ids"]) for text in texts]
    scores = found.batch["rm_scores"]
    assert scores.sum(1).tolist() == pytest.approx(expected, abs=1e-5)
    assert scores.nonzero().tolist() == [[0, 0], [1, 7]], "still the policy's last token"


def test_the_micro_batches_do_not_change_the_scores(folders):
    scores = [
        workers(folders["same"], **options).compute_rm_score(batch()).batch["rm_scores"]
        for options in (
            {"micro_batch_size_per_gpu": 1},
            {"micro_batch_size_per_gpu": 8},
            {"use_dynamic_bsz": True, "forward_max_token_len_per_gpu": 16},
        )
    ]
    for other in scores[1:]:
        torch.testing.assert_close(other, scores[0], rtol=0, atol=1e-6)


def test_what_is_cut_is_counted(folders):
    group = workers(folders["same"], max_length=6)
    found = group.compute_rm_score(batch())
    metrics = reduce_metrics(found.meta_info["metrics"])
    assert metrics["reward_model/num_truncated"] == 1
    assert metrics["reward_model/input_length/max"] == 6
    model, tokenizer = reward_model("llama"), character_tokenizer()
    expected = own_score(model, tokenizer("7-3=?i")["input_ids"])
    assert found.batch["rm_scores"][1].sum().item() == pytest.approx(expected, abs=1e-5)


def test_what_is_too_long_may_be_refused_instead(folders):
    group = workers(folders["same"], max_length=6, truncation="error")
    with pytest.raises(WorkerError, match=r"13 tokens; reward_model\.max_length is 6"):
        group.compute_rm_score(batch())


def test_a_template_needs_the_prompts_as_they_were_written(folders):
    data = batch()
    del data.non_tensor_batch["raw_prompt"]
    group = workers(folders["own"], input_tokenizer=folders["policy"])
    with pytest.raises(WorkerError, match="the batch has no raw_prompt"):
        group.compute_rm_score(data)
