"""Images through a real vLLM: files travel, and its own processor must give the same tokens."""

import pytest
import torch
from transformers import AutoModelForImageTextToText

from tests import tiny_vision
from tests.models.test_vision import prompt
from tests.tiny_vision import picture, save_processor
from tests.workers.rollout.vllm.helpers import GREEDY, generate, needs_vllm, vllm_process
from verl.utils.dataset.media import MediaEncoder
from verl.utils.tokenizer import hf_processor

pytestmark = needs_vllm


def wide_config():
    """Widths for which vLLM has kernels: a head has 32 features."""
    config = tiny_vision.tiny_config("qwen2_vl")
    text, tower = config.text_config, config.vision_config
    text.hidden_size, text.intermediate_size = 128, 256
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [8, 4, 4]}
    tower.hidden_size, tower.embed_dim = 128, 64
    return config


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(wide_config(), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.1)
    model.save_pretrained(folder)
    save_processor(folder, "qwen2_vl")
    return folder


def test_greedy_tokens_with_images_are_those_of_the_model_itself(folder):
    processor = hf_processor(folder)
    encode = MediaEncoder(processor.tokenizer, processor).encode_prompt
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    engine = vllm_process(folder, has_weights=True)
    engine.start()
    try:
        for pictures in ([picture(1)], [picture(2), picture(3, 16, 16)]):
            ids, media = encode(prompt(*pictures))
            (output,) = generate(engine, GREEDY, list(ids), media=tuple(media))
            inputs = {
                name: torch.cat([one.inputs[name] for one in media]) for name in media[0].inputs
            }
            whole = torch.tensor([[*ids, *output.token_ids]])
            kinds = torch.zeros_like(whole, dtype=torch.int32)
            for one in media:
                kinds[0, one.places] = 1
            with torch.no_grad():
                logits = model(input_ids=whole, mm_token_type_ids=kinds, **inputs).logits
            reference = logits[0, len(ids) - 1 : -1].float().log_softmax(-1)
            assert output.token_ids == reference.argmax(-1).tolist()
            drawn = reference[torch.arange(len(output.token_ids)), output.token_ids]
            torch.testing.assert_close(torch.tensor(output.log_probs), drawn, rtol=0, atol=1e-4)
    finally:
        engine.close()
