"""The process in which the package math-verify runs: an answer to each numbered question.

Started by `math_verify` as a script of its own, without importing verl, so that its memory limit
holds little else than sympy; of ours it loads one file, `verl/utils/line.py`. A timer of CPU time
ends the process if a question takes too long, also when nobody is left to kill it, and not when
only the machine is busy.

    from the parent   {"answer": "...", "gold": "..."}
    to the parent     {"ready": true}   {"equal": true}   {"error": "ValueError: ..."}
"""

import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any


def main() -> None:
    memory_mb, cpu_seconds, line_file = sys.argv[1:]
    line = load(line_file).Line(socket.socket(fileno=os.dup(0)))
    equal = comparison()
    memory_bytes = int(memory_mb) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    line.send(0, json.dumps({"ready": True}).encode())
    while (question := line.receive()) is not None:
        signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))  # SIGPROF, which nothing handles
        line.send(question.number, json.dumps(respond(equal, json.loads(question.body))).encode())
        signal.setitimer(signal.ITIMER_PROF, 0)


def load(path: str) -> Any:
    spec = spec_from_file_location("line", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def comparison() -> Callable[[str, str], bool]:
    from math_verify import parse, verify  # noqa: PLC0415 - optional, and only in this process

    def equal(answer: str, gold: str) -> bool:
        expected = parse(f"\\boxed{{{gold}}}", parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        found = parse(answer, parsing_timeout=None)  # pyright: ignore[reportArgumentType]
        if verify(expected, found, timeout_seconds=None):
            return True
        for name, parsed in (("gold answer", expected), ("answer", found)):
            if all(isinstance(part, str) for part in parsed):
                raise ValueError(f"it cannot read the {name}")
        return False

    equal("\\boxed{x^2+\\frac{1}{2}}", "0.5+x^2")  # loads its grammar before anyone waits for it
    return equal


def respond(equal: Callable[[str, str], bool], question: dict[str, str]) -> dict[str, Any]:
    try:
        return {"equal": equal(question["answer"], question["gold"])}
    except MemoryError:
        os._exit(1)  # whatever is left of this process is not to be trusted
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
