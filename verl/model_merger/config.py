"""What the merger is asked to do."""

from dataclasses import dataclass
from pathlib import Path

OPERATIONS = ("merge", "test")
BACKENDS = ("fsdp", "megatron")


@dataclass(kw_only=True)
class ModelMergerConfig:
    """The options of `python -m verl.model_merger`."""

    operation: str
    """`merge` writes a model folder; `test` compares what it would write with another folder."""

    backend: str = "fsdp"

    local_dir: str
    """The `actor` or `critic` folder of a checkpoint."""

    target_dir: str | None = "tmp"
    """Where the merged model goes."""

    hf_upload_path: str | None = None
    """Repository on the Hugging Face Hub to upload the merged model to."""

    private: bool = False
    """Whether that repository is private, if it is made now."""

    test_hf_dir: str | None = None
    """Model folder to compare with."""

    hf_model_config_path: str | None = None
    """Folder with config and tokenizer; None is `huggingface` in `local_dir`."""

    tie_word_embedding: bool = False
    """The output layer is the embedding, even if the model's config does not say so."""

    trust_remote_code: bool = False
    """Allow the model's own code to be imported."""

    is_value_model: bool = False
    """The model has a head with one value per token."""

    use_cpu_initialization: bool = False
    """Accepted for older scripts; merging needs no device."""

    def __post_init__(self) -> None:
        for name, value, choices in (
            ("operation", self.operation, OPERATIONS),
            ("backend", self.backend, BACKENDS),
        ):
            if value not in choices:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(choices)}")
        if self.operation == "test" and not self.test_hf_dir:
            raise ValueError("test needs --test_hf_dir, the model folder to compare with")
        if self.operation == "merge" and not self.target_dir:
            raise ValueError("merge needs --target_dir, the folder to write")
        if not Path(self.local_dir).is_dir():
            raise ValueError(
                f"local_dir is {self.local_dir}, which is not a folder; give the actor or critic "
                "folder of a checkpoint, such as checkpoints/.../global_step_10/actor"
            )

    @property
    def description(self) -> Path:
        """The folder with the model's config and tokenizer."""
        return Path(self.hf_model_config_path or Path(self.local_dir) / "huggingface")
