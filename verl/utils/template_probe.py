"""Whether a model's chat template can be rendered at all: a template is a program of its author.

Templates run in Jinja's sandbox, which keeps them from files and attributes but not from loops
within loops or from texts that double. So each template that comes with a model renders a few short
conversations once, in a process of its own that may take little time and memory, before it is
rendered in ours:

    check_chat_template --> python -I template_probe.py: limits, render --> what it took, or its end

What a template does with one particular text is not foreseen. Errors are no reason to refuse: a
template may want roles or tools that these conversations lack. The child imports nothing of ours.
"""

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 0.7
MEMORY_BYTES = 512 << 20
MAX_CHARACTERS = 1 << 20
WAIT_SECONDS = 120.0
REFUSALS = (
    *(jinja2.TemplateError, ArithmeticError, AssertionError, AttributeError),
    *(LookupError, RuntimeError, TypeError, ValueError),
)
"""How a template fails on what it was not written for."""

TOOL = {"name": "f", "description": "d", "parameters": {"type": "object", "properties": {}}}
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": {"x": 1}}}


def check_chat_template(template: str | Mapping[str, str], name: str) -> None:
    """Raise ValueError for one that takes too much; `name` is the model's."""
    for text in [template] if isinstance(template, str) else template.values():
        problem = _problem(text)
        if problem is not None:
            raise ValueError(
                f"the chat template of {name!r} {problem} to write a few short messages, so the "
                "model is refused; remove the template from its folder, and set data.chat_template "
                "to one that you trust"
            )


@lru_cache(maxsize=64)
def _problem(template: str) -> str | None:
    child = subprocess.run(
        [sys.executable, "-I", __file__],
        input=json.dumps(template).encode(),
        capture_output=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    if child.returncode == -signal.SIGPROF:
        return f"takes more than {CPU_SECONDS} s"
    if child.returncode == 0:
        return json.loads(child.stdout)
    return f"ends its process ({child.stderr[-200:].decode(errors='replace').strip()})"


# ---- the child -----------------------------------------------------------------------------------


class Generation(Extension):
    """`{% generation %}`, which marks what the assistant writes, renders what it encloses."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def tojson(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def conversations() -> Iterator[dict[str, Any]]:
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
    yield {"messages": [user]}
    yield {"messages": [{"role": "system", "content": "s"}, user, answer, user]}
    yield {"messages": [user, answer] * 20, "add_generation_prompt": False}
    called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
    reply = {"role": "tool", "name": "f", "tool_call_id": "1", "content": "2"}
    yield {"messages": [user, called, reply], "tools": [{"type": "function", "function": TOOL}]}


def probe(template: str) -> str | None:
    """Render every conversation; what was too much, or None."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    always = {"add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}
    for conversation in conversations():
        variables = {**always, **conversation}
        try:
            text = environment.from_string(template).render(variables)
        except MemoryError:
            return f"takes more than {MEMORY_BYTES >> 20} MB"
        except REFUSALS:
            continue
        if len(text) > MAX_CHARACTERS:
            return f"writes {len(text)} characters"
    return None


def main() -> None:
    template = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
    json.dump(probe(template), sys.stdout)


if __name__ == "__main__":
    main()
