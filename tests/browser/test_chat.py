"""The chat page in Chromium, talking to a real server and engine: `make test-browser`."""

import re

import pytest

from tests.browser.conftest import TOKEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PHONE = (390, 780)


def test_the_token_leaves_the_address_and_is_sent_in_a_header_only(visit, server):
    assert visit.page.url == f"{server.url}/"
    visit.ask("5071*4")
    assert all(TOKEN not in one.url for one in visit.requests)
    (posted,) = [one for one in visit.requests if one.method == "POST"]
    assert posted.headers["authorization"] == f"Bearer {TOKEN}"
    visit.page.reload()
    visit.page.get_by_text("up to 4,096 tokens").wait_for()


def test_the_page_asks_nobody_but_its_server_and_breaks_no_rule(visit, server):
    visit.ask("5071*4")
    assert all(one.url.startswith(server.url) for one in visit.requests)
    assert visit.complaints == []


def test_a_script_that_is_smuggled_into_the_page_does_not_run(visit):
    smuggle = """() => {
        const script = document.createElement("script");
        script.textContent = "window.wasSmuggled = true";
        document.body.append(script);
        return window.wasSmuggled === true;
    }"""
    assert visit.page.evaluate(smuggle) is False
    assert "Content Security Policy" in " ".join(visit.complaints)


def test_an_answer_comes_with_its_tokens_their_rate_and_why_it_ended(visit):
    visit.ask("5071*4", max_tokens=8)
    facts = visit.answers().text_content()
    assert re.fullmatch(
        r"8 tokens · [\d.]+ tokens/s · first after [\d.]+ s · cut off at max tokens", facts
    )
    assert visit.page.locator(".turn.user .words").text_content() == "5071*4"
    assert visit.page.locator(".turn.assistant .words").text_content().strip()
    assert visit.page.locator("#model").text_content() == "tiny"


def test_earlier_messages_are_sent_along_unless_history_is_off(visit):
    visit.ask("first")
    answer = visit.page.locator(".turn.assistant .words").text_content()
    visit.ask("second")
    visit.page.locator("#history").uncheck()
    visit.ask("third")
    first, second, third = (body["messages"] for body in visit.sent())
    assert first == [{"role": "user", "content": "first"}]
    assert second == [
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": answer},
        {"role": "user", "content": "second"},
    ]
    assert third == [{"role": "user", "content": "third"}]


def test_a_new_chat_forgets_the_old_one(visit):
    visit.ask("first")
    visit.page.locator("#new").click()
    assert visit.page.locator(".turn").count() == 0
    visit.ask("second")
    assert visit.sent()[1]["messages"] == [{"role": "user", "content": "second"}]


def test_stop_ends_an_answer_and_keeps_what_came(visit):
    page = visit.page
    page.locator("#max-tokens").fill("2000")
    page.locator("#words").fill("abc")
    page.locator("#words").press("Enter")
    page.locator(".turn.assistant .words:not(:empty)").wait_for()
    page.locator("#stop").click()
    visit.answers().wait_for()
    assert visit.answers().text_content().endswith("stopped")
    assert len(page.locator(".turn.assistant .words").text_content()) < 2000
    assert page.locator(".turn.assistant .words").text_content()
    assert page.locator("#send").is_visible()
    visit.ask("again")  # the server goes on


def test_temperature_and_most_tokens_are_those_of_the_page(visit):
    visit.ask("abc", max_tokens=3, temperature="0")
    (body,) = visit.sent()
    assert (body["temperature"], body["max_tokens"], body["model"]) == (0, 3, "tiny")
    assert body["stream"] is True


def test_completion_continues_the_text_as_it_stands(visit):
    page = visit.page
    page.locator("#plain-mode").click()
    page.locator(".example").click()
    assert page.locator("#words").input_value() == "<|user|>5071*4<|assistant|>"
    visit.ask("<|user|>5071*4<|assistant|>")
    (body,) = visit.sent()
    assert body["prompt"] == "<|user|>5071*4<|assistant|>"
    words = page.locator(".turn.plain .words").text_content()
    assert words.startswith("<|user|>5071*4<|assistant|>")
    assert len(words) > len("<|user|>5071*4<|assistant|>")


def test_words_of_people_and_models_are_never_markup(visit):
    hostile = "<img/src=x/onerror=alert(1)><b>bold</b>"
    visit.ask(hostile)
    visit.page.locator("#plain-mode").click()
    visit.ask(hostile)
    assert visit.page.locator("#log img, #log b").count() == 0
    assert visit.page.locator(".given").text_content() == hostile
    assert visit.complaints == []


def test_shift_and_enter_start_a_line_and_enter_sends(visit):
    field = visit.page.locator("#words")
    field.press("a")
    field.press("Shift+Enter")
    field.press("b")
    assert field.input_value() == "a\nb"
    field.press("Enter")
    visit.answers().wait_for()
    assert visit.sent()[0]["messages"][0]["content"] == "a\nb"


# ---- what goes wrong -----------------------------------------------------------------------------


def test_without_a_token_the_page_asks_for_it(browser, server):
    page = browser.new_page()
    page.goto(f"{server.url}/")
    page.get_by_role("alert").get_by_text("The server wants its token").wait_for()
    page.get_by_label("Token", exact=True).fill("a wrong one")
    page.get_by_role("button", name="Use it").click()
    page.get_by_role("alert").get_by_text("The server wants its token").wait_for()
    page.get_by_label("Token", exact=True).fill(TOKEN)
    page.get_by_role("button", name="Use it").click()
    page.get_by_text("up to 4,096 tokens").wait_for()
    assert page.locator(".fault").count() == 0
    page.close()


def test_a_refused_message_shows_the_reason_and_can_be_sent_again(visit):
    page, too_long = visit.page, "a" * 5000
    page.locator("#words").fill(too_long)
    page.locator("#words").press("Enter")
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "4096" in alert.text_content()
    assert page.locator("#words").input_value() == too_long
    assert page.locator(".turn").count() == 0
    visit.ask("abc")
    assert page.locator(".fault").count() == 0


def test_a_server_that_is_gone_is_told_in_words(visit):
    visit.page.context.set_offline(True)
    visit.page.locator("#words").fill("abc")
    visit.page.locator("#words").press("Enter")
    alert = visit.page.get_by_role("alert")
    alert.wait_for()
    assert alert.text_content() == "The server cannot be reached. Is it still running?"


# ---- looks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("visit", [PHONE], indirect=True)
def test_a_phone_shows_everything_without_scrolling_sideways(visit):
    visit.ask("5" * 200, max_tokens=60)
    widths = visit.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert widths[0] <= widths[1]
    for name in ("#send", "#max-tokens", "#temperature", "#chat-mode", "#new"):
        box = visit.page.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= PHONE[0]
        assert box["y"] + box["height"] <= PHONE[1]


def test_light_and_dark_can_be_switched(visit):
    def background():
        return visit.page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    visit.page.locator("#theme").click()
    dark = background()
    assert light != dark
    visit.page.reload()
    assert background() == dark
