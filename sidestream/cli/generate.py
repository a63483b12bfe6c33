"""``sidestream generate``: a prompt, or a file of them, in; streamed text or JSON lines out."""

from __future__ import annotations

import io
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from sidestream.cli.engine_options import engine_options
from sidestream.cli.prompt_lines import PROMPT_KEYS, SAMPLING_KEYS, read_prompts, with_overrides
from sidestream.cli.standard_streams import read_stdin
from sidestream.config.engine import EngineConfig
from sidestream.core.outputs import Logprob, RequestOutput
from sidestream.core.sampling_params import SamplingParams
from sidestream.errors import RequestError

if TYPE_CHECKING:
    from sidestream.engine.llm import LLM, TextDelta

SAMPLING = "Sampling"
HELP = """
Complete a prompt, or every prompt of a JSON Lines file.

Without `--model` the small checkpoint that ships with Sidestream answers. It knows short arithmetic problems, finds
facts planted in a context of 100 to 8,000 tokens and walks along link chains there, and nothing else.

**Examples**

- `sidestream generate --demo` answers the prompts that ship with it
- `sidestream generate "What is 12 + 30?" --chat`
- `sidestream generate - < prompt.txt` reads the prompt from standard input
- `sidestream generate --input prompts.jsonl --output answers.jsonl`

Each line of `--input` is an object with one of `prompt` (text), `prompt_token_ids` (a list of integers) and `messages`
(for the chat template), and may carry sampling parameters of its own (`max_tokens`, `temperature`, `seed`, ...).
Other keys are copied to the answer. Answers come in the order in which they finish; `index` counts prompts from 0.
"""


