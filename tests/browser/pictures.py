"""Screenshots of the run page: `python -m tests.browser.pictures PAGE.html FOLDER`.

`make pictures` draws those of the documentation from the page of the quickstart.
"""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SIZE = {"width": 1280, "height": 760}
STEP = "4"


def executable() -> str | None:
    """Chromium: what `CHROMIUM` names, or the first one on the path."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)


@contextmanager
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=arguments)
        yield browser
        browser.close()


def draw(browser: Any, page: Path, folder: Path) -> None:
    """`board-curves.png` and `board.png`: curves, and the tokens of a sample of step 4."""
    context = browser.new_context(viewport=SIZE, color_scheme="light")
    context.set_default_timeout(60_000)
    tab = context.new_page()
    tab.goto(page.resolve().as_uri())
    tab.locator(".card svg path").first.wait_for()
    tab.screenshot(path=folder / "board-curves.png")
    tab.get_by_role("tab", name="Samples").click()
    tab.get_by_label("phase").select_option("train")
    tab.get_by_role("spinbutton", name="Step").fill(STEP)
    tab.get_by_text(f"step {STEP} · trained").first.wait_for()
    tab.locator(".sample").first.click()
    tab.get_by_label("Colour tokens by").select_option("log_prob")
    tab.mouse.move(0, 0)
    tab.screenshot(path=folder / "board.png")
    context.close()


if __name__ == "__main__":
    with chromium() as started:
        draw(started, Path(sys.argv[1]), Path(sys.argv[2]))
