"""From a configuration to a server that answers, and to its orderly end.

engines (processes) <-- server (thread) <-- clients, or the rows of a file
                              ^
main thread: waits for a signal, or sends the rows; then ends the server, then the engines

The prompts of a file travel as token ids, so the server sees what training would see. Each row has
a seed of its own: the same file, model and options give the same responses, however many rows are
under way.
"""

import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from verl.config.faults import ConfigError, Fault
from verl.config.ppo import PPOConfig
from verl.server import RunningServer, ServerOptions, serve
from verl.tools.parsers import tool_parsers
from verl.trainer.generation.engines import start_processes
from verl.trainer.generation.output import publish
from verl.utils.dataset.prompt_encoder import PromptEncoder
from verl.utils.dataset.prompts import as_prompt, set_chat_template
from verl.utils.dataset.tables import DataError, open_table
from verl.utils.device import resolve_device
from verl.utils.environment import WentWrong
from verl.utils.fs import copy_to_local
from verl.utils.http_json import RequestFailed, post_json
from verl.utils.import_utils import import_external_libs
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.workers.rollout.process.client import EngineProcess, EngineStartError

LOOK_SECONDS = 1.0


class ServingFailed(WentWrong, RuntimeError):
    """No engine could be started, or the server ended by itself."""


def serve_model(config: PPOConfig, *, is_dtype_chosen: bool) -> None:
    """Serve until a signal comes, or until the file of responses is written."""
    model = config.actor_rollout_ref.model
    import_external_libs(model.external_lib)
    path = copy_to_local(model.path, use_shm=model.use_shm)
    try:
        tokenizer = hf_tokenizer(path, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError) as error:
        text = (
            f"actor_rollout_ref.model.path is {model.path!r}, where no tokenizer is found; name a "
            f"folder that has one. {error}"
        )
        raise ConfigError([Fault(text, ("actor_rollout_ref.model.path",))]) from error
    set_chat_template(tokenizer, config.data.chat_template)
    check_call_format(config.actor_rollout_ref.rollout.multi_turn.format)
    output = config.data.output_path
    prompts = [] if output is None else prompt_ids(config, tokenizer)  # before anything starts
    asked_to_end = threading.Event()
    with (
        ending_on_signals(asked_to_end),
        running_engines(config, path, is_dtype_chosen) as engines,
        started_server(config, engines, tokenizer, path) as server,
    ):
        say_where(server)
        if output is None:
            wait_until_asked(server, asked_to_end)
        else:
            responses = answer_rows(RowClient(server, config, asked_to_end), prompts)
            write(config, Path(output).expanduser(), responses)


def check_call_format(name: str) -> None:
    """Before engines start: parsers may be registered by `model.external_lib`."""
    try:
        tool_parsers[name]
    except ValueError as error:
        key = "actor_rollout_ref.rollout.multi_turn.format"
        raise ConfigError([Fault(str(error), (key,))]) from error


@contextmanager
def running_engines(
    config: PPOConfig, model_path: str, is_dtype_chosen: bool
) -> Iterator[list[EngineProcess]]:
    """One process for each share of the devices."""
    with ExitStack() as closing:
        engines = started_engines(config, model_path, is_dtype_chosen)
        for engine in engines:
            closing.callback(engine.close)
        yield engines


def started_engines(
    config: PPOConfig, model_path: str, is_dtype_chosen: bool
) -> list[EngineProcess]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    try:
        return start_processes(
            rollout,
            model_path,
            count=trainer.n_gpus_per_node // rollout.tensor_model_parallel_size,
            device=resolve_device(trainer.device),
            dtype=rollout.dtype if is_dtype_chosen else "auto",
            trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        )
    except ConfigError:
        raise
    except ValueError as refused:  # by the engine or the device, in words for users
        key = "actor_rollout_ref.rollout.name"
        raise ConfigError([Fault(str(refused), (key,))]) from refused
    except EngineStartError as error:
        raise ServingFailed(f"an engine does not start: {error}") from error


def started_server(
    config: PPOConfig, engines: list[EngineProcess], tokenizer: PreTrainedTokenizerBase, path: str
) -> RunningServer:
    trusts = config.actor_rollout_ref.model.trust_remote_code
    processor = hf_processor(path, trust_remote_code=trusts)
    try:
        return serve(engines, tokenizer, server_options(config, engines), processor)
    except ValueError as refused:  # an address that is taken, say
        key = "actor_rollout_ref.rollout.server"
        raise ConfigError([Fault(str(refused), (f"{key}.host", f"{key}.port"))]) from refused


def server_options(config: PPOConfig, engines: list[EngineProcess]) -> ServerOptions:
    rollout = config.actor_rollout_ref.rollout
    return ServerOptions(
        model=Path(config.actor_rollout_ref.model.path).name,
        max_model_len=min(engine.facts.max_model_len for engine in engines),
        host=rollout.server.host,
        port=rollout.server.port,
        tool_call_parser=rollout.multi_turn.format,
        allowed_local_media_path=rollout.server.allowed_local_media_path,
        max_images=16 if rollout.limit_images is None else rollout.limit_images,
        max_running=rollout.max_num_seqs * len(engines),
        max_connections=max(rollout.server.max_connections, 2),
    )


