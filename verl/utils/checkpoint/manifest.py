"""What a checkpoint is: its files with sizes and hashes, and the run that it belongs to.

The manifest is the last file written into a step and the first one read. Its text has exactly one
form: what does not equal its own serialisation byte for byte was changed. The hashes protect
against damage, not against somebody who can write to the folder and recompute them.

Nothing from a step's folder is used before all of it has been verified, cheap checks first: the
manifest, then names and sizes, then the headers of tensor files, and only then every byte.

A fingerprint says which run a step belongs to, so that none continues from another's checkpoint: a
flat dictionary per section, all JSON, of the model's parameters, the files of the dataset, the
options, and what lies behind the options: weights and the user's code. `compare` says in words what
differs. Options that only steer how long a run goes on, what it reports, on how many devices it
runs and how it uses memory may change; everything else may not, unless the user accepts it.
"""

import hashlib
import importlib.util
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from functools import cache
from io import FileIO
from os import stat_result
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from huggingface_hub import try_to_load_from_cache

from verl.utils.checkpoint.layout import CheckpointCorruptError, naming
from verl.utils.checkpoint.safetensors_file import read_header

if TYPE_CHECKING:  # committing and verifying a step needs no torch
    from torch import Tensor, nn


MANIFEST = "manifest.json"
FORMAT = "verl-checkpoint"
VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20
MAX_THREADS = 8
BYTES_PER_THREAD = 64 << 20
READ_BYTES = 1 << 20

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class FileRecord:
    size: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    step: int
    files: dict[str, FileRecord]
    """By path relative to the step's folder, with forward slashes."""

    fingerprint: dict[str, Any]
    """What the run was: model, dataset, configuration (see `compare`)."""

    def to_text(self) -> str:
        body = {"format": FORMAT, "version": VERSION, **asdict(self)}
        digest = hashlib.sha256(_serialise(body).encode()).hexdigest()
        text = _serialise({**body, "self_sha256": digest})
        if len(text) > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"the manifest would have {len(text)} bytes, of which the fingerprint "
                f"{len(_serialise(self.fingerprint))}; the limit is {MAX_MANIFEST_BYTES}"
            )
        return text


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a step's folder, if it is exactly what was written."""
    path = folder / MANIFEST
    try:
        with open_plain_file(path) as file:
            octets = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        raise CheckpointCorruptError(
            folder, [f"{MANIFEST} is missing: the save never finished, or another program wrote it"]
        ) from error
    except OSError as error:
        raise CheckpointCorruptError(folder, [f"{MANIFEST}: {error.strerror}"]) from error
    if len(octets) > MAX_MANIFEST_BYTES:
        raise CheckpointCorruptError(
            folder, [f"{MANIFEST} is larger than {MAX_MANIFEST_BYTES} bytes"]
        )
    try:
        return _parse(octets)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(folder, [f"{MANIFEST} cannot be used: {error}"]) from error


