"""A small batch of responses, for tests of reward managers."""

import torch

from tests.tiny_tokenizer import tiny_tokenizer
from verl.protocol import DataProto


def batch(*texts, **columns) -> DataProto:
    tokenizer = tiny_tokenizer()
    ids = [tokenizer(text).input_ids for text in texts]
    width = max(map(len, ids)) + 1
    responses = torch.tensor([row + [0] * (width - len(row)) for row in ids])
    mask = torch.tensor([[1] + [1] * len(row) + [0] * (width - len(row)) for row in ids])
    return DataProto.from_dict(
        tensors={"responses": responses, "attention_mask": mask},
        non_tensors={
            "data_source": ["sums"] * len(texts),
            "reward_model": [{"ground_truth": "7"} for _ in texts],
            "extra_info": [{"index": i} for i in range(len(texts))],
            **columns,
        },
    )
