"""``sidestream inspect``: the page tells what really happened, and works in a browser."""

from __future__ import annotations

import base64
import json
import re
import shutil
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from sidestream import LLM, RequestError, SamplingParams
from sidestream.cli.inspect_page import png, size
from sidestream.cli.main import app
from sidestream.engine.inspection.selection import Selection
from sidestream.engine.inspection.timeline import lanes_of
from sidestream.errors import ConfigError

PROMPT = "Notes: " + " ".join(f"The code of {name} is {4000 + i}." for i, name in enumerate("abcdefghijklmnop"))
PROMPT += "\nQuestion: Which code belongs to c?\nAnswer:"
MADE = 8


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inspect") / "page.html"
    options = ["--prompt", PROMPT, "--max-tokens", str(MADE), "--device", "cpu", "--output", str(path)]
    result = CliRunner().invoke(app, ["inspect", *options])
    assert result.exit_code == 0, result.output
    return path


@pytest.fixture(scope="module")
def data(output: Path) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', output.read_text(), re.DOTALL)
    assert match is not None
    return dict(json.loads(match[1]))


def test_the_text_is_the_engines(data: dict[str, Any]) -> None:
    llm = LLM(device="cpu", max_num_seqs=1)
    (plain,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=MADE))
    assert plain.outputs[0].finish_reason == "stop"
    assert data["prompt"] == len(plain.prompt_token_ids)
    assert len(data["tokens"]) == data["prompt"] + max(len(plain.outputs[0].token_ids), 5) < data["prompt"] + MADE
    assert "".join(data["tokens"][data["prompt"] :]).replace("<|end|>", "").startswith(plain.outputs[0].text[:6])


