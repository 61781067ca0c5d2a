"""A tiny model, sixty-four sums to learn, and the options of a run that learns them."""

import pyarrow as pa
import pyarrow.parquet as parquet

from examples.quickstart.build_model import build_tokenizer
from tests.tiny_models import tiny_config
from verl.config.load import load_config
from verl.config.sft import SFTConfig, SFTEngineConfig
from verl.models.loading import random_causal_lm
from verl.trainer.sft.trainer import SFTTrainer

SUMS = [(a, b) for a in range(8) for b in range(8)]
ROWS = [{"prompt": f"{a}+{b}", "response": str(a + b)} for a, b in SUMS]
CONVERSATIONS = [
    {
        "messages": [
            {"role": "user", "content": f"{a}+{b}"},
            {"role": "assistant", "content": str(a + b)},
        ]
    }
    for a, b in SUMS
]


def write_model(folder):
    tokenizer = build_tokenizer()
    config = tiny_config("llama", vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
    random_causal_lm(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(file, rows):
    if not file.exists():
        file.parent.mkdir(exist_ok=True)
        parquet.write_table(pa.Table.from_pylist(rows), file)
    return str(file)


def options(model_folder, folder, **changes):
    """Of `fsdp_sft_trainer`, by dotted path."""
    file = write_rows(folder / "rows.parquet", ROWS)
    return {
        "data.train_files": file,
        "data.val_files": file,
        "data.prompt_key": "prompt",
        "data.response_key": "response",
        "data.train_batch_size": 8,
        "data.micro_batch_size_per_gpu": 8,
        "data.max_length": 16,
        "model.partial_pretrain": str(model_folder),
        "optim.lr": 1e-2,
        "trainer.total_training_steps": 4,
        "trainer.n_gpus_per_node": 1,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.logger": [],
        **changes,
    }


def engine_options(model_folder, folder, **changes):
    """Of `sft_trainer` and `sft_trainer_ray`, by dotted path."""
    file = write_rows(folder / "conversations.parquet", CONVERSATIONS)
    return {
        "data.train_files": file,
        "data.val_files": file,
        "data.train_batch_size": 8,
        "data.max_token_len_per_gpu": 64,
        "data.max_length": 16,
        "model.path": str(model_folder),
        "optim.lr": 1e-2,
        "trainer.total_training_steps": 4,
        "trainer.default_local_dir": str(folder / "checkpoints"),
        "trainer.logger": [],
        **changes,
    }


def nested(values):
    tree = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        branch = tree
        for section in sections:
            branch = branch.setdefault(section, {})
        branch[name] = value
    return tree


def trainer(model_folder, folder, **changes):
    values = nested(options(model_folder, folder, **changes))
    return SFTTrainer(load_config(values, SFTConfig).checked())


def engine_trainer(model_folder, folder, **changes):
    values = nested(engine_options(model_folder, folder, **changes))
    return SFTTrainer(load_config(values, SFTEngineConfig).checked())


def weights(sft):
    return {name: p.detach().clone() for name, p in sft.engine.module.named_parameters()}


def as_arguments(values):
    """A command line; lists as Hydra writes them."""
    return [f"{key}={str(value).replace(' ', '')}" for key, value in values.items()]
