"""Runs a program and ends everything that it leaves behind: `python supervisor.py program args...`

It is started by its file name, imports the standard library only, and adopts what its descendants
orphan. It ends them all when the program ends, when it gets SIGTERM, and when the process that
started it is gone. Its exit status is the program's; 128 + n stands for signal n.
"""

import importlib.util
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

NOT_STARTED = 127
"""The exit status where there is no such program."""


def load_processes() -> Any:
    path = Path(__file__).parent.parent / "utils" / "processes.py"
    spec = importlib.util.spec_from_file_location("processes", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["processes"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def main(command: list[str]) -> int:
    processes = load_processes()
    started_by = os.getppid()
    processes.die_with_parent(signal.SIGTERM)
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer, which ends us
    try:
        if os.getppid() != started_by:
            return 128 + signal.SIGTERM
        try:
            program = subprocess.Popen(command)
        except OSError as error:
            sys.stderr.write(f"cannot run {command[0]!r}: {error.strerror}\n")
            return NOT_STARTED
        # For as long as the one who started us lets it; `Popen.wait` with a timeout would poll.
        program.returncode = code = os.waitstatus_to_exitcode(os.waitpid(program.pid, 0)[1])
        return code if code >= 0 else 128 - code
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        processes.end_descendants()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
