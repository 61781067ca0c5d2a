"""The process in which the package math-verify runs: one question a line, one answer a line.

Started by `math_verify` as a script of its own, without importing verl, so that its memory limit
holds little else than sympy. A timer of CPU time ends the process if a question takes too long,
also when nobody is left to kill it, and not when only the machine is busy.

    stdin   {"answer": "...", "gold": "..."}
    stdout  {"ready": true}   {"equal": true}   {"error": "ValueError: ..."}
"""

import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    sys.stdout = sys.stderr  # what packages print must not reach the parent
    equal = comparison()
    memory_bytes, cpu_seconds = int(sys.argv[1]) * 2**20, float(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    reply(replies, {"ready": True})
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # SIGPROF, which nothing here handles
        reply(replies, respond(equal, json.loads(line)))
        signal.setitimer(signal.ITIMER_PROF, 0)


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


def reply(stream: Any, message: dict[str, Any]) -> None:
    stream.write(json.dumps(message) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
