"""Checkpoints of any number of ranks into one folder that `from_pretrained` loads.

python -m verl.model_merger merge --backend fsdp --local_dir .../actor --target_dir merged
python -m verl.model_merger test --backend fsdp --local_dir .../actor --test_hf_dir reference
"""

from verl.model_merger.config import ModelMergerConfig
from verl.model_merger.merger import FSDPModelMerger, MegatronModelMerger

__all__ = ["FSDPModelMerger", "MegatronModelMerger", "ModelMergerConfig"]
