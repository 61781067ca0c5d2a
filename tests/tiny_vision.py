"""Tiny random vision-language models with processors of their own, and images to show them."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Idefics3Processor,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl.models.loading import random_causal_lm
from verl.utils.tokenizer import hf_processor

SPECIAL = [
    "<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>",
    "<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>",
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{i}_col_{j}>" for i in (1, 2) for j in (1, 2)),
]  # fmt: skip
CHARACTERS = ["\n", *(chr(code) for code in range(32, 127))]
VOCABULARY = len(SPECIAL) + len(CHARACTERS)
ID = {token: number for number, token in enumerate([*SPECIAL, *CHARACTERS])}
PATCH = 4
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "idefics3")

QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = """
{%- for message in messages -%}
<|im_start|>{{ message['role'] + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] }}
{%- else -%}
{%- for part in message['content'] -%}
{%- if part['type'] == 'image' -%}IMAGE
{%- elif part['type'] == 'text' -%}{{ part['text'] }}{%- endif -%}
{%- endfor -%}
{%- endif -%}
<|im_end|>{{ '\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""

TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": ID["<pad>"],
    "bos_token_id": ID["<s>"],
    "eos_token_id": ID["<|im_end|>"],
}
QWEN_IDS = {
    "image_token_id": ID["<|image_pad|>"],
    "video_token_id": ID["<|video_pad|>"],
    "vision_start_token_id": ID["<|vision_start|>"],
    "vision_end_token_id": ID["<|vision_end|>"],
}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}


def tiny_config(family: str) -> Any:
    text: dict[str, Any] = dict(TEXT)
    tower: dict[str, Any] = {"patch_size": PATCH, "depth": 2, "num_heads": 2}
    tower |= {"spatial_merge_size": 2, "temporal_patch_size": 2}
    if family == "qwen2_vl":
        tower |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    elif family == "qwen2_5_vl":
        tower |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    elif family == "qwen3_vl":
        tower |= {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": 32}
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]}
        text["head_dim"] = 8
    if family == "idefics3":
        tower = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        tower |= {"num_attention_heads": 2, "image_size": 16, "patch_size": PATCH}
        return AutoConfig.for_model(
            family,
            text_config={"model_type": "llama", **text},
            vision_config=tower,
            image_token_id=ID["<image>"],
            scale_factor=2,
            pad_token_id=ID["<pad>"],
        )
    text["rope_parameters"] = dict(MROPE)
    return AutoConfig.for_model(family, text_config=text, vision_config=tower, **QWEN_IDS)


def tiny_vision_model(family: str = "qwen2_vl", scale: float = 0.2) -> PreTrainedModel:
    """Our version of the model; weights are large enough for images to make a difference."""
    model = random_causal_lm(tiny_config(family))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, scale, generator=generator)
    return model


def plain_twin(model: PreTrainedModel, family: str) -> PreTrainedModel:
    """The same weights in an unmodified transformers model."""
    twin = AutoModelForImageTextToText.from_config(tiny_config(family), attn_implementation="eager")
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def tiny_vision_tokenizer(family: str = "qwen2_vl") -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel(ID, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="<|im_end|>",
        extra_special_tokens=[token for token in SPECIAL if token not in ("<pad>", "<s>")],
    )
    image = "<image>" if family == "idefics3" else QWEN_IMAGE
    made.chat_template = TEMPLATE.replace("IMAGE", image).strip()
    return made


def save_tiny_vision(folder: Path, family: str = "qwen2_vl") -> Path:
    """A folder that looks like a downloaded model: weights, tokenizer, processor."""
    tiny_vision_model(family).save_pretrained(folder)
    save_processor(folder, family)
    return folder


def save_processor(folder: Path, family: str) -> None:
    tokenizer = tiny_vision_tokenizer(family)
    tokenizer.save_pretrained(folder)
    if family == "idefics3":
        Idefics3Processor(image_processor(family), tokenizer, 4).save_pretrained(folder)
    else:
        image_processor(family).save_pretrained(folder)


def image_processor(family: str) -> Any:
    if family == "idefics3":
        return Idefics3ImageProcessorPil(
            size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
        )
    return Qwen2VLImageProcessorPil(
        patch_size=PATCH, size={"shortest_edge": 64, "longest_edge": 1024}
    )


def tiny_processor(folder: Path, family: str = "qwen2_vl") -> ProcessorMixin:
    """Loaded from files, as a run does; its class follows from the model's configuration."""
    tiny_config(family).save_pretrained(folder)
    save_processor(folder, family)
    processor = hf_processor(folder)
    assert processor is not None
    return processor


def picture(seed: int = 0, width: int = 24, height: int = 16) -> Image.Image:
    """Noise in colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
