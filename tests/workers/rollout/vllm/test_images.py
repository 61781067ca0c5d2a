"""Prompts with images in a real vLLM, whose own processor reads them."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.models.test_vision import encoder, plain_inputs, prompt
from tests.tiny_vision import ID, picture, save_processor, tiny_config
from tests.workers.rollout.vllm.helpers import (
    GREEDY,
    SHAPE,
    generate,
    needs_vllm,
    train_a_little,
    vllm_process,
    weights_of,
)

pytestmark = needs_vllm


def saved_vision_model(folder, family):
    """Wide enough for vLLM's kernels."""
    config = tiny_config(family)
    for name, width in {**SHAPE, "head_dim": 32}.items():
        setattr(config.text_config, name, width)
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
    never_draws_an_image(model)
    model.save_pretrained(folder)
    save_processor(folder, family)
    return model


@torch.no_grad()
def never_draws_an_image(model):
    """The likeliest of many random logits is positive."""
    model.get_output_embeddings().weight[ID["<image>"]] = 0


@torch.no_grad()
def log_probs_of(model, family, ids, media, output):
    """(T, V): what the model itself says at each place of the response."""
    inputs = plain_inputs(family, [*ids, *output.token_ids], media)
    logits = model(**inputs).logits[0, len(ids) - 1 : -1]
    return logits.float().log_softmax(-1)


@pytest.mark.slow
def test_images_reach_the_model_before_and_after_an_update(tmp_path):
    family = "idefics3"  # the others' processors need torchvision
    model = saved_vision_model(tmp_path / "model", family)
    encode = encoder(tmp_path, family)
    engine = vllm_process(tmp_path / "model", has_weights=True, prompt_length=128)
    engine.start()
    found = {}
    for version in (0, 1):
        if version:
            train_a_little(model)
            never_draws_an_image(model)
            engine.update_weights(weights_of(model), version)
        for number in (1, 2):
            ids, media = encode.encode_prompt(prompt(picture(number), picture(number + 5)))
            (output,) = generate(engine, GREEDY, prompt=ids, media=tuple(media))
            reference = log_probs_of(model, family, ids, media, output)
            assert output.token_ids == reference.argmax(-1).tolist()
            drawn = reference[torch.arange(len(output.token_ids)), output.token_ids]
            torch.testing.assert_close(torch.tensor(output.log_probs), drawn, rtol=0, atol=1e-4)
            found[version, number] = output.log_probs
    assert len(set(map(tuple, found.values()))) == 4, "what is seen matters"
    engine.close()
