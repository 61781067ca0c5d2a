"""On a GPU, sampled log-probabilities are those of training to the last bit."""

import pytest
import torch
from tensordict import TensorDict
from transformers import Qwen2Config

from verl.models.exact import make_exact
from verl.models.fuse import fuse_model
from verl.models.loading import random_causal_lm
from verl.workers.engine.one_device import OneDeviceEngine
from verl.workers.rollout.base import GenerationRequest, SamplingParams
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine
from verl.workers.schedule import MicroBatching

NUM_PROMPTS, NUM_SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 40, 8, 100, 380


def policy():
    config = Qwen2Config(
        vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=6,
        num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("cuda"):
        model = random_causal_lm(config, dtype=torch.bfloat16)
    fuse_model(model)
    return make_exact(model, PROMPT_TOKENS + NEW_TOKENS)


def sampled_rows(model, params):
    """Responses as rows of a batch, with the log-probabilities that came with them."""
    limits = EngineLimits(
        max_num_seqs=130,  # fewer than there are: batches of many sizes
        max_prompt_tokens=PROMPT_TOKENS,
        max_response_tokens=NEW_TOKENS,
        tokens_per_step=8,
    )
    engine = NativeEngine(model, limits, eos_token_ids=list(range(20)))
    generator = torch.Generator().manual_seed(0)
    requests = [
        GenerationRequest(
            request_id=str(i),
            prompt_ids=torch.randint(
                1000, 150000, (PROMPT_TOKENS - i,), generator=generator
            ).tolist(),
            params=SamplingParams(max_tokens=NEW_TOKENS, seed=i, **params),
            num_samples=NUM_SAMPLES,
        )
        for i in range(NUM_PROMPTS)
    ]
    groups = engine.generate_batch(requests)
    width = PROMPT_TOKENS + NEW_TOKENS
    ids = torch.zeros(NUM_PROMPTS * NUM_SAMPLES, width, dtype=torch.long)
    mask, log_probs = torch.zeros_like(ids), torch.zeros(len(ids), NEW_TOKENS)
    samples = [(r.prompt_ids, x) for r, g in zip(requests, groups, strict=True) for x in g]
    for row, (prompt, sample) in enumerate(samples):
        count = len(sample.token_ids)
        places = slice(PROMPT_TOKENS - len(prompt), PROMPT_TOKENS + count)
        ids[row, places] = torch.tensor([*prompt, *sample.token_ids])
        mask[row, places] = 1
        log_probs[row, :count] = torch.tensor(sample.log_probs)
    return TensorDict(
        {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "responses": ids[:, PROMPT_TOKENS:],
            "log_probs": log_probs,
        },
        batch_size=len(ids),
    ).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "log_probs": "raw"}]
)
def test_sampled_and_trained_log_probs_have_the_same_bits(params):
    model = policy()
    rows = sampled_rows(model, params)
    is_token = rows["attention_mask"][:, PROMPT_TOKENS:].bool()
    if not params:
        assert int(is_token.sum()) >= 100_000
    for prefix_sharing in (False, True):
        engine = OneDeviceEngine(lambda: model, None, prefix_sharing=prefix_sharing)
        engine.initialize()
        for micro_batching in (MicroBatching(rows=7), MicroBatching(tokens=20_000)):
            found = engine.infer_batch(
                rows,
                micro_batching=micro_batching,
                temperature=params.get("temperature", 1.0),
            )
            difference = (found["log_probs"] - rows["log_probs"])[is_token].abs().max()
            assert float(difference) == 0
