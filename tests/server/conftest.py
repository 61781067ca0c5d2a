"""One model, one engine's process and one server for all tests of this folder."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.server.engines import (
    MAX_MODEL_LEN,
    MODEL,
    TOKEN,
    ScriptedRollout,
    byte_tokenizer,
    engine_process,
    save_model,
    saying,
)
from verl.server import RunningServer, ServerOptions, serve
from verl.workers.rollout.process.client import EngineProcess

OPTIONS = ServerOptions(model=MODEL, max_model_len=MAX_MODEL_LEN, token=TOKEN)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine(model_folder: Path) -> Iterator[EngineProcess]:
    engine = engine_process(model_folder)
    engine.start()
    yield engine
    engine.close()


@pytest.fixture(scope="session")
def server(engine: EngineProcess) -> Iterator[RunningServer]:
    """The built-in engine behind a server."""
    with serve([engine], byte_tokenizer(), OPTIONS) as server:
        yield server


@pytest.fixture(scope="session")
def openai() -> Any:
    """The official client, which takes seconds to import: only those who need it wait."""
    return import_module("openai")


@pytest.fixture(scope="session")
def client(server: RunningServer, openai: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=TOKEN, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def plain_server() -> Iterator[RunningServer]:
    """An engine that always says "hello"."""
    with serve([ScriptedRollout(saying("hello"))], byte_tokenizer(), OPTIONS) as server:
        yield server
