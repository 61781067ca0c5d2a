"""Pictures of squares to be counted, and a small Qwen2-VL with random weights to learn it.

    python examples/picture_task/build.py --out runs/picture_task --seed 0

A picture has 24 x 24 pixels: a grid of 3 x 3 cells, of which 1 to 4 hold a square in one of three
colours, over a noisy background. The model sees a token per cell. Beside the data there is a
control: the same rows, with every picture moved to another row, so that nothing can be learned.
"""

import argparse
import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl.models.loading import random_causal_lm

CELL, SIDE = 8, 3
COUNTS = (1, 2, 3, 4)
COLOURS = np.array([(230, 40, 40), (40, 200, 60), (50, 80, 230)])
QUESTION = "<image>How many?"
PAD, USER, ASSISTANT, END = "<pad>", "<|user|>", "<|assistant|>", "</s>"
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
SPECIAL_TOKENS = [PAD, USER, ASSISTANT, END, *VISION]
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    f"{{{{ '{USER}' if message['role'] == 'user' else '{ASSISTANT}' }}}}"
    "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}"
    "{%- for part in message['content'] -%}"
    f"{{%- if part['type'] == 'image' -%}}{''.join(VISION[:3])}"
    "{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}"
    f"{{%- if message['role'] == 'assistant' -%}}{{{{ '{END}' }}}}{{%- endif -%}}"
    "{%- endfor -%}"
    f"{{%- if add_generation_prompt -%}}{{{{ '{ASSISTANT}' }}}}{{%- endif -%}}"
)


def picture(count: int, random: np.random.Generator) -> bytes:
    """A PNG file with so many squares."""
    pixels = random.integers(180, 256, (SIDE * CELL, SIDE * CELL, 3))
    for cell in random.choice(SIDE * SIDE, count, replace=False):
        top, left = (cell // SIDE) * CELL + 1, (cell % SIDE) * CELL + 1
        size = random.integers(4, CELL - 1)
        pixels[top : top + size, left : left + size] = random.choice(COLOURS)
    file = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8)).save(file, "PNG")
    return file.getvalue()


def rows(num_rows: int, random: np.random.Generator, *, is_shuffled: bool) -> list[dict[str, Any]]:
    """Rows for reinforcement learning; with `is_shuffled` each has the picture of another."""
    counts = random.choice(COUNTS, num_rows)
    pictures = [picture(int(count), random) for count in counts]
    order = random.permutation(num_rows) if is_shuffled else np.arange(num_rows)
    return [
        {
            "data_source": "squares",
            "prompt": [{"role": "user", "content": QUESTION}],
            "images": [{"bytes": pictures[order[row]], "path": None}],
            "reward_model": {"style": "rule", "ground_truth": str(counts[row])},
            "extra_info": {"index": row},
        }
        for row in range(num_rows)
    ]


def conversation(row: dict[str, Any]) -> dict[str, Any]:
    """The same row as a demonstration."""
    answer = {"role": "assistant", "content": row["reward_model"]["ground_truth"]}
    return {"messages": [*row["prompt"], answer], "images": row["images"]}


def write_data(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, num_rows, is_shuffled in (
        ("sft", 2048, False),
        ("train", 2048, False),
        ("train_shuffled", 2048, True),
        ("test", 256, False),
        ("test_shuffled", 256, True),
    ):
        key = [seed, num_rows, sum(map(ord, name))]
        found = rows(num_rows, np.random.default_rng(key), is_shuffled=is_shuffled)
        if name == "sft":
            found = [conversation(row) for row in found]
        pq.write_table(pa.Table.from_pylist(found), folder / f"{name}.parquet")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """The special tokens, then the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        extra_special_tokens=[USER, ASSISTANT, *VISION],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def build_config(vocabulary: int) -> Qwen2VLConfig:
    ids = {token: number for number, token in enumerate(SPECIAL_TOKENS)}
    return Qwen2VLConfig(
        text_config={
            "vocab_size": vocabulary,
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 128,
            "initializer_range": 0.08,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1000.0,
                "mrope_section": [4, 4, 4],
            },
            "pad_token_id": ids[PAD],
            "bos_token_id": None,
            "eos_token_id": ids[END],
        },
        vision_config={
            "depth": 2,
            "embed_dim": 48,
            "hidden_size": 96,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": CELL // 2,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "initializer_range": 0.08,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )


def write_model(folder: Path, seed: int) -> int:
    """Write model, tokenizer and image processor; give the number of parameters."""
    tokenizer = build_tokenizer()
    model = random_causal_lm(build_config(len(tokenizer)), seed=seed)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": (SIDE * CELL) ** 2, "longest_edge": (SIDE * CELL) ** 2}
    Qwen2VLImageProcessorPil(patch_size=CELL // 2, size=size).save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the picture task.")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    num_parameters = write_model(arguments.out / "model", arguments.seed)
    write_data(arguments.out / "data", arguments.seed)
    print(f"{arguments.out}: a Qwen2-VL of {num_parameters:,} parameters, and pictures to count in")
