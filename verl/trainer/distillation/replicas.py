"""Teachers in engine processes that this run starts: `teacher_models.<name>.num_replicas`.

    driver --Popen--> python -m verl.trainer.distillation.serve   (one process for each replica)
           <-"endpoint: http://127.0.0.1:port/v1"-
           ==requests of EndpointTeacher, spread over the replicas==>

They ask for a token that the driver makes and gives them in their environment.
Replicas end with the driver, however it ends. One that has died is started again before the next
step, a few times; what it was asked meanwhile is asked of the next one.
"""

import contextlib
import logging
import queue
import secrets
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from verl.config.distillation import TeacherConfig
from verl.utils import environment
from verl.utils.processes import DIE_WITH_PARENT, ending_of, reap

logger = logging.getLogger(__name__)

START_SECONDS = 600.0
END_SECONDS = 15.0
MAX_RESTARTS = 3
TAIL_LINES = 20


class Replica:
    """One process; `url` is its endpoint once `wait` has returned."""

    def __init__(self, name: str, command: Sequence[str], device: int | None, token: str) -> None:
        self.name = name
        variables = {**environment.all_variables(), "VERL_TEACHER_TOKEN": token}
        if device is not None:
            visible = variables.get("CUDA_VISIBLE_DEVICES")
            name = visible.split(",")[device] if visible else str(device)
            variables["CUDA_VISIBLE_DEVICES"] = name
        self._process = subprocess.Popen(
            [sys.executable, "-c", DIE_WITH_PARENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=variables,
        )
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._endpoint: queue.Queue[str] = queue.Queue()
        self._listener = threading.Thread(
            target=self._listen, name=f"output of {name}", daemon=True
        )
        self._listener.start()
        self.url = ""

    def _listen(self) -> None:
        """Keep the last lines; the end of the output ends the wait for the endpoint."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip())
            if line.startswith("endpoint: "):
                self._endpoint.put(line.removeprefix("endpoint: ").strip())
        self._endpoint.put("")

    def wait(self, timeout_seconds: float) -> None:
        """Until it serves; RuntimeError with its last lines if it does not."""
        with contextlib.suppress(queue.Empty):
            self.url = self._endpoint.get(timeout=timeout_seconds)
        if not self.url:
            raise RuntimeError(
                f"replica {self.name} of a teacher does not serve after at most "
                f"{timeout_seconds:g} s: {self.last_lines()}"
            )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def last_lines(self) -> str:
        return ending_of(self._process.pid, self._process.poll(), self._tail)

    def close(self) -> None:
        self._process.terminate()
        reap(self._process, END_SECONDS)
        self._listener.join(timeout=END_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


class Replicas:
    """The processes of one teacher, all started at once."""

    def __init__(
        self, name: str, teacher: TeacherConfig, device: str, devices: Sequence[int]
    ) -> None:
        """`device` is `cpu` or `cuda`; replica i of a GPU has `devices[i % len(devices)]`."""
        settings = teacher.inference
        assert teacher.model_path is not None
        options = {
            "model": teacher.model_path,
            "port": 0,
            "device": device,
            "dtype": settings.dtype if device != "cpu" else "auto",
            "max-num-seqs": settings.max_num_seqs,
            "max-num-batched-tokens": settings.max_num_batched_tokens,
        }
        if settings.max_model_len is not None:
            options["max-model-len"] = settings.max_model_len
        words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
        self._command = ["-m", "verl.trainer.distillation.serve", *words]
        self._devices = devices if device != "cpu" else ()
        self._num_restarts = 0
        self.token = secrets.token_urlsafe(24)
        self._replicas: list[Replica] = []
        try:
            for number in range(teacher.num_replicas):
                self._replicas.append(self._start(f"{name}.{number}", number))
            for replica in self._replicas:
                replica.wait(START_SECONDS)
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, number: int) -> Replica:
        device = self._devices[number % len(self._devices)] if self._devices else None
        return Replica(name, self._command, device, self.token)

    def urls(self) -> list[str]:
        """The endpoints; replicas that have died are started again first."""
        for number, replica in enumerate(self._replicas):
            if replica.is_alive:
                continue
            self._num_restarts += 1
            said = f"replica {replica.name} of a teacher has died: {replica.last_lines()}"
            if self._num_restarts > MAX_RESTARTS:
                raise RuntimeError(f"{said}\nIt was started again {MAX_RESTARTS} times")
            logger.warning("%s\nIt is started again", said)
            replica.close()
            self._replicas[number] = self._start(replica.name, number)
            self._replicas[number].wait(START_SECONDS)
        return [replica.url for replica in self._replicas]

    def close(self) -> None:
        for replica in self._replicas:
            replica.close()
