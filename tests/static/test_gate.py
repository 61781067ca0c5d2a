"""The gate finds what it must find, and the package has none of it."""

from pathlib import Path

import pytest

from tests.static.gate import unpicklings, violations

ROOT = Path(__file__).parents[2]
FOLDERS = ("verl", "examples", "scripts", "benchmarks")


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_breaks_the_safety_rules(folder):
    found: list[str] = []
    for path in files(folder):
        outside = path.name == "environment.py" or folder != "verl"
        broken = violations(path.read_text(), may_read_environment=outside)
        found += [f"{path.relative_to(ROOT)}: {rule}" for rule in broken]
    assert found == []


UNPICKLED = {
    # A rank is the trainer: it runs the trainer's classes and holds its weights.
    "verl/single_controller/local/payload.py": {
        "multiprocessing.reduction.ForkingPickler",
        "ForkingPickler.loads",
    },
    "verl/single_controller/local/rank.py": {
        "payload.unpickle",
        "Payload.of(failure.cause, 'an exception').unpickle",
    },
    "verl/single_controller/local/processes.py": {"payload.unpickle"},
    "verl/single_controller/local/future.py": {"self._answer.unpickle"},
    "verl/workers/roles/generator.py": {"dist.all_gather_object"},
    "benchmarks/controller_scale.py": {"reference.answer.unpickle"},
    "benchmarks/protocol.py": {"ForkingPickler.loads", "multiprocessing.reduction.ForkingPickler"},
    # Arguments on their way from the trainer, opened in the worker; grades come back as plain data.
    "verl/workers/reward_manager/workers.py": {"Payload(call.body).unpickle"},
    # The caller's own function in a fork of the caller, instead of in the caller itself.
    "verl/utils/py_functional.py": {"context.Pipe", "receiver.recv"},
    # The trainer's tokenizer in interpreters that the trainer starts; bytes come back.
    "verl/utils/dataset/quarantine.py": {"context.Pool", "pool.imap"},
    # In this process, unless the caller asks for processes of its own.
    "verl/utils/tensor_rows.py": {"DataLoader"},
    # Only its raw bytes are read: `send_bytes`, `recv_bytes`.
    "verl/workers/rollout/process/client.py": {"multiprocessing.Pipe"},
    "benchmarks/weight_sync.py": {"multiprocessing.Pipe"},
}
"""What makes objects of bytes, and why no code of somebody else's can be among them."""


def unpicklings_of(path: Path) -> set[str]:
    return set(unpicklings(path.read_text()))


def test_only_what_is_listed_unpickles():
    found = {str(path.relative_to(ROOT)): unpicklings_of(path) for path in files(*FOLDERS)}
    assert {path: names for path, names in found.items() if names} == UNPICKLED


@pytest.mark.parametrize(
    "source",
    [
        "from multiprocessing.reduction import ForkingPickler",
        "ForkingPickler.loads(octets)",
        "multiprocessing.reduction.ForkingPickler.loads(octets)",
        "receiver.recv()",
        "self._connection.recv()",
        "multiprocessing.Pipe()",
        "multiprocessing.get_context('fork').Pipe(duplex=False)",
        "from multiprocessing import Pool",
        "context.Pool(3)",
        "pool.imap(f, rows)",
        "multiprocessing.Queue()",
        "multiprocessing.Manager()",
        "multiprocessing.get_context('spawn').SimpleQueue()",
        "from concurrent.futures import ProcessPoolExecutor",
        "concurrent.futures.ProcessPoolExecutor(2)",
        "import torch.multiprocessing as mp",
        "from torch.multiprocessing import Queue",
        "dist.all_gather_object(parts, part)",
        "torch.distributed.broadcast_object_list(parts)",
        "from torch.distributed import checkpoint",
        "import torch.distributed.rpc",
        "np.load(path, allow_pickle=flag)",
        "pd.read_pickle(path)",
        "rows.map(f, num_proc=4)",
        "io.Unpickler(file).load()",
        "_pickle.loads(octets)",
        "Payload(octets).unpickle()",
    ],
)
def test_every_way_to_unpickle_is_seen(source):
    assert list(unpicklings(source))


@pytest.mark.parametrize(
    "source",
    [
        "connection.recv(8)",
        "queue.SimpleQueue()",
        "asyncio.Queue()",
        "json.loads(text)",
        "codec.loads(message)",
        "connection.recv_bytes(100)",
        "np.load(path, allow_pickle=False)",
    ],
)
def test_what_reads_bytes_is_not_taken_for_unpickling(source):
    assert not list(unpicklings(source))


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "exec(text)",
        "import pickle",
        "from cloudpickle import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=True)",
        "yaml.load(text, Loader=yaml.Loader)",
        "subprocess.run(command, shell=True, timeout=3)",
        "os.system(command)",
        "AutoModel.from_pretrained(path, trust_remote_code=True)",
        "np.load(path, allow_pickle=True)",
        "hydra.utils.instantiate(config)",
        "sympify(answer)",
        "server.bind('0.0.0.0')",
        "ray.get(ref)",
        "ray.wait([ref])",
        "requests.get(url)",
        "subprocess.run(['ls'])",
        "thread.join()",
        "event.wait()",
        "future.result()",
        "queue.get()",
        "try:\n    f()\nexcept Exception:\n    pass",
        "try:\n    f()\nexcept:\n    x = 1",
        "try:\n    f()\nexcept Exception as error:\n    logger.warning(error)",
        "try:\n    f()\nexcept (ValueError, BaseException) as error:\n    print(error)",
        "level = os.environ['X']",
        "re.search(r'(a+)+b', text)",
        "re.compile(r'(?:\\\\s*x*)*')",
    ],
)
def test_the_gate_finds(source):
    assert list(violations(source))


@pytest.mark.parametrize(
    "source",
    [
        "model.eval()",
        "', '.join(parts)",
        "thread.join(timeout=5)",
        "event.wait(timeout_seconds)",
        "ray.get(ref, timeout=5)",
        "from_pretrained(path, trust_remote_code=config.trust_remote_code)",
        "try:\n    f()\nexcept Exception as error:\n    raise ValueError('x') from error",
        "try:\n    f()\nexcept Exception as error:\n    results.append(error)",
        "try:\n    f()\nexcept KeyError:\n    pass",
        "re.search(r'#### (\\-?[0-9\\.\\,]+)', text)",
    ],
)
def test_the_gate_lets_pass(source):
    assert not list(violations(source))