@contextmanager
def ending_on_signals(asked_to_end: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the program in order; a second one ends it at once."""

    def ask(number: int, frame: object) -> None:
        if asked_to_end.is_set():
            raise KeyboardInterrupt
        asked_to_end.set()

    before = {one: signal.signal(one, ask) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def say_where(server: RunningServer) -> None:
    """A token that was made here is shown this one time: on the terminal, in no log."""
    options, where = server.service.options, server.where()
    lines = [
        f"serving {options.model} at {where.pop('API')} (longest prompt plus response: "
        f"{options.max_model_len} tokens)",
        *(f"{name}: {value}" for name, value in where.items()),
    ]
    if not options.is_loopback:
        lines.append("this address may be reachable from other machines, and nothing is encrypted")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    sys.stdout.flush()


def wait_until_asked(server: RunningServer, asked_to_end: threading.Event) -> None:
    while not asked_to_end.wait(LOOK_SECONDS):
        if server.wait(0.0):
            raise ServingFailed("the server ended by itself; its log says why")


# ---- the rows of a file --------------------------------------------------------------------------

COLUMN = "responses"
MAX_UNDER_WAY = 64
TRY_AGAIN = (429, 502, 503)
MAX_ANSWER_BYTES = 1 << 28


class RowFailed(WentWrong, RuntimeError):
    """A row got no responses, though it was sent again and again."""


class Stopped(WentWrong, RuntimeError):
    """The program was told to end before all rows were answered."""


def prompt_ids(config: PPOConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """The ids of every row's prompt; the first row that has none is named."""
    encoder = PromptEncoder(tokenizer, None, config.data)
    table = open_table(config.data.train_files, cache_dir=config.data.cache_dir)
    if not len(table):
        raise DataError(f"data.train_files ({config.data.train_files}) has no rows")
    found = []
    for number in range(len(table)):
        row = table[number]
        if row.get(config.data.prompt_key) is None:
            location, key = table.location(number), config.data.prompt_key
            raise DataError(f"{location} has no prompt in the column {key!r} (data.prompt_key)")
        prompt = as_prompt(row[config.data.prompt_key], tokenizer)
        fault = encoder.fault(prompt) if config.data.truncation == "error" else None
        if fault is not None:
            raise DataError(f"{table.location(number)}: {fault}") from fault
        found.append(encoder.ids(prompt))
    return found


class RowClient:
    """Sends one row after another, from several threads."""

    def __init__(
        self, server: RunningServer, config: PPOConfig, asked_to_end: threading.Event
    ) -> None:
        self._server = server
        self._rollout = config.actor_rollout_ref.rollout
        self._first_seed = config.data.seed or 0
        self._asked_to_end = asked_to_end

    def answer(self, row: int, prompt: Sequence[int]) -> list[str]:
        """The responses to one row."""
        options = self._rollout.server
        trouble = ""
        for _ in range(options.max_attempts):
            if self._asked_to_end.is_set():
                raise Stopped("told to end; no file has been written")
            try:
                answer = post_json(
                    f"{self._server.url}/v1/completions",
                    self._body(row, prompt),
                    timeout_seconds=options.timeout,
                    max_response_bytes=MAX_ANSWER_BYTES,
                    token=self._server.token,
                )
                return [choice["text"] for choice in answer["choices"]]
            except RequestFailed as error:
                trouble = str(error)
                if error.status is not None and error.status not in TRY_AGAIN:
                    break
            self._asked_to_end.wait(options.retry_delay)
        raise RowFailed(
            f"row {row} got no response: {trouble}; rollout.server.timeout ({options.timeout:g} "
            f"seconds) and rollout.server.max_attempts ({options.max_attempts}) say how patient "
            "the program is"
        )

    def _body(self, row: int, prompt: Sequence[int]) -> dict[str, Any]:
        rollout = self._rollout
        return {
            "model": self._server.service.options.model,
            "prompt": list(prompt),
            "n": rollout.n,
            "max_tokens": rollout.response_length,
            "temperature": rollout.temperature if rollout.do_sample else 0.0,
            "top_p": rollout.top_p,
            "top_k": rollout.top_k,
            "repetition_penalty": rollout.repetition_penalty,
            "ignore_eos": rollout.ignore_eos,
            "seed": self._first_seed + row,
        }


def answer_rows(client: RowClient, prompts: Sequence[Sequence[int]]) -> list[list[str]]:
    """The responses to all rows, in their order; the first row that fails ends it."""
    with ThreadPoolExecutor(min(MAX_UNDER_WAY, len(prompts))) as pool:
        answers = pool.map(client.answer, range(len(prompts)), prompts)
        return list(tqdm(answers, total=len(prompts), desc="prompts"))


def write(config: PPOConfig, output: Path, responses: Sequence[list[str]]) -> None:
    """All rows with their responses; the file appears when it is whole."""
    table = pa.concat_tables(list(source_tables(config)), promote_options="default")
    if COLUMN in table.column_names:
        table = table.drop_columns([COLUMN])
    table = table.append_column(COLUMN, pa.array(responses, type=pa.list_(pa.string())))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.partial")
    try:
        pq.write_table(table, partial)
        publish(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def source_tables(config: PPOConfig) -> Iterator[pa.Table]:
    data = config.data
    for file in open_table(data.train_files, cache_dir=data.cache_dir).files:
        yield pq.read_table(file.path)
