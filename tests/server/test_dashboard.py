"""The dashboard in headless Chromium: it loads without an error, charts move, a completion streams."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.server.live_server import LiveServer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HARMLESS = "^data:|completions failed: net::ERR_ABORTED"
"""Stopped streams, and some that were read to their end: Chromium may let go of those before it notes the end."""
EXPECTED = {"test_a_refusal_is_shown": HARMLESS + "|status of 400"}


@pytest.fixture
def page(server: LiveServer, request: pytest.FixtureRequest) -> Iterator[Page]:
    """The open dashboard; whatever the console says or a request fails is an error."""
    if CHROMIUM is None:
        pytest.skip("there is no Chromium here")
    troubles: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        made = browser.new_page(viewport={"width": 1200, "height": 1000})
        made.on("console", lambda message: troubles.append(f"{message.type}: {message.text}"))
        made.on("pageerror", lambda error: troubles.append(str(error)))
        made.on("requestfailed", lambda request: troubles.append(f"{request.url} failed: {request.failure}"))
        made.on("request", lambda request: troubles.append(request.url) if server.url not in request.url else None)
        made.goto(server.url + "/dashboard")
        expect(made.get_by_role("status")).to_have_text("ready", timeout=60_000)
        yield made
        browser.close()
    harmless = EXPECTED.get(request.node.name, HARMLESS)
    assert [trouble for trouble in troubles if not re.search(harmless, trouble)] == []


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
