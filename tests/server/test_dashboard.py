"""The dashboard in headless Chromium: it loads without an error, charts move, a completion streams."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from sidestream.core.request import FinishReason
from sidestream.engine.async_engine import Delta
from sidestream.engine.input_processor import ProcessedPrompt
from sidestream.errors import EngineDeadError
from tests.server.in_process import make, served
from tests.server.live_server import LiveServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HARMLESS = "^data:|completions failed: net::ERR_ABORTED"
"""Stopped streams, and some that were read to their end: Chromium may let go of those before it notes the end."""


@contextmanager
def dashboard(address: str, *, refusals: str = "") -> Iterator[Page]:
    """The open page; whatever the console says, or a request fails, is an error, unless it is one of ``refusals``."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    troubles: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = browser.new_page(viewport={"width": 1200, "height": 1000})
        made.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        made.on("pageerror", lambda error: troubles.append(str(error)))
        made.on("requestfailed", lambda request: troubles.append(f"{request.url} failed: {request.failure}"))
        made.on("request", lambda request: troubles.append(request.url) if address not in request.url else None)
        made.goto(address + "/dashboard")
        expect(made.get_by_role("status")).to_have_text("ready", timeout=60_000)
        yield made
        browser.close()
    harmless = f"{HARMLESS}|{refusals}" if refusals else HARMLESS
    assert [trouble for trouble in troubles if not re.search(harmless, trouble)] == []


@pytest.fixture
def page(server: LiveServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The dashboard of a real server."""
    refusals = "status of 400" if request.node.name == "test_a_refusal_is_shown" else ""
    with dashboard(server.url, refusals=refusals) as made:
        yield made


def test_a_completion_streams_and_the_charts_show_it(page: Page) -> None:
    expect(page.locator("#model")).to_have_text("glm5-next-tiny")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer")).to_have_text(" 12 + 30 = 42\n#### 42", timeout=90_000)
    expect(page.locator("#timing")).to_have_text(re.compile(r"15 prompt tokens, \d+ generated; first after \d+ ms"))
    expect(page.locator("#charts path").first).to_be_attached(timeout=60_000)
    ended = page.locator(".tile", has_text="completions ended").locator("b")
    expect(ended).not_to_have_text("0", timeout=60_000)
    expect(page.locator("#parts")).to_contain_text("weights")
    expect(page.locator("#parts")).to_contain_text("budget")


def test_a_chat_streams_and_a_long_one_can_be_stopped(page: Page, server: LiveServer) -> None:
    page.locator("#kind").select_option("chat")
    page.get_by_label("Prompt").fill("What is 12 + 30?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer")).to_contain_text("12 + 30 = 42", timeout=90_000)
    expect(page.get_by_role("button", name="Send")).to_be_enabled(timeout=60_000)
    page.locator("#kind").select_option("completion")
    page.get_by_label("Prompt").fill("The code of")
    page.locator("#tokens").fill("20000")
    page.locator("#temperature").fill("3")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#answer")).not_to_be_empty(timeout=60_000)
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#timing")).to_have_text("stopped")
    server.await_idle()


def test_a_refusal_is_shown(page: Page) -> None:
    page.get_by_label("Prompt").fill("")
    with page.expect_console_message(lambda message: "400" in message.text):
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#timing")).to_contain_text("the prompt is an empty string")


def test_a_server_without_a_key_asks_for_none(page: Page) -> None:
    expect(page.locator("#parts")).to_contain_text("weights")
    expect(page.locator("#ask")).to_be_hidden()


def test_the_key_is_asked_for_once_and_sent_with_all_that_needs_it() -> None:
    app, _, engine = make(api_key="secret")

    async def answer(batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        yield [engine.delta(batch[0], "an answer", FinishReason.STOP)]

    engine.script = answer
    with served(app) as address, dashboard(address, refusals="status of 401") as page:
        box, said, parts = page.locator("#key"), page.locator("#said"), page.locator("#parts")
        expect(box).to_be_visible()
        expect(page.locator("#withheld")).to_have_text("Shown once the server's API key is given.")
        expect(parts).to_be_empty()
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#timing")).to_contain_text("the API key is missing or wrong")
        expect(said).to_have_text("The server asks for its key.")
        for wrong, says in (("guess", "The server refuses this key."), ("clé", "A key is ASCII text without spaces.")):
            box.fill(wrong)
            page.get_by_role("button", name="Use").click()
            expect(said).to_have_text(says)
        expect(parts).to_be_empty()
        box.fill("secret")
        page.get_by_role("button", name="Use").click()
        expect(box).to_be_hidden()
        expect(parts).to_contain_text("weights3.0 MiB")
        expect(page.locator("#withheld")).to_be_empty()
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer")).to_have_text("an answer")
        expect(page.locator("#timing")).to_contain_text("15 prompt tokens, 1 generated")
        page.reload()
        expect(parts).to_contain_text("weights3.0 MiB")
        expect(page.locator("#ask")).to_be_hidden()


def test_every_chart_says_how_long_ago_it_was(page: Page) -> None:
    for width in (1200, 400):
        page.set_viewport_size({"width": width, "height": 1000})
        charts = page.locator("#charts svg")
        expect(charts).to_have_count(4)
        for chart in charts.all():
            labels = chart.locator("text.age")
            expect(labels).to_have_text(["2 min ago", "90 s ago", "1 min ago", "30 s ago", "now"])
            drawing = chart.element_handle()
            page.wait_for_function("svg => svg.viewBox.baseVal.width === svg.clientWidth", arg=drawing)  # drawn anew
            places = chart.evaluate(  # at once, since the chart is drawn anew each second
                "svg => [svg, ...svg.querySelectorAll('text.age')].map(part => part.getBoundingClientRect())"
                ".map(place => [place.left, place.right])"
            )
            (left, end), *labelled = places
            edges = [left, *(edge for place in labelled for edge in place)]
            assert edges == sorted(edges), "labels overlap"
            assert edges[-1] <= end + 0.5


def test_a_narrow_window_is_no_wider_than_itself(page: Page) -> None:
    page.set_viewport_size({"width": 400, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_an_answer_that_is_cut_off_is_shown_as_that() -> None:
    app, _, engine = make()

    async def cut(batch: Sequence[ProcessedPrompt]) -> AsyncGenerator[list[Delta], None]:
        yield [engine.delta(batch[0], "half an")]
        raise EngineDeadError("the engine's process ended")

    engine.script = cut
    with served(app) as address, dashboard(address) as page:
        page.get_by_role("button", name="Send").click()
        expect(page.locator("#answer")).to_have_text("half an")
        expect(page.locator("#timing")).to_have_text("the engine's process ended")
        expect(page.locator("#timing")).to_have_class("bad")
