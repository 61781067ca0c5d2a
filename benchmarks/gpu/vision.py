"""Images on a device: are tokens and log-probs right, and does decoding cost what text costs?

    python -m benchmarks.gpu.vision --out vision.json [--family qwen2_vl] [--layers 8]

Builds a random model of a family, gives the built-in engine prompts with an image of random pixels
each, and writes: the largest difference between log-probs of rollout and training,
whether greedy tokens are those of an engine in plain torch, times of prefill and decoding with and
without images. It needs no processor and no pictures, only torch and transformers.
"""

import argparse
import json
import time
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel

from benchmarks.gpu.measuring import environment, write
from verl.models.fuse import fuse_model
from verl.models.loading import random_causal_lm
from verl.protocol.padded import Padding, padded_batch
from verl.protocol.trajectory import Segment, Trajectory
from verl.utils.media import Media, content_hash
from verl.workers.engine.forward import forward_rows
from verl.workers.engine.outputs import LOG_PROBS
from verl.workers.roles.dispatch import model_rows
from verl.workers.rollout.base import GenerationRequest, SamplingParams, TokenOutput
from verl.workers.rollout.native.engine import EngineLimits, NativeEngine

VOCABULARY, IMAGE, PATCH = 4096, 4000, 14
GRID = (1, 16, 24)
"""Patches in time, height and width; four are a token."""


def build(family: str, layers: int, hidden: int, dtype: torch.dtype) -> PreTrainedModel:
    heads = hidden // 64
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 4),
        "max_position_embeddings": 4096,
        "head_dim": 64,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [8, 12, 12],
        },
    }
    tower: dict[str, Any] = {"patch_size": PATCH, "depth": 4, "num_heads": 4}
    if family == "qwen2_vl":
        tower |= {"embed_dim": 256, "hidden_size": hidden, "mlp_ratio": 2}
        text.pop("head_dim")
    else:
        tower |= {"hidden_size": 256, "intermediate_size": 512, "out_hidden_size": hidden}
        if family == "qwen3_vl":
            tower |= {"num_position_embeddings": 1024, "deepstack_visual_indexes": [1, 2]}
        else:
            text.pop("head_dim")
    ids = {"image_token_id": IMAGE, "video_token_id": IMAGE + 1}
    return random_causal_lm(
        AutoConfig.for_model(family, text_config=text, vision_config=tower, **ids), dtype=dtype
    )


def prompt(seed: int, num_text: int, has_image: bool) -> tuple[list[int], tuple[Media, ...]]:
    """An image between words, or words alone of the same number of tokens."""
    draw = np.random.default_rng(seed)
    num_image = GRID[0] * GRID[1] * GRID[2] // 4
    words = draw.integers(3, IMAGE, num_text + (0 if has_image else num_image)).tolist()
    if not has_image:
        return words, ()
    pixels = draw.standard_normal((num_image * 4, 3 * 2 * PATCH * PATCH), dtype=np.float32)
    inputs = {"pixel_values": torch.from_numpy(pixels), "image_grid_thw": torch.tensor([GRID])}
    place = num_text // 2
    media = Media(
        kind="image",
        content_hash=content_hash(inputs),
        inputs=inputs,
        places=np.arange(place, place + num_image),
        grid=(GRID[0], GRID[1] // 2, GRID[2] // 2),
    )
    return [*words[:place], *[IMAGE] * num_image, *words[place:]], (media,)


def generate(
    engine: NativeEngine, prompts: list[Any], *, num_tokens: int, num_samples: int, greedy: bool
) -> list[list[TokenOutput]]:
    params = SamplingParams(
        max_tokens=num_tokens, temperature=0.0 if greedy else 1.0, seed=1, ignore_eos=True
    )
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=ids,
            params=params,
            num_samples=num_samples,
            media=media,
        )
        for number, (ids, media) in enumerate(prompts)
    ]
    return engine.generate_batch(requests)


def training_error(model: PreTrainedModel, prompts: list[Any], outputs: list[Any]) -> float:
    """Largest difference between log-probs of training and of the rollout."""
    rows = []
    for number, ((ids, media), (output, *_)) in enumerate(zip(prompts, outputs, strict=True)):
        response = Segment(
            author="model",
            token_ids=output.token_ids,
            is_trained=True,
            log_probs=output.log_probs,
            parent=0,
        )
        segments = [Segment(author="template", token_ids=ids), response]
        rows.append(Trajectory(uid=str(number), sample=0, row={}, segments=segments, media=media))
    longest = max(len(ids) for ids, _ in prompts)
    num_tokens = max(len(outputs[0][0].token_ids), 1)
    batch = padded_batch(
        rows, Padding(prompt_length=longest, response_length=num_tokens, pad_token_id=0)
    )
    with torch.no_grad():
        columns = forward_rows(
            model,
            model_rows(batch),
            device=model.device,
            temperature=1.0,
            is_value_model=False,
            prefix_sharing=True,
            outputs=LOG_PROBS,
            sequence_group=None,
        )
    difference = columns["log_probs"].float().cpu() - batch.batch["rollout_log_probs"]
    return float(difference.abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--family", default="qwen2_vl")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = build(options.family, options.layers, options.hidden, dtype).to(options.device)
    limits = EngineLimits(
        max_num_seqs=options.prompts * options.samples,
        max_prompt_tokens=256,
        max_response_tokens=options.tokens,
    )
    prompts = [prompt(seed, 64, has_image=True) for seed in range(options.prompts)]
    plain = NativeEngine(model, limits, eos_token_ids=[2])
    few = prompts[:4]
    sizes = {"num_tokens": 16, "num_samples": 1, "greedy": True}
    expected = generate(plain, few, **sizes)  # before anything is fused
    plain.close()
    fuse_model(model)
    engine = NativeEngine(model, limits, eos_token_ids=[2])
    found = generate(engine, few, **sizes)
    result: dict[str, Any] = {
        "environment": environment(options.device, 1),
        "family": options.family,
        "equal_greedy_tokens": sum(
            a == b
            for one, other in zip(expected, found, strict=True)
            for a, b in zip(one[0].token_ids, other[0].token_ids, strict=True)
        )
        / (16 * len(few)),
        "towers_run": engine.core.runner.features.num_computed,
    }
    for name, has_image in (("image", True), ("text", False)):
        some = [prompt(seed, 64, has_image=has_image) for seed in range(options.prompts)]
        shape = {"num_samples": options.samples, "greedy": False}
        generate(engine, some, num_tokens=options.tokens, **shape)  # graphs are captured
        fresh = [prompt(1000 + n, 64, has_image=has_image) for n in range(options.prompts)]
        start = time.perf_counter()
        generate(engine, fresh, num_tokens=1, **shape)
        prefill = time.perf_counter() - start
        start = time.perf_counter()
        outputs = generate(engine, fresh, num_tokens=options.tokens, **shape)
        seconds = time.perf_counter() - start
        result[f"{name}_prefill_seconds"] = round(prefill, 4)
        result[f"{name}_seconds"] = round(seconds, 4)
        result[f"{name}_tokens_per_second"] = round(
            options.prompts * options.samples * options.tokens / seconds
        )
        result[f"{name}_training_error"] = training_error(model, fresh[:8], outputs[:8])
    engine.close()
    print(json.dumps(result))
    write(options.out, result)


if __name__ == "__main__":
    main()
