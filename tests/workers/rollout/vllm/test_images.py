"""Prompts with images in a real vLLM, whose own processor reads them.

vLLM's code of Qwen's models imports torchvision. The operators of its wheel, which is built for
CUDA, do not load on a CPU, and these models use none: its Python part is put on their path
(`make test-vllm` installs it beside), and the operators that it expects are declared.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests.models.test_vision import encoder, plain_inputs, prompt
from tests.tiny_vision import FAMILIES, ID, picture, save_processor, tiny_config
from tests.workers.rollout.vllm.helpers import (
    GREEDY,
    SHAPE,
    generate,
    needs_vllm,
    train_a_little,
    vllm_process,
    weights_of,
)
from verl.config.packages import installed_version
from verl.utils.environment import vllm_python
from verl.workers.rollout.process.client import EngineProcess

pytestmark = needs_vllm
DECLARED = """
import torch

library = torch.library.Library("torchvision", "DEF")
for name in ("nms", "qnms"):
    library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def saved_vision_model(folder, family):
    """Wide enough for vLLM's kernels."""
    config = tiny_config(family)
    for name, width in {**SHAPE, "head_dim": 32}.items():
        setattr(config.text_config, name, width)
    if family != "idefics3":
        config.text_config.rope_parameters["mrope_section"] = [8, 4, 4]
        width = "hidden_size" if family == "qwen2_vl" else "out_hidden_size"
        setattr(config.vision_config, width, SHAPE["hidden_size"])
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
    for token in ("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>"):
        model.get_output_embeddings().weight[ID[token]] = 0


@torch.no_grad()
def log_probs_of(model, family, ids, media, output):
    """(T, V): what the model itself says at each place of the response."""
    inputs = plain_inputs(family, [*ids, *output.token_ids], media)
    logits = model(**inputs).logits[0, len(ids) - 1 : -1]
    return logits.float().log_softmax(-1)


def process_that_sees(folder, family, beside, **options):
    engine = vllm_process(folder, has_weights=True, prompt_length=128, **options)
    if family == "idefics3" or installed_version("torchvision", vllm_python()) is not None:
        return engine
    torchvision = Path(vllm_python()).parents[1] / "torchvision"
    if not torchvision.is_dir():
        pytest.skip("the processors of Qwen need torchvision")
    beside.mkdir()
    (beside / "sitecustomize.py").write_text(DECLARED)
    path = {"PYTHONPATH": f"{beside}:{torchvision}"}
    return EngineProcess(replace(engine.spec, environment={**engine.spec.environment, **path}))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_images_reach_the_model_before_and_after_an_update(tmp_path, family):
    model = saved_vision_model(tmp_path / "model", family)
    encode = encoder(tmp_path, family)
    engine = process_that_sees(tmp_path / "model", family, tmp_path / "beside")
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
