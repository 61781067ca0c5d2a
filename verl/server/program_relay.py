"""Runs a program inside the sandbox: `program_relay.py PORT REWARD_FILE PROGRAM ...`

The sandbox has no network. This process listens on 127.0.0.1 and passes bytes on to a socket of the
gateway's in the file system; when the program has ended, it hands over the reward that it wrote.
It is started by its file name and imports the standard library only.
"""

import asyncio
import os
import socket
import subprocess
import sys
from contextlib import suppress

CALLS, REWARD = "/gateway/calls", "/gateway/reward"
MAX_REWARD_BYTES = 1 << 20
NOT_STARTED = 127


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            writer.write(part)
            await writer.drain()
    with suppress(ConnectionError, RuntimeError):
        writer.close()


async def join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    other_reader: asyncio.StreamReader,
    other_writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes both ways until both ends are closed."""
    await asyncio.gather(pump(reader, other_writer), pump(other_reader, writer))


async def relay(listener: socket.socket) -> None:
    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await join(reader, writer, *await asyncio.open_unix_connection(CALLS))

    server = await asyncio.start_server(connect, sock=listener)
    await server.serve_forever()


def main(port: int, reward_file: str, command: list[str]) -> int:
    with socket.create_server(("127.0.0.1", port)) as listener:
        if os.fork() == 0:
            asyncio.run(relay(listener))  # it ends with the sandbox
    try:
        program = subprocess.Popen(command)
    except OSError as error:
        sys.stderr.write(f"cannot run {command[0]!r}: {error.strerror}\n")
        return NOT_STARTED
    # The sandbox keeps the deadline.
    program.returncode = code = os.waitstatus_to_exitcode(os.waitpid(program.pid, 0)[1])
    with (
        suppress(FileNotFoundError),
        open(reward_file, "rb") as file,
        socket.socket(socket.AF_UNIX) as channel,
    ):
        channel.connect(REWARD)
        channel.sendall(file.read(MAX_REWARD_BYTES + 1))
        channel.shutdown(socket.SHUT_WR)
        channel.recv(1)  # until it has been taken
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
