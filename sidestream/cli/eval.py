"""``sidestream eval``: few-shot exact match on questions in GSM8K's format, on an engine here or through a server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sidestream.core.sampling_params import SamplingParams
from sidestream.errors import RequestError, SidestreamError

if TYPE_CHECKING:
    from sidestream.engine.exact_match import Item, Judged, Score

HELP = """
Ask the questions of a JSON Lines file and count the right answers.

Each line has `question` and `answer`, the answer ending with `#### NUMBER`, as GSM8K has it. Without FILE, 100
arithmetic questions that the bundled checkpoint never saw are asked. Answers are greedy. A text without `#### NUMBER`
is invalid and counts as wrong.

- `sidestream eval`
- `sidestream eval gsm8k_test.jsonl --model path/to/checkpoint --shots 8 --shot-file gsm8k_train.jsonl`
- `sidestream eval --url http://localhost:8000` asks a running server instead
- `sidestream eval --cudagraph-mode piecewise --json result.json --items answers.jsonl`
"""


def evaluate(
    file: Annotated[Path | None, typer.Argument(help="Questions; `question` and `answer` a line.")] = None,
    model: Annotated[Path | None, typer.Option("--model", "-m", help="Folder of a hub checkpoint.")] = None,
    url: Annotated[str | None, typer.Option(help="Ask this server, not an engine of our own.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="SIDESTREAM_API_KEY", help="The server's key.")] = None,
    shots: Annotated[int, typer.Option(help="Worked examples before each question.")] = 0,
    shot_file: Annotated[Path | None, typer.Option(help="Where they come from, the first ones.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the chat template.")] = False,
    limit: Annotated[int | None, typer.Option(help="Ask only so many questions.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Upper bound of an answer.")] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests to the server at once.")] = 16,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the score there.")] = None,
    items_file: Annotated[Path | None, typer.Option("--items", help="Write each answer there, JSON lines.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or sim (a GPU simulated on the CPU).")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bf16, fp8_ds_mla or mxfp8.")] = "auto",
    cudagraph_mode: Annotated[str, typer.Option(help="auto, none, piecewise, full or full_and_piecewise.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 32,
    memory_limit: Annotated[str | None, typer.Option(help="'8GiB' or '60%'.")] = None,
) -> None:
    from sidestream.engine.exact_match import STOP, judge, score

    items, examples = _items(file, shots=shots, shot_file=shot_file, limit=limit)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=STOP)
    prompts = _prompts(items, examples, chat=chat)
    if url is not None:
        answers = _through_server(url, prompts, params, key=api_key, concurrency=concurrency)
    else:
        settings = {
            "device": device,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "cudagraph_mode": cudagraph_mode,
            "max_num_seqs": max_num_seqs,
            "memory_limit": memory_limit,
        }
        answers = _on_engine(model, prompts, params, settings)
    found: dict[int, Judged] = {}
    with _Asking(len(items)) as advance:
        for index, text in answers:
            found[index] = judge(items[index], text)
            advance(found[index].correct)
    judged = [found[index] for index in range(len(items))]
    result = score(judged)
    _report(result, judged, json_file=json_file, items_file=items_file)


evaluate.__doc__ = HELP


def _items(
    file: Path | None, *, shots: int, shot_file: Path | None, limit: int | None
) -> tuple[list[Item], list[Item]]:
    """Questions and worked examples; without a file for those, they are taken from the front and not asked."""
    from sidestream.engine.exact_match import read_items

    if shots < 0 or (limit is not None and limit < 1):
        raise RequestError(f"shots is {shots} and limit {limit}; at least 0 and 1 are needed")
    items = read_items(file or Path(str(resources.files("sidestream"))) / "assets" / "arithmetic.jsonl")
    source = items if shot_file is None else read_items(shot_file)
    if len(source) < shots:
        raise RequestError(f"shots is {shots}, and there are {len(source)} examples")
    rest = items[shots:] if shot_file is None else items
    if not rest:
        raise RequestError(f"shots is {shots}, which leaves no question to ask")
    return rest[:limit], source[:shots]


def _prompts(items: Sequence[Item], examples: Sequence[Item], *, chat: bool) -> list[dict[str, Any]]:
    from sidestream.engine.exact_match import chat_prompt, plain_prompt

    if chat:
        return [{"messages": chat_prompt(examples, item.question)} for item in items]
    return [{"prompt": plain_prompt(examples, item.question)} for item in items]


def _on_engine(
    model: Path | None, prompts: list[dict[str, Any]], params: SamplingParams, settings: dict[str, Any]
) -> Iterator[tuple[int, str]]:
    from sidestream.engine.llm import LLM

    llm = LLM(model, **settings)
    for delta in llm.stream(prompts, params):
        if delta.output.finished:
            yield delta.prompt_index, delta.output.outputs[0].text


def _through_server(
    url: str, prompts: list[dict[str, Any]], params: SamplingParams, *, key: str | None, concurrency: int
) -> Iterator[tuple[int, str]]:
    fields = {"temperature": params.temperature, "max_tokens": params.max_tokens, "stop": list(params.stop)}

    def ask(index: int) -> tuple[int, str]:
        chat = "messages" in prompts[index]
        path = "/v1/chat/completions" if chat else "/v1/completions"
        answer = _post(url.rstrip("/").removesuffix("/v1") + path, prompts[index] | fields, key)
        choice = answer["choices"][0]
        return index, (choice["message"]["content"] or "") if chat else choice["text"]

    with ThreadPoolExecutor(max(1, concurrency)) as pool:
        for job in as_completed([pool.submit(ask, index) for index in range(len(prompts))]):
            yield job.result()


def _post(url: str, body: dict[str, Any], key: str | None) -> dict[str, Any]:
    """The server's answer, or its own words about why there is none."""
    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
    try:
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as answer:
            return dict(json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            raise SidestreamError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from None
    except (OSError, ValueError) as error:
        raise SidestreamError(f"{url} cannot be asked: {error}") from None


class _Asking:
    """A bar on stderr with the share of right answers so far."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("asking", total=total)
        self._asked = self._right = 0

    def __enter__(self) -> Callable[[bool], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _advance(self, correct: bool) -> None:
        self._asked += 1
        self._right += correct
        self._bar.update(self._task, advance=1, description=f"{self._right} of {self._asked} right")


def _report(result: Score, judged: Sequence[Judged], *, json_file: Path | None, items_file: Path | None) -> None:
    if items_file is not None:
        lines = [json.dumps(entry.as_json(index), ensure_ascii=False) for index, entry in enumerate(judged)]
        items_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    figures = {
        "items": result.items,
        "correct": result.correct,
        "invalid": result.invalid,
        "accuracy": result.accuracy,
        "invalid_rate": result.invalid_rate,
    }
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    print(
        f"{result.correct} of {result.items} right, accuracy {result.accuracy:.4f}; "
        f"{result.invalid} without a final answer, invalid rate {result.invalid_rate:.4f}"
    )