def test_every_query_chose_what_an_indexer_may(data: dict[str, Any]) -> None:
    """All there is up to 64 tokens and an unfinished pool of four, then at most as many; never a token behind it."""
    length = len(data["tokens"]) - 1  # the last token never asks
    assert length > 150
    for group in data["groups"]:
        assert sorted(map(int, group["chosen"])) == list(range(length))
        for query, chosen in ((int(q), c) for q, c in group["chosen"].items()):
            assert chosen == sorted(set(chosen))
            assert chosen[-1] <= query
            if query < 64:
                assert chosen == list(range(query + 1))
            else:
                assert 64 <= len(chosen) <= 67
                assert set(range((query + 1) // 4 * 4, query + 1)) <= set(chosen), "the unfinished pool is there"
    layers = [group["layers"][0] for group in data["groups"]]
    assert layers == sorted(layers)
    assert len(layers) > 1


def test_the_pictures_are_those_choices(output: Path, data: dict[str, Any]) -> None:
    pictures = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", output.read_text())
    assert len(pictures) == len(data["groups"])
    for picture, group in zip(pictures, data["groups"], strict=True):
        raw = base64.b64decode(picture)
        width, height = struct.unpack(">II", raw[16:24])
        length = len(data["tokens"]) - 1
        assert (width, height) == (length, length)
        start = raw.index(b"IDAT") + 4
        lines = np.frombuffer(zlib.decompress(raw[start : raw.index(b"IEND") - 8]), np.uint8).reshape(height, -1)[:, 1:]
        red = lines.reshape(height, width, 3)[..., 0]
        for query in (0, 70, length - 1):
            assert np.flatnonzero(red[query] == 20).tolist() == group["chosen"][str(query)]
            assert (red[query, query + 1 :] == 232).all()


def test_the_trace_is_a_chrome_trace_of_one_step(output: Path) -> None:
    trace = json.loads(output.with_suffix(".trace.json").read_text())
    lanes = lanes_of(trace)
    names = {span.name for lane in lanes for span in lane.spans}
    assert {"aten::mm", "aten::linear"} & names
    page = output.read_text()
    assert 'aria-label="Timeline of one decode step"' in page
    assert "budget" in page
    assert "weights" in page


def test_every_layer_is_named_with_whose_choice_it_goes_by(output: Path) -> None:
    chips = re.findall(r'<li class="(\w+)"><b>(\d+)</b> ([^<]*)</li>', output.read_text())
    assert chips == [
        ("plain", "0", "KDA"),
        ("plain", "1", "KDA"),
        ("leader", "2", "sparse MLA: chooses"),
        ("follower", "3", "sparse MLA: as layer 2"),
        ("plain", "4", "KDA"),
        ("leader", "5", "sparse MLA: chooses"),
    ]
    assert "<figcaption>Layers 2 and 3: layer 2 chooses</figcaption>" in output.read_text()


def test_the_traced_step_is_named_and_its_times_have_an_axis(output: Path, data: dict[str, Any]) -> None:
    text = output.read_text()
    assert f"The decode step of token {data['prompt'] + 3} under the profiler" in text
    assert "page.trace.json is the whole trace" in text
    ticks = re.findall(r'<text class="tick" [^>]*>([0-9.]+ (?:us|ms))</text>', text)
    assert len(ticks) == 6
    assert f"<p>{ticks[-1]} from the first operator to the last.</p>" in text


def test_sizes_have_a_fitting_unit() -> None:
    assert [size(n) for n in (0, 1023, 1024, 27 * 1024, 20 * 2**20, 3 * 2**39, 5 * 2**50)] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "27.0 KiB",
        "20.0 MiB",
        "1.5 TiB",
        "5120.0 TiB",
    ]


def test_lanes_are_streams_where_a_device_worked() -> None:
    def event(name: str, cat: str, tid: object, ts: float, dur: float) -> dict[str, Any]:
        return {"ph": "X", "name": name, "cat": cat, "tid": tid, "ts": ts, "dur": dur}

    events = [
        event("aten::mm", "cpu_op", 1, 0, 50),
        event("gemm", "kernel", 7, 100, 10),
        event("resolve", "kernel", 20, 105, 4),
        event("copy", "gpu_memcpy", 20, 112, 2),
        event("attend", "kernel", 7, 111, 9),
        {"ph": "M", "name": "process_name"},
    ]
    main, side = lanes_of({"traceEvents": events})
    assert (main.name, side.name) == ("stream 7", "stream 20")
    assert [(s.name, s.begin, s.length) for s in main.spans] == [("gemm", 0, 10), ("attend", 11, 9)]
    assert side.busy == 6
    nested = [event("outer", "cpu_op", 1, 0, 10), event("inner", "cpu_op", 1, 2, 3), event("next", "cpu_op", 1, 10, 1)]
    (host,) = lanes_of({"traceEvents": nested})
    assert [span.name for span in host.spans] == ["outer", "next"]
    assert lanes_of({"traceEvents": []}) == []


def test_heat_is_a_share_of_each_column() -> None:
    selection = Selection((0,), {0: np.array([0]), 1: np.array([1]), 2: np.array([0, 2]), 3: np.array([0, 1, 3])})
    expected = [[1, np.nan], [0.5, np.nan], [0.5, 1], [1, 0.5]]
    np.testing.assert_array_equal(selection.heat(2), np.array(expected, dtype=np.float32))


def test_a_picture_is_read_back() -> None:
    pixels = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    raw = png(pixels)
    body = zlib.decompress(raw[raw.index(b"IDAT") + 4 : raw.index(b"IEND") - 8])
    assert np.array_equal(np.frombuffer(body, np.uint8).reshape(2, 10)[:, 1:].reshape(2, 3, 3), pixels)


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    output = ["--output", str(tmp_path / "x.html"), "--device", "cpu"]
    for options, error in (
        (["--prompt", "a", "--max-tokens", "2"], RequestError),
        (["--prompt", ""], RequestError),
        (["--prompt-file", str(tmp_path / "missing.txt")], RequestError),
    ):
        result = CliRunner().invoke(app, ["inspect", *options, *output])
        assert isinstance(result.exception, error)
    both = ["--prompt", "a", "--prompt-file", str(tmp_path / "x.txt")]
    assert CliRunner().invoke(app, ["inspect", *both]).exit_code == 2
    assert not (tmp_path / "x.html").exists()


def test_without_a_prompt_a_shipped_one_shows_a_choice(tmp_path: Path) -> None:
    path = tmp_path / "x.html"
    result = CliRunner().invoke(app, ["inspect", "--device", "cpu", "--max-tokens", "5", "--output", str(path)])
    assert result.exit_code == 0, result.output
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert match is not None
    found = json.loads(match[1])
    last = max(map(int, found["groups"][0]["chosen"]))
    assert 64 <= len(found["groups"][0]["chosen"][str(last)]) <= 67 < last


def test_the_page_works_in_a_browser(output: Path, data: dict[str, Any]) -> None:
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium here")
    from playwright.sync_api import sync_playwright

    troubles: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.goto(output.as_uri())
        page.locator("#text span").nth(100).click()
        chosen = page.locator("#text span.chosen").evaluate_all("found => found.map(span => span.title)")
        assert chosen == [f"token {i}" for i in data["groups"][0]["chosen"]["100"]]
        assert page.locator("#text span.query").get_attribute("title") == "token 100"
        page.locator("#group").select_option("-1")
        chosen = page.locator("#text span.chosen").evaluate_all("found => found.map(span => span.title)")
        both = {i for group in data["groups"] for i in group["chosen"]["100"]}
        assert chosen == [f"token {i}" for i in sorted(both)]
        picture = page.locator(".map").nth(1)
        box = picture.bounding_box()
        assert box is not None
        asking = len(data["tokens"]) - 1
        picture.click(position={"x": 5, "y": box["height"] * 80.5 / asking})
        title = page.locator("#text span.query").get_attribute("title")
        assert title in ("token 79", "token 80"), "rows are less than two pixels high, and the pointer has whole ones"
        assert page.locator("#group").input_value() == "1", "the picture that was clicked"
        chosen = page.locator("#text span.chosen").evaluate_all("found => found.map(span => span.title)")
        assert chosen == [f"token {i}" for i in data["groups"][1]["chosen"][title.split()[1]]]
        browser.close()
    assert troubles == []


@pytest.mark.parametrize("option", ["--output", "--trace"])
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(option: str, tmp_path: Path) -> None:
    place = tmp_path / "missing" / "page.html"
    result = CliRunner().invoke(app, ["inspect", "--output", str(tmp_path / "page.html"), option, str(place)])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception).startswith(f"cannot write the report {place}: ")
    assert list(tmp_path.iterdir()) == []
