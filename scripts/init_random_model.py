"""Write a model of random weights: the shape of one model, changed by a config of your own.

python scripts/init_random_model.py --hf_model_path M --new_config_path new.json --output_path OUT

`new.json` has the values that replace those of the model's `config.json`, such as fewer layers.
The tokenizer is the model's. A small copy of a large model tries a layout before the large one.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from verl.models.loading import random_causal_lm, read_config


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hf_model_path", required=True)
    parser.add_argument("--new_config_path", required=True)
    parser.add_argument("--output_path", required=True)
    parser.add_argument("--trust_remote_code", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    changes = json.loads(Path(options.new_config_path).read_text())
    known = {"model_type", "architectures", "transformers_version", "torch_dtype", "dtype"}
    changes = {key: value for key, value in changes.items() if key not in known}
    config = read_config(options.hf_model_path, changes, options.trust_remote_code)
    model = random_causal_lm(config, seed=options.seed).bfloat16()
    model.save_pretrained(options.output_path)
    tokenizer = AutoTokenizer.from_pretrained(
        options.hf_model_path, trust_remote_code=options.trust_remote_code
    )
    tokenizer.save_pretrained(options.output_path)
    print(f"wrote {sum(p.numel() for p in model.parameters()):,} weights to {options.output_path}")


if __name__ == "__main__":
    main()
