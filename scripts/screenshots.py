"""Draws the pictures of the README with headless Chromium: `python scripts/screenshots.py`.

The dashboard is shown while a server of the bundled checkpoint is under load.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

from sidestream.engine.bench.load.child_server import child_server

DOCS = Path(__file__).resolve().parent.parent / "docs"
CLIENTS = 5
LOAD_SECONDS = 60


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("this needs Chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        dashboard(browser, DOCS / "dashboard.png")
        inspection(browser, DOCS / "inspect.png")
        browser.close()


def dashboard(browser: Browser, path: Path) -> None:
    with child_server([], on_line=print) as address:
        stop = threading.Event()
        clients = [threading.Thread(target=load, args=(address, seed, stop)) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.goto(address + "/dashboard")
        page.wait_for_timeout(LOAD_SECONDS * 1000)
        page.get_by_role("button", name="Send").click()
        page.get_by_text("tokens per second").last.wait_for()
        page.wait_for_timeout(3000)
        page.screenshot(path=path, full_page=True)
        stop.set()
        for client in clients:
            client.join()


def inspection(browser: Browser, path: Path) -> None:
    """A question behind some five hundred tokens, one of the bundled prompts."""
    lines = (DOCS.parent / "sidestream" / "assets" / "prompts.jsonl").read_text().splitlines()
    prompt = next(p for p in map(json.loads, lines) if p["kind"] == "retrieval" and len(p["prompt"]) > 1000)["prompt"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "inspect.html"
        command = [sys.executable, "-m", "sidestream.cli.main", "inspect", "--prompt", prompt, "--max-tokens", "12"]
        subprocess.run([*command, "--output", str(output)], check=True)
        page = browser.new_page(viewport={"width": 1180, "height": 900})
        page.goto(output.as_uri())
        page.screenshot(path=path)


def load(address: str, seed: int, stop: threading.Event) -> None:
    """Ask questions behind contexts of different lengths until told to stop."""
    draws = random.Random(seed)
    while not stop.is_set():
        context = "The code of beaver is 4377. " * draws.randrange(3, 30)
        question = f"Question: What is {draws.randrange(9, 99)} + {draws.randrange(9, 99)}?\nAnswer:"
        body = {"prompt": context + question, "max_tokens": draws.randrange(10, 60), "ignore_eos": True}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(address + "/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            answer.read()
        time.sleep(draws.random() * 1.5)


if __name__ == "__main__":
    main()
