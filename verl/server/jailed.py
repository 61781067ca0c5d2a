"""Agent programs in the sandbox: the gateway is all the network they have.

    sandbox                                             | trainer
    program --> 127.0.0.1:port (program_relay) --> unix socket `calls` --> gateway
                            its reward         --> unix socket `reward` --> file

The two sockets are mounted into the sandbox, whose network namespace reaches nothing but itself. A
program sees its own files, the interpreter and the installed packages, read-only, and a scratch
folder in memory.
"""

import asyncio
import sys
import sysconfig
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl.server.program_relay import CALLS, MAX_REWARD_BYTES, REWARD, join
from verl.utils.sandbox.jail.namespaces import SCRATCH, Spec
from verl.utils.sandbox.sandbox import ENVIRONMENT, PYTHON, Limits, view_of_interpreter

RELAY = Path(__file__).with_name("program_relay.py")
REWARD_INSIDE = f"{SCRATCH}/reward.json"
MAX_CONNECTIONS = 64


@dataclass(frozen=True, kw_only=True)
class Jail:
    """What a program may use and see; `sandbox` of its entry."""

    files: tuple[str, ...] = ()
    """Files and folders that it sees, read-only, beside those that its command names."""

    memory_mb: int = 2048
    max_processes: int = 64

    @classmethod
    def of_entry(cls, entry: bool | Mapping[str, Any]) -> "Jail | None":
        """`true`, or the fields; `false` is no sandbox."""
        if isinstance(entry, bool):
            return cls() if entry else None
        unknown = set(entry) - set(cls.__dataclass_fields__)
        if unknown:
            raise ValueError(
                f"sandbox of program_agent has no field {', '.join(sorted(map(str, unknown)))}; "
                f"it knows {', '.join(cls.__dataclass_fields__)}"
            )
        values = {**entry, "files": tuple(map(str, entry.get("files") or ()))}
        for path in values["files"]:
            if not Path(path).expanduser().exists():
                raise ValueError(f"sandbox.files of program_agent names {path}, which is not there")
        jail = cls(**values)
        Limits(memory_mb=jail.memory_mb, max_processes=jail.max_processes)  # must be positive
        return jail

    def placed(self, command: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
        """The command as the inside spells it, and the mounts that this needs."""
        paths = [Path(path).expanduser().resolve() for path in self.files]
        spelled = []
        for part in command:
            path = Path(part)
            if is_interpreter(part):
                spelled.append(PYTHON)
                continue
            if not (path.is_absolute() and path.exists()):
                spelled.append(part)
                continue
            path = path.resolve()
            if not any(path.is_relative_to(known) for known in paths):
                paths.append(path)
            number, top = next((i, p) for i, p in enumerate(paths) if path.is_relative_to(p))
            spelled.append(str(Path(f"/program/{number}", path.relative_to(top.parent))))
        return spelled, [(str(top), f"/program/{i}/{top.name}") for i, top in enumerate(paths)]

    def spec(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        folder: Path,
        timeout_seconds: float,
        fds: tuple[int, int],
    ) -> Spec:
        """`folder` has the two sockets; `fds` are standard input and the supervisor's verdict."""
        port = urlsplit(environment["OPENAI_BASE_URL"]).port
        spelled, mounts = self.placed(command)
        view = view_of_interpreter(())
        scripts = [(str(RELAY), "/program/relay.py")]
        scripts += [(str(folder / "calls"), CALLS), (str(folder / "reward"), REWARD)]
        folders = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
        installed = dict.fromkeys(str(folder.resolve()) for folder in folders)
        packages = [(path, f"/packages/{i}") for i, path in enumerate(installed)]
        limits = Limits(memory_mb=self.memory_mb, max_processes=self.max_processes)
        return Spec(
            arguments=[PYTHON, "/program/relay.py", str(port), REWARD_INSIDE, *spelled],
            environment={
                **ENVIRONMENT,
                "PYTHONPATH": ":".join(inside for _, inside in packages),
                "PYTHONUNBUFFERED": "1",
                **environment,
                "VERL_REWARD_FILE": REWARD_INSIDE,
            },
            files={},
            mounts=[*view.mounts, *packages, *mounts, *scripts],
            links=view.links,
            hidden=view.hidden,
            stdin_fd=fds[0],
            status_fd=fds[1],
            timeout_seconds=timeout_seconds,
            memory_bytes=limits.memory_mb * 2**20,
            scratch_bytes=limits.scratch_mb * 2**20,
            max_processes=limits.max_processes,
            max_open_files=256,
            has_loopback=True,
        )


def is_interpreter(part: str) -> bool:
    return part in (sys.executable, "python", "python3")


@asynccontextmanager
async def sockets(folder: Path, gateway_url: str, reward_file: Path) -> AsyncIterator[None]:
    """Serve `calls`, which leads to the gateway, and `reward`, which leads to a file."""
    address = urlsplit(gateway_url)
    slots = asyncio.Semaphore(MAX_CONNECTIONS)
    joined: set[asyncio.Task[Any]] = set()

    async def call(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        joined.add(task)
        task.add_done_callback(joined.discard)
        async with slots:
            await join(
                reader, writer, *await asyncio.open_connection(address.hostname, address.port)
            )

    async def take_reward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        text = bytearray()
        while len(text) <= MAX_REWARD_BYTES and (part := await reader.read(1 << 16)):
            text += part
        await asyncio.to_thread(reward_file.write_bytes, text)
        writer.close()

    servers = [
        await asyncio.start_unix_server(call, folder / "calls"),
        await asyncio.start_unix_server(take_reward, folder / "reward"),
    ]
    for name in ("calls", "reward"):
        (folder / name).chmod(0o666)  # inside, the program is another user
    try:
        yield
    finally:
        for server in servers:
            server.close()
        for task in tuple(joined):
            task.cancel()
        await asyncio.gather(*joined, return_exceptions=True)
