"""From a configuration to a server that answers, and to its orderly end.

engines (processes) <-- server (thread) <-- clients, or the rows of a file
                              ^
main thread: waits for a signal, or sends the rows; then ends the server, then the engines
"""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from verl.config.faults import ConfigError, Fault
from verl.config.ppo import PPOConfig
from verl.server import RunningServer, ServerOptions, serve
from verl.tools.parsers import tool_parsers
from verl.trainer.generation.engines import start_processes
from verl.trainer.serving.answers import RowClient, answer_rows, prompt_ids, write
from verl.utils.dataset.prompts import set_chat_template
from verl.utils.device import resolve_device
from verl.utils.environment import WentWrong
from verl.utils.fs import copy_to_local
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
