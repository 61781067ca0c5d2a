"""A real server over a tiny model, and a real browser; without a browser these tests are skipped.

Whoever has Chromium elsewhere names it in `CHROMIUM`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.browser.pictures import chromium, executable
from tests.tiny_models import tiny_model
from tests.tiny_tokenizer import tiny_tokenizer

TOKEN = "open-sesame-open-sesame"
MAX_TOKENS = 4096
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] + ':' + message['content'] + ';' }}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")  # an open one keeps an event loop: asyncio.run would fail elsewhere
def browser() -> Iterator[Any]:
    pytest.importorskip("playwright.sync_api")
    if executable() is None:
        pytest.skip("there is no Chromium; install it, or name it in CHROMIUM")
    with chromium() as started:
        yield started


@pytest.fixture(scope="session")
def server(tmp_path_factory) -> Iterator[Any]:
    from verl.server import ServerOptions, serve
    from verl.workers.rollout.native.sequence import EngineLimits
    from verl.workers.rollout.process.client import EngineProcess, EngineSpec
    from verl.workers.rollout.process.native import BUILD, native_options

    folder = tmp_path_factory.mktemp("model")
    model, tokenizer = tiny_model("phi", max_position_embeddings=MAX_TOKENS), tiny_tokenizer()
    model.lm_head.bias.data[tokenizer.eos_token_id] = -1e4  # so that no answer ends by chance
    model.save_pretrained(folder)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    limits = EngineLimits(
        max_num_seqs=4, max_prompt_tokens=MAX_TOKENS // 2, max_response_tokens=MAX_TOKENS // 2
    )
    options = native_options(str(folder), limits)
    engine = EngineProcess(EngineSpec(build=BUILD, options=options, has_weights=True))
    engine.start()
    serving = ServerOptions(model="tiny", max_model_len=MAX_TOKENS, token=TOKEN)
    try:
        with serve([engine], tokenizer, serving) as running:
            yield running
    finally:
        engine.close()


@dataclass
class Visit:
    """A tab that has the chat open, and everything that went on in it."""

    page: Any
    requests: list[Any]
    complaints: list[str]

    def ask(self, words: str, *, max_tokens: int = 8, temperature: str = "1") -> None:
        """Send words and wait for the end of the answer."""
        before = self.answers().count()
        self.page.locator("#temperature").fill(temperature)
        self.page.locator("#max-tokens").fill(str(max_tokens))
        self.page.locator("#words").fill(words)
        self.page.locator("#words").press("Enter")
        self.answers().nth(before).wait_for()

    def answers(self) -> Any:
        """What is known of each finished answer."""
        return self.page.locator(".facts:not(:empty)")

    def sent(self) -> list[dict[str, Any]]:
        """The bodies of all requests for text."""
        return [one.post_data_json for one in self.requests if one.method == "POST"]


@pytest.fixture
def visit(browser, server, request) -> Iterator[Visit]:
    """Opened with the server's token; parametrize with a size for another window."""
    size = request.param if "param" in vars(request) else (1100, 760)
    context = browser.new_context(viewport={"width": size[0], "height": size[1]})
    context.set_default_timeout(60_000)
    seen = Visit(context.new_page(), [], [])
    seen.page.on("request", lambda one: seen.requests.append(one))
    seen.page.on("console", lambda message: seen.complaints.append(message.text))
    seen.page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    seen.page.goto(f"{server.url}/#token={TOKEN}")
    seen.page.get_by_text("up to 4,096 tokens").wait_for()
    yield seen
    context.close()