def walk(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below `folder` that is not a folder, by relative path; links are not followed."""
    pending = [""]
    while pending:
        prefix = pending.pop()
        with os.scandir(folder / prefix) as entries:
            for entry in sorted(entries, key=lambda entry: entry.name):
                name = f"{prefix}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    pending.append(f"{name}/")
                else:
                    yield name, entry.stat(follow_symlinks=False)


def record_file(path: Path, *, sync: bool = False) -> FileRecord:
    """Size and hash of a file, after its contents reached the disk if `sync`."""
    with naming(path), open_plain_file(path) as file:
        if sync:
            os.fsync(file.fileno())
        digest, size = hashlib.sha256(), 0
        buffer = memoryview(bytearray(READ_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            size += count
    return FileRecord(size=size, sha256=digest.hexdigest())


def in_threads(
    work: Callable[[Item], Result], items: Iterable[Item], num_bytes: int
) -> list[Result]:
    """Hashing and reading leave Python's lock, so many bytes are hashed in several threads."""
    num_threads = min(MAX_THREADS, num_bytes // BYTES_PER_THREAD)
    if num_threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(work, items))


def open_plain_file(path: Path) -> FileIO:
    """Open for reading, but no link and nothing that would block or answer."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    file = FileIO(descriptor, "rb")
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        file.close()
        raise OSError(0, "not a plain file", str(path))
    return file


def is_safe_name(name: str) -> bool:
    """Whether a path stays inside the folder it is relative to, on every system."""
    parts = name.split("/")
    return (
        not any(part in ("", ".", "..") for part in parts)
        and not PurePosixPath(name).is_absolute()
        and not any(symbol in name for symbol in "\\:\0")
    )


def _parse(octets: bytes) -> Manifest:
    text = octets.decode()
    content = json.loads(text, parse_constant=_refuse_constant)
    if (content["format"], content["version"]) != (FORMAT, VERSION):
        raise ValueError(f"format {content['format']!r} version {content['version']!r}")
    files = {name: FileRecord(**record) for name, record in content["files"].items()}
    manifest = Manifest(step=content["step"], files=files, fingerprint=content["fingerprint"])
    if manifest.to_text() != text:
        raise ValueError("it does not agree with its own hash")
    if type(manifest.step) is not int or type(manifest.fingerprint) is not dict:
        raise ValueError("its step is not a number, or its fingerprint not a dictionary")
    for name, record in files.items():
        if not is_safe_name(name):
            raise ValueError(f"it names {name!r}, which is not a path inside the folder")
        if type(record.size) is not int or type(record.sha256) is not str:
            raise ValueError(f"size and hash of {name!r} are {record.size!r}, {record.sha256!r}")
    return manifest


def _serialise(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=1, sort_keys=True, allow_nan=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


PICKLE_SUFFIXES = {".bin", ".ckpt", ".pickle", ".pkl", ".pt", ".pth"}
MAX_PROBLEMS = 8


def verify_step(folder: str | Path, *, step: int | None = None) -> Manifest:
    """The manifest of `folder`, after each of its bytes was compared with it.

    Raises `CheckpointCorruptError` that names each file which is missing, foreign, cut short or
    changed. With `step` the folder must also be of that step.
    """
    folder = Path(folder)
    manifest = verify_listing(folder, step=step)
    files = manifest.files
    num_bytes = sum(record.size for record in files.values())
    _raise_if_any(
        folder, in_threads(lambda item: _content_problem(folder, *item), files.items(), num_bytes)
    )
    return manifest


def verify_listing(folder: Path, *, step: int | None = None) -> Manifest:
    """Everything but the bytes: manifest, names, kinds, sizes, headers."""
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointCorruptError(folder, ["not a folder (a link is not followed)"])
    manifest = read_manifest(folder)
    if step is not None and manifest.step != step:
        raise CheckpointCorruptError(folder, [f"{MANIFEST} says it is step {manifest.step}"])
    try:
        found = dict(walk(folder))
    except OSError as error:
        raise CheckpointCorruptError(folder, [f"cannot be listed: {error}"]) from error
    found.pop(MANIFEST)
    _raise_if_any(folder, list(_listing_problems(manifest.files, found)))
    _raise_if_any(folder, [_header_problem(folder, name) for name in manifest.files])
    return manifest


def _listing_problems(
    expected: dict[str, FileRecord], found: dict[str, stat_result]
) -> Iterator[str]:
    for name in sorted(expected.keys() - found.keys()):
        yield f"{name} is missing"
    for name in sorted(found.keys() - expected.keys()):
        yield f"{name} is not in the manifest"
    for name in sorted(expected.keys() & found.keys()):
        size = found[name].st_size
        if not stat.S_ISREG(found[name].st_mode):
            yield f"{name} is a link or a device, not a plain file"
        elif size != expected[name].size:
            yield f"{name} has {size} bytes instead of {expected[name].size}"
        elif Path(name).suffix in PICKLE_SUFFIXES:
            yield f"{name} is of a kind that can hold code; a checkpoint has only data"


def _header_problem(folder: Path, name: str) -> str | None:
    if not name.endswith(".safetensors"):
        return None
    try:
        read_header(folder / name)
    except CheckpointCorruptError as error:
        return f"{name}: {'; '.join(error.problems)}"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None


def _content_problem(folder: Path, name: str, expected: FileRecord) -> str | None:
    try:
        found = record_file(folder / name)
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    return None if found == expected else f"{name} was changed: its hash is not the manifest's"


def _raise_if_any(folder: Path, problems: list[str | None] | list[str]) -> None:
    real = [problem for problem in problems if problem is not None]
    if len(real) > MAX_PROBLEMS:
        real = [*real[:MAX_PROBLEMS], f"and {len(real) - MAX_PROBLEMS} more"]
    if real:
        raise CheckpointCorruptError(folder, real)


MAY_CHANGE = (
    "trainer.total_epochs", "trainer.total_training_steps", "*.total_training_steps",
    "trainer.project_name", "trainer.experiment_name", "trainer.logger", "trainer.wandb_proxy",
    "trainer.log_val_generations", "trainer.save_freq", "trainer.test_freq", "trainer.val_*",
    "trainer.rollout_data_dir", "trainer.validation_data_dir", "trainer.resume_*",
    "trainer.default_*_dir", "trainer.*ckpt*", "trainer.esi_redundant_time", "trainer.dry_run",
    "trainer.max_restarts", "trainer.journal_*", "trainer.board*",
    "trainer.controller", "trainer.use_legacy_worker_impl", "trainer.*timeout*",
    "trainer.prometheus.*", "trainer.profile*",
    "data.train_files", "data.val_*", "data.validation_shuffle", "data.*_workers",
    "checkpoint.*", "*.checkpoint.*", "profiler.*", "*.profiler.*", "global_profiler.*",
    "*.trace.*", "*.prometheus.*", "*.val_kwargs.*", "*._target_", "*.checkpoint_engine.*",
    "ray_kwargs.*", "transfer_queue.*",
    "*micro_batch_size*", "*max_token_len*", "*use_dynamic_bsz", "*gpu_memory_utilization",
    "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.balance_batch",
    "resource_pool", "resource_pool.*",
    "*.n_gpus_per_node", "*.nnodes", "*.enable_resource_pool", "*.hybrid_engine", "*.nccl_timeout",
    "*.fsdp_size", "*.sharding", "*.reshard_after_forward", "*.forward_prefetch",
    "*.wrap_policy.*", "*offload*", "*ulysses_sequence_parallel_size",
    "*tensor_model_parallel_size",
)  # fmt: skip
MAX_DIFFERENCES = 20
SAMPLE_BYTES = 8 << 20
NUM_BLOCKS, BLOCK_BYTES = 64, 1 << 16
"""What is hashed of a large file of weights beside its ends."""

MODEL_FILES = ("*.safetensors", "*.bin", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt")
MODEL_KEYS = (
    "*model.path", "*model.partial_pretrain", "*tokenizer*", "*.lora_adapter_path",
    "*.hf_config_path",
)  # fmt: skip
CODE_SUFFIXES = {".py", ".yaml", ".yml", ".json", ".jinja"}
MODULE_KEYS = ("*.external_lib", "*.agent_loop_manager_class")
NEW_SECTIONS = {"weights", "code", "graders"}
"""Steps that were saved before these existed are not asked for them."""


def fingerprint(
    *,
    model: Mapping[str, Any] | None = None,
    data: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Put the parts that apply together; each from the function of its name below.

    With `config` come the sections `weights` and `code`: the files that its options name.
    """
    parts = {"model": model, "data": data, "config": config}
    if config is not None:
        parts |= {"weights": weights_identity(config), "code": code_identity(config)}
    return {name: dict(part) for name, part in parts.items() if part is not None}


def model_identity(model: "nn.Module") -> dict[str, str]:
    """Dtype and shape of every parameter; tied ones once."""
    return {
        "class": type(model).__name__,
        **{name: describe(parameter) for name, parameter in model.named_parameters()},
    }


def describe(tensor: "Tensor | None") -> str:
    """Dtype and shape in words, as in `bfloat16[32, 48]`."""
    if tensor is None:
        return "missing"
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def dataset_identity(
    files: Sequence[str | Path], *, num_rows: int | None = None, digest: str | None = None
) -> dict[str, Any]:
    """Name, size and hash of every file, in order; or a digest for data that is not in files.

    A large file is hashed at its two ends only. `num_rows` is what was left after filtering.
    """
    identity: dict[str, Any] = {
        f"file {number}": _file_identity(Path(file)) for number, file in enumerate(files)
    }
    extras = {"rows": num_rows, "digest": digest}
    return identity | {key: value for key, value in extras.items() if value is not None}


def config_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every option by its dotted path. Give the plain dictionary: reading a typed configuration
    here would make every option count as used."""
    return dict(_flatten(config, ""))


def weights_identity(config: Mapping[str, Any]) -> dict[str, str]:
    """The files of each model folder that an option of `config_identity` names, by option and file;
    for a model of the Hugging Face hub its revision in the local cache."""
    identity: dict[str, str] = {}
    seen: set[str] = set()
    for key, name in _named(config):
        if name in seen or not _matches(key, MODEL_KEYS):  # one model may have several roles
            continue
        seen.add(name)
        folder = Path(name).expanduser()
        if folder.is_dir():
            files = {file for pattern in MODEL_FILES for file in folder.glob(pattern)}
            for file in sorted(file for file in files if file.is_file()):
                identity[f"{key}/{file.name}"] = _file_identity(file, NUM_BLOCKS)
        elif not folder.exists() and "://" not in name:
            revision = _hub_revision(name)
            identity |= {} if revision is None else {key: f"revision {revision}"}
    return identity


def code_identity(config: Mapping[str, Any]) -> dict[str, str]:
    """Size and hash of each file of code or settings that an option of `config_identity` names, and
    of the modules that are named in such a file."""
    identity: dict[str, str] = {}
    for key, name in _named(config):
        file = Path(name.removeprefix("file://")).expanduser()
        if name.startswith("pkg://"):
            file = _module_file(name.removeprefix("pkg://"))
        elif _matches(key, MODULE_KEYS):
            file = _module_file(name) or _module_file(name.rpartition(".")[0])
        if file is None or file.suffix not in CODE_SUFFIXES or not file.is_file():
            continue
        identity[key] = _file_identity(file)
        if file.suffix in (".yaml", ".yml"):
            text = file.read_text(errors="replace")
            for target in re.findall(r"_target_:\s*[\"']?([\w.]+)", text):
                module = _module_file(target.rpartition(".")[0])
                if module is not None and not target.startswith("verl."):
                    identity[f"{key}/{target}"] = _file_identity(module)
    return identity


def _named(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each text in an option that may not change, also in lists."""
    for key, value in config.items():
        if not _matches(key, MAY_CHANGE):
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str) and 0 < len(text) < 4096 and "\n" not in text:
                    yield key, text


