"""The page at `/`: send, stream, stop, error; colours, comparison, keys, phone, themes. In headless Chromium."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.live import LiveServer

pytestmark = pytest.mark.slow

Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, server: LiveServer) -> Iterator[Open]:
    """Opens the page; it may load nothing from elsewhere and log no error."""
    contexts, problems = [], []

    def opened(url: str | None = None, **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda request: _at_home(request.url, url or server.url, problems))
        page.goto(url or server.url)
        page.wait_for_selector('#state[data-state="ready"]')
        return page

    yield opened
    for context in contexts:
        context.close()
    assert not problems


def _at_home(url: str, home: str, problems: list[str]) -> None:
    if not url.startswith((home, "data:")):
        problems.append(f"the page asked for {url}")


def ask(page: Any, text: str, **choices: str) -> None:
    for name, value in choices.items():
        box = page.locator(f"#{name.replace('_', '-')}")
        box.select_option(value) if name == "mode" else box.fill(value)
    page.fill("#text", text)
    page.press("#text", "Enter")


def settled(page: Any) -> None:
    page.wait_for_selector('#talk[aria-busy="false"]')


def said(page: Any) -> str:
    text: str = page.locator(".assistant pre").last.inner_text()
    return text


def test_an_answer_streams_in_colours(open_page: Open) -> None:
    page = open_page()
    ask(page, "SAY[one two three four five six]YAS")
    settled(page)
    assert said(page) == "one two three four five six"
    sources = page.locator(".assistant .tok").evaluate_all("all => all.map(one => one.className)")
    assert sources[:5] == ["tok recovery", "tok hit", "tok hit", "tok hit", "tok recovery"]
    colours = page.locator(".assistant .tok").evaluate_all("all => all.map(e => getComputedStyle(e).backgroundColor)")
    assert colours[0] != colours[1]
    assert float(page.inner_text("#acceptance")) > 3
    assert re.fullmatch(r"\d+ %", page.inner_text("#hit-share"))
    assert page.inner_text("#model") == "parrot"
    assert page.evaluate("document.activeElement.id") == "text"  # the next question can be typed at once


def test_the_conversation_goes_on(open_page: Open) -> None:
    page = open_page()
    ask(page, "SAY[first]YAS")
    settled(page)
    ask(page, "SAY[second]YAS")
    settled(page)
    assert page.locator(".user").count() == 2
    assert said(page) == "second"
    page.click("#clear")
    assert page.locator(".turn").count() == 0


@pytest.mark.parametrize("how", ["button", "key"])
def test_stopping(open_page: Open, server: LiveServer, how: str) -> None:
    page = open_page()
    ask(page, "SLOW " * 10, max_tokens="1500")
    page.wait_for_selector(".assistant .tok")
    page.click("#stop") if how == "button" else page.keyboard.press("Escape")
    settled(page)
    assert page.locator(".stopped").count() == 1
    assert page.is_visible("#send")
    server.wait_until_idle()  # it ended in the engine too


def test_errors_are_shown_and_the_question_is_kept(open_page: Open) -> None:
    page = open_page()
    ask(page, "FAIL, will you?")
    page.wait_for_selector("#trouble:not([hidden])")
    assert "choked" in page.inner_text("#trouble")
    ask(page, "x", max_tokens="4000000")
    page.wait_for_selector("#trouble:has-text('max_tokens')")
    assert page.input_value("#text") == "x"
    ask(page, "SAY[fine]YAS", max_tokens="20")
    settled(page)
    assert said(page) == "fine"
    assert not page.is_visible("#trouble")


def test_with_and_without_speculation_side_by_side(open_page: Open) -> None:
    page = open_page()
    ask(page, "SLOW SAY[" + "words and words " * 12 + "]YAS", mode="both")
    settled(page)
    plain, fast = page.locator(".pair .assistant").all()
    assert plain.locator("pre").inner_text() == fast.locator("pre").inner_text()
    assert plain.locator(".hit").count() == 0
    assert fast.locator(".hit").count() > 10
    assert float(page.inner_text("#bar-on b")) > 1.5 * float(page.inner_text("#bar-off b"))
    assert "times as fast" in page.inner_text("#speedup")


def test_keyboard_alone(open_page: Open) -> None:
    page = open_page()
    page.focus("#text")
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("SAY[typed]YAS")
    assert "\n" in page.input_value("#text")
    reached = []
    for _ in range(6):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id"))
    assert reached[:5] == ["mode", "temperature", "max-tokens", "clear", "send"]
    page.focus("#send")
    page.keyboard.press("Enter")
    settled(page)
    assert said(page) == "typed"


def is_light(page: Any) -> bool:
    ground: str = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return max(map(int, re.findall(r"\d+", ground))) > 128


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes_and_phones(open_page: Open, tmp_path: Path, scheme: str) -> None:
    page = open_page(color_scheme=scheme, viewport={"width": 375, "height": 720}, has_touch=True)
    ask(page, "SAY[on a small screen, words wrap and nothing is cut off at its side]YAS")
    settled(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#legend .tok:visible").count() == 3  # what the colours mean stays on the screen
    brightness = page.evaluate(
        "Math.max(...getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number))"
    )
    assert (brightness > 128) is (scheme == "light")
    page.click("#theme")
    changed = page.evaluate("Math.max(...getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number))")
    assert (changed > 128) is not (scheme == "light")
    assert page.screenshot(path=str(tmp_path / "phone.png"))


def test_a_key_is_asked_for(browser: Any, open_page: Open, tmp_path: Path) -> None:
    from tests.serve.conftest import parrot_directory

    with LiveServer("--model", str(parrot_directory(tmp_path / "parrot")), "--api-key", "sesame") as live:
        live.wait_until_ready()
        page = open_page(live.url)
        ask(page, "SAY[in]YAS")
        page.wait_for_selector("#key-label:not([hidden])")
        page.fill("#key", "sesame")
        ask(page, "SAY[in]YAS")
        settled(page)
        assert said(page) == "in"
        page.close()