@engine_options("seed", prefill_pacing=False)
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; `-` reads it from standard input.", show_default=False)
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Folder of a hub checkpoint.", show_default="the bundled one")
    ] = None,
    input_file: Annotated[
        Path | None,
        typer.Option(
            "--input", "-i", help="JSON Lines file of prompts; `-` is standard input.", show_default="the PROMPT"
        ),
    ] = None,
    output_file: Annotated[
        Path | None, typer.Option("--output", "-o", help="Where JSON lines go.", show_default="standard output")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Answer the prompts that ship with Sidestream.")] = False,
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt through the chat template.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, not text.")] = False,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens of a completion; what does not fit is cut.", rich_help_panel=SAMPLING)
    ] = 256,
    temperature: Annotated[float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.0,
    top_k: Annotated[
        int, typer.Option(help="Keep the k most likely tokens; 0 keeps all.", rich_help_panel=SAMPLING)
    ] = 0,
    top_p: Annotated[
        float,
        typer.Option(help="Keep the smallest set of tokens that has this probability.", rich_help_panel=SAMPLING),
    ] = 1.0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the draws of every prompt.", show_default="one a prompt", rich_help_panel=SAMPLING),
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Completions a prompt.", rich_help_panel=SAMPLING)] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            help="Text that ends a completion; may be given more than once.",
            show_default="none",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    logprobs: Annotated[
        int | None,
        typer.Option(
            help="Log-probabilities of so many likely tokens, with each token of JSON output.",
            show_default="none",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Do not stop at the end-of-sequence token.", rich_help_panel=SAMPLING),
    ] = False,
    *,
    engine: EngineConfig,
) -> None:
    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        n=n,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    entries = _entries(prompt, input_file, demo=demo, chat=chat)
    prompts = [{key: entry[key] for key in (*PROMPT_KEYS, "cache_salt") if key in entry} for entry in entries]
    all_params = [with_overrides(params, entry, index) for index, entry in enumerate(entries)]

    from sidestream.engine.llm import LLM

    json_lines = not demo and (input_file is not None or as_json or output_file is not None)
    if logprobs is not None and not json_lines:
        raise typer.BadParameter("--logprobs is for JSON lines; add --json")
    llm = LLM(model, **asdict(engine))
    if demo:
        _demo(llm, entries, prompts, all_params)
    elif not json_lines:
        _stream(llm, prompts, all_params)
    else:
        if input_file is not None and output_file is not None and output_file.resolve() == input_file.resolve():
            raise RequestError(f"--output {output_file} is the input file; name another")
        stream = llm.stream(prompts, all_params)  # refuses bad prompts before the output is opened
        with _sink(output_file) as sink:
            _json_lines(stream, entries, sink=sink)


generate.__doc__ = HELP


def _entries(prompt: str | None, input_file: Path | None, *, demo: bool, chat: bool) -> list[dict[str, Any]]:
    given = [prompt is not None, input_file is not None, demo]
    if sum(given) != 1:
        raise typer.BadParameter("give exactly one of a PROMPT, --input FILE and --demo")
    if demo:
        from sidestream.engine.bundled import bundled_model

        return read_prompts(bundled_model().parent / "prompts.jsonl")
    if input_file is not None:
        return read_prompts(input_file)
    text = read_stdin() if prompt == "-" else prompt
    return [{"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}]


def _stream(llm: LLM, prompts: list[dict[str, Any]], params: list[SamplingParams]) -> None:
    """Text as it is made; several completions one after another, once all are done."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character still goes on
    console = Console(stderr=True)
    started, tokens = time.perf_counter(), 0
    last: RequestOutput | None = None
    for delta in llm.stream(prompts, params):
        last = delta.output
        tokens += 1
        if params[0].n == 1:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    assert last is not None
    for completion in last.outputs if params[0].n > 1 else ():
        sys.stdout.write(f"[{completion.index}] {completion.text}\n")
    sys.stdout.write("\n")
    reasons = ", ".join(str(completion.finish_reason) for completion in last.outputs)
    seconds = time.perf_counter() - started
    console.print(
        f"{len(last.prompt_token_ids)} prompt tokens, {tokens} generated, {tokens / seconds:.1f} tokens/s, {reasons}",
        style="dim",
        highlight=False,
    )


def _json_lines(stream: Iterator[TextDelta], entries: list[dict[str, Any]], *, sink: TextIO) -> None:
    """One line a prompt, in the order in which they finish; ``index`` says which prompt it is."""
    ascii_only = (sink.encoding or "").lower().replace("-", "") != "utf8"
    with _progress(len(entries)) as advance:
        for delta in stream:
            if delta.output.finished:
                extra = {k: v for k, v in entries[delta.prompt_index].items() if k not in SAMPLING_KEYS}
                answer = extra | _as_json(delta.prompt_index, delta.output)
                sink.write(json.dumps(answer, ensure_ascii=ascii_only) + "\n")
                sink.flush()
            advance(1, delta.output.finished)


def _demo(llm: LLM, entries: list[dict[str, Any]], prompts: list[dict[str, Any]], params: list[SamplingParams]) -> None:
    """Show each bundled prompt, the answer and whether it holds the expected one."""
    console = Console(highlight=False, soft_wrap=True)
    started, tokens, right = time.perf_counter(), 0, 0
    outputs: dict[int, RequestOutput] = {}
    with _progress(len(prompts)) as advance:
        for delta in llm.stream(prompts, params):
            tokens += 1
            if delta.output.finished:
                outputs[delta.prompt_index] = delta.output
            advance(1, delta.output.finished)
    seconds = time.perf_counter() - started
    for index, entry in enumerate(entries):
        output = outputs[index]
        text, expected = output.outputs[0].text.strip(), str(entry.get("answer", "")).strip()
        good = text == expected
        right += good
        console.rule(f"{entry.get('kind', 'prompt')}, {len(output.prompt_token_ids)} prompt tokens", align="left")
        console.print(Text(_shorten(str(entry.get("prompt", entry.get("messages"))))))
        console.print(Text(text, style="bold green" if good else "bold red"))
    console.rule(align="left")
    console.print(
        f"{right} of {len(entries)} as expected; {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} tokens/s"
    )


def _shorten(text: str, limit: int = 400) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters ...] {text[-half:]}"


def _as_json(index: int, output: RequestOutput) -> dict[str, Any]:
    return {
        "index": index,
        "prompt_tokens": len(output.prompt_token_ids),
        **(
            {}
            if output.prompt_logprobs is None
            else {"prompt_logprobs": [None if row is None else _logprobs(row) for row in output.prompt_logprobs]}
        ),
        "outputs": [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop_reason": completion.stop_reason,
            }
            | ({} if completion.logprobs is None else {"logprobs": [_logprobs(row) for row in completion.logprobs]})
            for completion in output.outputs
        ],
    }


def _logprobs(row: Mapping[int, Logprob]) -> dict[str, Any]:
    return {
        str(token): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.decoded_token}
        for token, entry in row.items()
    }


@contextmanager
def _sink(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        return
    try:
        # half a surrogate pair, copied from the input, becomes the JSON escape that it was there
        with path.open("w", encoding="utf-8", errors="backslashreplace") as file:
            yield file
    except OSError as error:
        raise RequestError(f"cannot write {path}: {error}") from error


@contextmanager
def _progress(total: int) -> Iterator[Any]:
    """A bar of finished prompts with tokens/s, on stderr where that is a terminal."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:.0f} tokens/s"),
        TimeElapsedColumn(),
    )
    started, tokens = time.perf_counter(), 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prompts", total=total, rate=0.0)

        def advance(new_tokens: int, finished: bool) -> None:
            nonlocal tokens
            tokens += new_tokens
            rate = tokens / max(time.perf_counter() - started, 1e-9)
            bar.update(task, advance=int(finished), rate=rate)

        yield advance