@cache
def _matches(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)


def _module_file(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name) if name else None
    except (ImportError, ValueError):
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)


def _hub_revision(name: str) -> str | None:
    """The commit of a hub's model in the local cache; None if it is not there."""
    try:
        file = try_to_load_from_cache(name, "config.json")
    except ValueError:  # not a name that a model can have
        return None
    return Path(file).parent.name if isinstance(file, str) else None


def compare(
    old: Mapping[str, Mapping[str, Any]],
    new: Mapping[str, Mapping[str, Any]],
    *,
    may_change: Sequence[str] = MAY_CHANGE,
    accepted: Sequence[str] = (),
) -> list[str]:
    """A sentence per difference that forbids to continue; empty when it is the same run.

    `may_change` are patterns of options, `accepted` patterns of keys of all sections, or sections.
    """
    old, new = json.loads(json.dumps(old)), json.loads(json.dumps(new))
    differences: list[str] = []
    for section in sorted(old.keys() | new.keys()):
        if _matches(section, tuple(accepted)) or section in NEW_SECTIONS - old.keys():
            continue
        allowed = (*(may_change if section == "config" else ()), *accepted)
        found = list(_compare_section(section, old.get(section, {}), new.get(section, {}), allowed))
        differences += found[:MAX_DIFFERENCES]
        if len(found) > MAX_DIFFERENCES:
            differences.append(f"{section}: and {len(found) - MAX_DIFFERENCES} more differences")
    return differences


