"""``sidestream eval``: few-shot exact match on questions in GSM8K's format, on an engine here or through a server."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from sidestream.cli.engine_options import CudagraphMode, Device, Dtype, KvCacheDtype, MaxNumSeqs, MemoryLimit
from sidestream.cli.eval_server import Answer, Server
from sidestream.config.engine import DEFAULT_MAX_NUM_SEQS
from sidestream.core.sampling_params import SamplingParams
from sidestream.engine.bundled import bundled_model, bundled_questions
from sidestream.errors import RequestError

if TYPE_CHECKING:
    from sidestream.engine.exact_match import Item, Judged, Score
    from sidestream.engine.llm import LLM

HELP = """
Ask the questions of a JSON Lines file and count the right answers.

Each line has `question` and `answer`, the answer ending with `#### NUMBER`, as GSM8K has it. Without FILE, 100
arithmetic questions that the bundled checkpoint never saw are asked. Answers are greedy. A text without `#### NUMBER`
is invalid and counts as wrong.

Worked examples (`--shots`) are the first ones of `--shots-file`. Without that file they are the first ones of FILE, and
only the rest is asked. No question is ever among its own examples.

**Examples**

- `sidestream eval`
- `sidestream eval gsm8k_test.jsonl --model path/to/checkpoint --shots 8 --shots-file gsm8k_train.jsonl`
- `sidestream eval --url http://localhost:8000` asks a running server instead
- `sidestream eval --cudagraph-mode piecewise --json score.json --output answers.jsonl`
"""
ASKING = "Questions"


def evaluate(
    file: Annotated[
        Path | None, typer.Argument(help="Questions; `question` and `answer` a line.", show_default="100 bundled ones")
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            "-m",
            help="Folder of a hub checkpoint; with --url the name that requests carry.",
            show_default="the bundled one, or the server's",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="Ask the server at this address.", show_default="an engine of this command's own"),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SIDESTREAM_API_KEY", show_envvar=True, help="The server's key.", show_default="none"),
    ] = None,
    shots: Annotated[int, typer.Option(help="Worked examples before each question.", rich_help_panel=ASKING)] = 0,
    shots_file: Annotated[
        Path | None,
        typer.Option(help="Where examples come from.", show_default="the front of FILE", rich_help_panel=ASKING),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask through the chat template.", rich_help_panel=ASKING)
    ] = False,
    limit: Annotated[
        int | None,
        typer.Option(help="Ask the first so many questions.", show_default="all", rich_help_panel=ASKING),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Upper bound of an answer, in tokens.", rich_help_panel=ASKING)] = 256,
    concurrency: Annotated[int, typer.Option(help="Requests to the server at once.", rich_help_panel=ASKING)] = 16,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write the score to this file.", show_default="nowhere")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="Write each answer there as it comes, as JSON lines.", show_default="nowhere"
        ),
    ] = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    max_num_seqs: MaxNumSeqs = DEFAULT_MAX_NUM_SEQS,
    cudagraph_mode: CudagraphMode = "auto",
    memory_limit: MemoryLimit = None,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> None:
    from sidestream.engine.bench.environment import origin
    from sidestream.engine.exact_match import STOP, judge, score

    file = file or bundled_questions()
    _keep_apart(read=(file, shots_file), written={"--output": output, "--json": json_file})
    if concurrency < 1:
        raise RequestError(f"concurrency is {concurrency}, at least 1 is needed")
    items, source = _items(file, shots=shots, shots_file=shots_file, limit=limit)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, stop=STOP)
    prompts = _prompts(items, source, shots=shots, chat=chat)
    settings: dict[str, Any] = {
        "device": device,
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "cudagraph_mode": cudagraph_mode,
        "max_num_seqs": max_num_seqs,
        "memory_limit": memory_limit,
    }
    asked: dict[str, Any] = {"file": file.name, "max_tokens": max_tokens, "chat": chat, "shots": shots}
    asked |= {key: value for key, value in origin().items() if key in ("command", "date", "versions")}
    if shots:
        asked["shots_file"] = (shots_file or file).name
        rest = "" if shots_file is not None else ", which are not asked"
        print(f"examples: the first {shots} of {shots_file or file}{rest}; {len(items)} questions", file=sys.stderr)
    if url is not None:
        server = Server(url, key=api_key, name=None if model is None else str(model))
        answers = server.answers(prompts, params, concurrency=concurrency)
        asked |= {"url": url, "model": server.model}
    else:
        from sidestream.engine.llm import LLM

        llm = LLM(model, **settings)
        answers = _on_engine(llm, prompts, params)
        asked |= {"model": (model or bundled_model()).resolve().name}
        asked |= {name: getattr(llm.built.config, name) for name in ("device", "dtype", "cudagraph_mode")}
    found: dict[int, Judged] = {}
    with _Asking(len(items)) as advance, _lines(output) as write:
        for answer in answers:
            judged = found[answer.index] = judge(items[answer.index], answer.text)
            how = {"finish_reason": answer.finish_reason, "tokens": answer.tokens}
            write(json.dumps(judged.as_json(answer.index) | how, ensure_ascii=False))
            advance(judged.correct)
    _report(score([found[index] for index in range(len(items))]), asked, json_file=json_file)


evaluate.__doc__ = HELP


def _keep_apart(*, read: Sequence[Path | None], written: Mapping[str, Path | None]) -> None:
    """Refuse to write over what is read, or both results into one file."""
    taken = {path.resolve(): "which is read" for path in read if path is not None}
    for option, path in written.items():
        if path is not None:
            if (why := taken.get(path.resolve())) is not None:
                raise RequestError(f"{option} is {path}, {why}; give another file")
            taken[path.resolve()] = f"which {option} writes too"


def _items(file: Path, *, shots: int, shots_file: Path | None, limit: int | None) -> tuple[list[Item], list[Item]]:
    """Questions to ask, and where examples come from: without a file of their own, the front of the questions."""
    from sidestream.engine.exact_match import read_items

    if shots < 0 or (limit is not None and limit < 1):
        raise RequestError(f"shots is {shots} and limit {limit}; at least 0 and 1 are needed")
    items = read_items(file)
    source = items if shots_file is None else read_items(shots_file)
    if len(source) < shots:
        raise RequestError(f"shots is {shots}, the limit is {len(source)}, the examples in {shots_file or file}")
    rest = items[shots:] if shots_file is None else items
    if not rest:
        raise RequestError(f"shots is {shots}, which leaves no question to ask; give --shots-file")
    return rest[:limit], source


def _prompts(items: Sequence[Item], source: Sequence[Item], *, shots: int, chat: bool) -> list[dict[str, Any]]:
    from sidestream.engine.exact_match import chat_prompt, examples_for, plain_prompt

    made: list[dict[str, Any]] = []
    for item in items:
        examples = examples_for(item.question, source, shots)
        if chat:
            made.append({"messages": chat_prompt(examples, item.question)})
        else:
            made.append({"prompt": plain_prompt(examples, item.question)})
    return made


@contextmanager
def _lines(path: Path | None) -> Iterator[Callable[[str], None]]:
    """Writes a line at a time, so that what was answered is there whatever happens."""
    if path is None:
        yield lambda line: None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error}") from error

    def write(line: str) -> None:
        file.write(line + "\n")
        file.flush()

    with file:
        yield write


def _on_engine(llm: LLM, prompts: list[dict[str, Any]], params: SamplingParams) -> Iterator[Answer]:
    for delta in llm.stream(prompts, params):
        if delta.output.finished:
            made = delta.output.outputs[0]
            yield Answer(delta.prompt_index, made.text, made.finish_reason, len(made.token_ids))


class _Asking:
    """Progress on stderr with the share of right answers so far: a bar on a terminal, ten lines elsewhere."""

    def __init__(self, total: int) -> None:
        self._console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("asking", total=total)
        self._total = total
        self._asked = self._right = 0

    def __enter__(self) -> Callable[[bool], None]:
        self._bar.start()
        return self._advance

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def _advance(self, correct: bool) -> None:
        tenths = 10 * self._asked // self._total
        self._asked += 1
        self._right += correct
        self._bar.update(self._task, advance=1, description=f"{self._right} of {self._asked} right")
        if not self._console.is_terminal and 10 * self._asked // self._total > tenths:
            print(f"{self._asked} of {self._total} asked, {self._right} right", file=sys.stderr, flush=True)


def _report(result: Score, asked: dict[str, Any], *, json_file: Path | None) -> None:
    figures = {
        **asked,
        "items": result.items,
        "correct": result.correct,
        "invalid": result.invalid,
        "accuracy": result.accuracy,
        "invalid_rate": result.invalid_rate,
    }
    if json_file is not None:
        try:
            json_file.write_text(json.dumps(figures, indent=1) + "\n")
        except OSError as error:
            raise RequestError(f"cannot write {json_file}: {error}") from error
    print(
        f"{result.correct} of {result.items} right, accuracy {result.accuracy:.4f}; "
        f"{result.invalid} without a final answer, invalid rate {result.invalid_rate:.4f}"
    )
