"""Tokenizers and multi-modal processors from Hugging Face, made ready for batches.

Batches need a pad token, which many models lack; whatever is changed here is logged.
"""

import logging
import shutil
from os import PathLike
from pathlib import Path
from typing import Any, TypeGuard

import transformers
from transformers import (
    AutoProcessor,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    ProcessorMixin,
)
from transformers.models.auto.processing_auto import (
    PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
)
from transformers.utils.hub import cached_file, has_file

from verl.utils.import_utils import is_available
from verl.utils.template_probe import check_chat_template
from verl.utils.user_files import read_json_object

logger = logging.getLogger(__name__)

__path__: list[str] = []
"""`continuous_token` is imported as if it were below (`verl.utils.old_paths`)."""

UNTIDY = "a . b ? c ! d , e ' f n't g 'm h 's i 've j 're"
"""Text from which a clean-up takes spaces."""

_GEMMA2_TURN_END = "<end_of_turn>"
_PROCESSOR_FILES = (
    "processor_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
)


def hf_tokenizer(
    name_or_path: str | PathLike[str],
    correct_pad_token: bool = True,
    correct_gemma2: bool = True,
    **kwargs: Any,
) -> PreTrainedTokenizerBase:
    """`AutoTokenizer.from_pretrained`, with a pad token and a chat template that can be rendered.

    Gemma 2's chat models end their turn with a token that is not their end-of-sequence token;
    `correct_gemma2` makes it so, or generation would not stop there.
    """
    refuse_broken_files(name_or_path)
    if correct_gemma2 and _is_gemma2_chat(name_or_path):
        logger.warning("%s: the end-of-sequence token is set to %s", name_or_path, _GEMMA2_TURN_END)
        kwargs["eos_token"] = _GEMMA2_TURN_END
    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **kwargs)
    if tokenizer.chat_template is not None:
        check_chat_template(tokenizer.chat_template, str(name_or_path))
    if correct_pad_token:
        set_pad_token_id(tokenizer)
    return tokenizer


def refuse_broken_files(name_or_path: str | PathLike[str]) -> None:
    """Of a local folder: transformers does not name the file that it cannot read."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"):
        file = Path(name_or_path).expanduser() / name
        if file.exists():
            read_json_object(file)


def set_pad_token_id(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let the end-of-sequence token pad too, where there is no pad token; the change is logged.

    Masks are therefore never derived from `ids == pad_token_id`: that would drop real ends.
    """
    if tokenizer.pad_token_id is not None:
        return
    if tokenizer.eos_token is None:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has neither a pad nor an end-of-sequence "
            "token; pass pad_token=... to hf_tokenizer"
        )
    tokenizer.pad_token = tokenizer.eos_token
    logger.warning(
        "%s has no pad token; %r (id %s) is used", tokenizer.name_or_path, tokenizer.eos_token,
        tokenizer.eos_token_id,
    )  # fmt: skip


def has_processor(name_or_path: str | PathLike[str]) -> bool:
    """Whether a model comes with files for images or video."""
    return any(has_file(name_or_path, file) for file in _PROCESSOR_FILES)


def hf_processor(name_or_path: str | PathLike[str], **kwargs: Any) -> ProcessorMixin | None:
    """The processor for images and video, or None for a model that has only text."""
    if not has_processor(name_or_path):
        return None
    described, _ = PretrainedConfig.get_config_dict(name_or_path)
    name = PROCESSOR_MAPPING_NAMES.get(described.get("model_type", ""))
    if name is not None and not is_available("torchvision"):
        kind: type[ProcessorMixin] = getattr(transformers, name)
        if "video_processor" in kind.get_attributes():
            logger.info("%s: images only, because videos need torchvision", name_or_path)
            return _images_only(kind).from_pretrained(name_or_path, **kwargs)
    processor = AutoProcessor.from_pretrained(name_or_path, **kwargs)
    return processor if isinstance(processor, ProcessorMixin) else None


class WithProcessorFiles:
    """Saves a tokenizer and, as they are, the files of the processor that its model came with."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, name_or_path: str | PathLike[str]
    ) -> None:
        self.tokenizer = tokenizer
        self.name_or_path = name_or_path

    def save_pretrained(self, save_directory: str, /) -> None:
        self.tokenizer.save_pretrained(save_directory)
        for file in _PROCESSOR_FILES:
            if has_file(self.name_or_path, file):
                source = cached_file(str(self.name_or_path), file)
                assert source is not None, "has_file found it"
                shutil.copyfile(source, Path(save_directory, file))


def _images_only(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """The same processor without its part for videos, which needs torchvision."""

    def initialize(
        self: Any, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None
    ) -> None:
        kind.__init__(self, image_processor, tokenizer, None, chat_template=chat_template)

    return type(kind.__name__, (kind,), {"__init__": initialize})


def _is_gemma2_chat(name_or_path: str | PathLike[str]) -> bool:
    name = str(name_or_path).rstrip("/").rpartition("/")[2].lower()
    return name.startswith("gemma-2-") and name.endswith("-it")


def decode_texts(tokenizer: PreTrainedTokenizerBase, sequences: list[list[int]]) -> list[str]:
    """`tokenizer.batch_decode` without special tokens.

    Where the tokenizers library does all of the work it decodes on all cores and without Python's
    lock, so that an engine on another thread goes on.
    """
    if _decodes_as_others(tokenizer) and not tokenizer.clean_up_tokenization_spaces:
        return tokenizer.backend_tokenizer.decode_batch(sequences, skip_special_tokens=True)
    return tokenizer.batch_decode(sequences, skip_special_tokens=True)


def backend_json(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """What `tokenizers.Tokenizer.from_str` makes a tokenizer of that decodes to the same texts.

    None where there is no such thing: Python code of its own decodes, or cleans up spaces. Whether
    those are cleaned depends on more than the option of that name, so it is tried.
    """
    if not _decodes_as_others(tokenizer):
        return None
    backend = tokenizer.backend_tokenizer
    if tokenizer.clean_up_tokenization_spaces:
        ids = tokenizer.encode(UNTIDY, add_special_tokens=False)
        if tokenizer.decode(ids) != backend.decode(ids, skip_special_tokens=False):
            return None
    return backend.to_str()


def _decodes_as_others(tokenizer: PreTrainedTokenizerBase) -> TypeGuard[PreTrainedTokenizerFast]:
    """Whether it is based on the tokenizers library and no class of its own overrides decoding."""
    kind = type(tokenizer)
    return (
        isinstance(tokenizer, PreTrainedTokenizerFast)
        and kind._decode is PreTrainedTokenizerFast._decode
        and kind.decode is PreTrainedTokenizerBase.decode
        and kind.batch_decode is PreTrainedTokenizerBase.batch_decode
    )