def _compare_section(
    section: str, old: Mapping[str, Any], new: Mapping[str, Any], may_change: tuple[str, ...]
) -> Iterator[str]:
    for key in sorted(old.keys() | new.keys()):
        if _matches(key, may_change):
            continue
        if key not in new:
            yield f"{section}: {key} was {old[key]!r} and is gone"
        elif key not in old:
            yield f"{section}: {key} is new: {new[key]!r}"
        elif old[key] != new[key]:
            yield f"{section}: {key} was {old[key]!r} and is {new[key]!r}"


def _file_identity(path: Path, num_blocks: int = 0) -> str:
    """A large file is hashed at its two ends and in blocks at equal distances between them."""
    size = path.stat().st_size
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        digest.update(file.read(SAMPLE_BYTES))
        if size > 2 * SAMPLE_BYTES:
            for block in range(num_blocks):
                file.seek(SAMPLE_BYTES + (size - 2 * SAMPLE_BYTES) * block // num_blocks)
                digest.update(file.read(BLOCK_BYTES))
            file.seek(-SAMPLE_BYTES, 2)
        digest.update(file.read(SAMPLE_BYTES))
    return f"{path.name}, {size} bytes, sha256 {digest.hexdigest()[:32]}"


def _flatten(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _as_json(value)


def _as_json(value: Any) -> Any:
    """The value itself where JSON has it, else its text."""
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        return repr(value)
