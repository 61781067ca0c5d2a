"""The run page in a real browser: 10,000 samples, two widths, dark and light, live or in a file."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.browser import pictures
from verl.board.serving import Board, board_server, page_address
from verl.board.store import Sample, Step, StoreWriter, plain_numbers
from verl.utils.json_server import JsonServer

STEPS, SAMPLES_OF_A_STEP = 50, 200
PATIENCE = 60_000  # milliseconds, for busy machines

pytestmark = pytest.mark.slow


def samples(step: int) -> Iterator[Sample]:
    chooser = np.random.default_rng(step)
    for row in range(SAMPLES_OF_A_STEP):
        ids = chooser.integers(3, 60, 40).tolist()
        mask = np.ones(40)
        mask[20:24] = 0  # a tool
        yield Sample(
            uid=f"{step}-{row // 8}",
            prompt=f"What is {row} times {step}?",
            response=" ".join(map(str, ids)) + (" needle" if (step, row) == (17, 5) else ""),
            score=float(row % 2),
            truth=str(row * step),
            prompt_ids=[1, 2, 3],
            response_ids=ids,
            columns={
                "mask": mask,
                "advantage": chooser.normal(size=40),
                "log_prob": -chooser.random(40),
            },
        )


def recorded(folder: Path, name: str, shift: float) -> None:
    store = StoreWriter(
        folder / name,
        facts={
            "name": f"demo/{name}",
            "total_steps": STEPS,
            "settings": {"trainer": {"board": True, "experiment_name": name}},
        },
        decode=lambda token: f"t{token} ",
        max_bytes=1 << 30,
    )
    for step in range(1, STEPS + 1):
        metrics = {
            "critic/score/mean": shift + step / STEPS,
            "actor/entropy": 2 / step,
            "actor/kl_loss": float("nan"),
        }
        seconds = {"gen": 2.0, "update_actor": 1.5, "other": 0.5}
        rows = list(samples(step))
        events = [("tripwire", "tripwire/entropy_collapsed")] if step == STEPS else []
        store.add(
            Step(
                number=step,
                metrics=plain_numbers(metrics),
                seconds=seconds,
                samples=rows,
                events=events,
            )
        )
    store.close()


@pytest.fixture(scope="module")
def board(tmp_path_factory) -> Board:
    folder = tmp_path_factory.mktemp("runs")
    recorded(folder, "first", 0.0)
    recorded(folder, "second", 0.1)
    return Board([folder])


@pytest.fixture(scope="module")
def server(board) -> Iterator[JsonServer]:
    with board_server(board) as running:
        yield running


@pytest.fixture(scope="module")
def exported(board, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("export") / "runs.html"
    path.write_text(board.exported(300), encoding="utf-8")
    return path


LOOKS = [(1280, "light"), (390, "dark")]


@pytest.fixture(
    params=[(kind, *look) for kind in ("served", "exported") for look in LOOKS], ids=str
)
def page(request, browser, server, exported) -> Iterator[Any]:
    kind, width, scheme = request.param
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    tab, complaints = context.new_page(), []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.goto(page_address(server) if kind == "served" else exported.as_uri())
    tab.get_by_text("critic/score/mean").first.wait_for()
    yield tab
    assert complaints == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    context.close()


def choose(page: Any, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def test_curves_of_all_runs_are_drawn_and_found_by_name(page):
    card = page.locator(".card", has_text="critic/score/mean").first
    assert card.locator("svg path").count() == 2
    page.get_by_label("Find metrics").fill("entropy")
    page.get_by_text("1 metric", exact=True).wait_for()
    page.get_by_role("checkbox").nth(1).uncheck()
    assert page.locator(".card svg path").count() == 1
    page.get_by_label("Find metrics").fill("kl_loss")
    page.get_by_text("no finite value").wait_for()


def test_samples_are_searched_and_opened_token_by_token(page):
    choose(page, "Samples")
    page.locator(".sample").first.click()
    page.locator("#detail .tokens span").first.wait_for()
    assert page.locator("#detail .tokens span").count() == 40
    assert page.locator("#detail .tokens span.tool").count() == 4
    assert page.locator(".sample").first.get_attribute("aria-current") == "true"
    assert page.locator(".sample[aria-current=true]").count() == 1
    shade = "getComputedStyle(document.querySelector('#detail .tokens span')).backgroundColor"
    before = page.evaluate(shade)
    page.get_by_label("Colour tokens by").select_option("log_prob")
    assert page.evaluate(shade) != before
    page.get_by_label("Find in prompts and responses").fill("times 50?")
    page.get_by_text(re.compile("^(200|6) samples$")).wait_for()  # in the file: 6 of each step


def test_a_needle_in_10_000_samples_is_found(browser, server):
    tab = browser.new_page()
    tab.set_default_timeout(PATIENCE)
    tab.goto(page_address(server))
    tab.get_by_role("tab", name="Samples").click()
    tab.get_by_text("10000 samples").wait_for()
    tab.get_by_label("Find in prompts and responses").fill("NEEDLE")
    tab.get_by_text("1 sample", exact=True).wait_for()
    assert "step 17" in tab.locator(".sample").inner_text()
    tab.close()


def test_time_health_and_comparison_have_something_to_say(page):
    choose(page, "Time")
    page.get_by_text("gen 50.0%").first.wait_for()
    choose(page, "Health")
    page.get_by_text("tripwire/entropy_collapsed").first.wait_for()
    assert page.locator(".events th").first.bounding_box()["height"] < 40, "a word is broken"
    choose(page, "Compare")
    page.get_by_text("First difference: step 1: critic/score/mean: 0.02 against 0.12").wait_for()
    names = page.locator("tr", has_text="trainer.experiment_name").locator("td").all_inner_texts()
    assert names == ["trainer.experiment_name", '"first"', '"second"']
    assert page.get_by_text("trainer.board", exact=True).count() == 0, "equal in both"


def test_keys_and_fingers_reach_what_a_mouse_does(page):
    tabs = page.get_by_role("tab")
    tabs.first.focus()
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.textContent") == "Compare"
    page.keyboard.press("ArrowRight")
    assert tabs.first.get_attribute("aria-selected") == "true"
    meaning = page.locator(".card .meaning").first
    assert not meaning.is_visible()
    page.locator(".card", has=page.locator(".meaning")).first.focus()
    assert meaning.is_visible()


def test_a_step_appears_by_itself_when_it_is_committed(browser, tmp_path):
    store = StoreWriter(tmp_path, facts={"name": "live"}, decode=str, max_bytes=1 << 20)
    metrics = {"actor/entropy": 2.0, "training/epoch": 1.0}
    store.add(Step(number=1, metrics=metrics, seconds={"gen": 1.0}))
    store.close()
    store = StoreWriter(
        tmp_path, facts={"name": "live"}, decode=str, max_bytes=1 << 20, first_step=1
    )
    board = Board([tmp_path])
    with board_server(board) as running:
        tab = browser.new_page()
        tab.set_default_timeout(PATIENCE)
        tab.goto(page_address(running))
        tab.get_by_text("actor/entropy").first.wait_for()
        tab.get_by_text("training (1)").click()
        store.add(Step(number=2, metrics=metrics, seconds={"gen": 1.0}))
        tab.get_by_text("step 2", exact=True).wait_for()
        tab.get_by_text("training/epoch").wait_for()  # what was unfolded stays so
        store.close()
        store = StoreWriter(
            tmp_path, facts={"name": "live"}, decode=str, max_bytes=1 << 20, first_step=0
        )
        store.add(Step(number=1, metrics={"actor/kl_loss": 1.0}, seconds={"gen": 1.0}))
        tab.get_by_text("actor/kl_loss").wait_for()
        assert tab.get_by_text("actor/entropy").count() == 0, "a step of the lost attempt"
        tab.close()
        board.close()
    store.close()


def test_a_run_that_went_wrong_is_shown(browser, tmp_path):
    store = StoreWriter(
        tmp_path, facts={"name": "night"}, decode=lambda token: f"t{token} ", max_bytes=1 << 20
    )
    for number, num_errors in ((1, 3.0), (2, 0.0)):
        metrics = {
            "reward/num_errors": num_errors,
            "actor/grad_norm": float("inf"),
            "trainer/idle_ratio": number / 4,
        }
        (sample, *_) = samples(number)
        sample.columns["advantage"][:] = [float("nan"), *[1.0] * 39]
        step = Step(number=number, metrics=plain_numbers(metrics), seconds={}, samples=[sample])
        store.add(step)
    store.close()
    path = tmp_path / "page.html"
    path.write_text(Board([tmp_path]).exported(2), encoding="utf-8")
    tab = browser.new_page()
    tab.set_default_timeout(PATIENCE)
    tab.goto(path.as_uri())
    tab.get_by_text("Infinity").first.wait_for()
    choose(tab, "Samples")
    tab.locator(".sample").first.click()
    tab.get_by_text("1 to 1, 1 not finite").wait_for()
    choose(tab, "Health")
    tab.get_by_text("reward/num_errors: 3").wait_for()
    tab.get_by_text("trainer idle 38% of the time").wait_for()
    tab.close()


def test_many_runs_leave_room_on_a_telephone(browser, tmp_path):
    for number in range(9):
        store = StoreWriter(
            tmp_path / str(number), facts={"name": "demo"}, decode=str, max_bytes=1 << 20
        )
        metrics = {"actor/entropy": float(number)}
        store.add(Step(number=1, metrics=metrics, seconds={}, samples=list(samples(1))[:20]))
        if number == 0:
            store.add(Step(number=9, metrics=metrics, seconds={}))
        store.close()
    path = tmp_path / "page.html"
    path.write_text(Board([tmp_path]).exported(20), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 390, "height": 700})
    tab.set_default_timeout(PATIENCE)
    tab.goto(path.as_uri())
    tab.get_by_text("demo (8)").wait_for()
    head = tab.locator("header").bounding_box()["height"]
    assert head < 300
    tab.locator(".card svg").first.hover(position={"x": 300, "y": 80})
    tab.get_by_text("at step 9, 1").wait_for()  # the other runs ended before
    choose(tab, "Compare")
    tab.get_by_text("names the first difference of up to five runs").wait_for()
    tab.get_by_role("cell", name="actor/entropy").wait_for()
    choose(tab, "Samples")
    tab.locator(".sample").first.click()
    tab.locator("#detail .tokens").first.wait_for()
    top = "document.getElementById('detail').getBoundingClientRect().top"
    tab.wait_for_function(f"Math.abs({top} - {head}) < 40")  # below the head, not behind it
    tab.close()


def test_a_sample_that_is_not_in_the_file_is_said_to_be_left_out(browser, board, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(board.exported(1), encoding="utf-8")
    tab = browser.new_page()
    tab.set_default_timeout(PATIENCE)
    tab.goto(path.as_uri())
    choose(tab, "Samples")
    tab.evaluate("state.open = [0, 2]")
    choose(tab, "Samples")
    tab.get_by_text("holds only some samples").wait_for()
    assert tab.locator(".sample").count() > 0, "the list is still there"
    tab.close()


def test_pictures_of_the_documentation_are_drawn(browser, exported, tmp_path):
    pictures.draw(browser, exported, tmp_path)
    for name in ("board.png", "board-curves.png"):
        picture = (tmp_path / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 20_000


def test_without_the_token_the_page_says_what_is_missing(browser, server):
    tab = browser.new_page()
    tab.goto(server.url)
    tab.get_by_text("this address lacks the token").wait_for()
    tab.close()
