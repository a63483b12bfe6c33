"""``sidestream inspect``: one request from inside, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sidestream.cli.engine_options import ENGINE, Dtype, KvCacheDtype, LoadFormat, MemoryLimit
from sidestream.cli.prompt_lines import read_prompts
from sidestream.cli.report_file import check_place
from sidestream.cli.standard_streams import read_stdin
from sidestream.engine.bundled import bundled_model
from sidestream.errors import CheckpointError, RequestError

HELP = """
Complete a prompt and write a page about it: which tokens each indexer chose, the timeline of one decode step, memory.

A choice shows once prompt and completion are longer than the model's index_topk (64 tokens in the bundled one). The
completion ends at the end token, or after `--max-tokens`, and has at least five tokens, so that a step can be traced.
The page needs nothing else; beside it lies the step's Chrome trace, for `chrome://tracing` or ui.perfetto.dev.

**Examples**

- `sidestream inspect` looks at the bundled checkpoint and a prompt of the demo, long enough that tokens are left out
- `sidestream inspect --prompt "Question: What is 12 + 30?"` shows no choice: 64 tokens or fewer are all selected
- `sidestream inspect path/to/checkpoint --prompt-file long.txt --output report.html`
"""


def inspect(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of a hub checkpoint.", show_default="the bundled one")
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="The prompt; `-` reads it from standard input.",
            show_default="that of --prompt-file, or one of the demo",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None, typer.Option(help="The prompt is this file's text.", show_default="that of --prompt")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="The page; the trace goes beside it.")] = Path(
        "inspect.html"
    ),
    trace_file: Annotated[
        Path | None,
        typer.Option("--trace", help="The Chrome trace of one decode step.", show_default="beside the page"),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option(help="Most tokens to generate, at least 5: the step behind the fourth is traced.")
    ] = 32,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=ENGINE)] = "auto",
    dtype: Dtype = "auto",
    load_format: LoadFormat = "auto",
    memory_limit: MemoryLimit = None,
    kv_cache_dtype: KvCacheDtype = "auto",
) -> None:
    if prompt is not None and prompt_file is not None:
        raise typer.BadParameter("give one of --prompt and --prompt-file")
    from sidestream.cli.inspect_page import page
    from sidestream.engine.inspection.inspect import inspect_request

    folder = bundled_model() if model is None else model.expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"model {str(folder)!r} is not a folder; give the folder of a hub checkpoint")
    trace = trace_file or output.with_suffix(".trace.json")
    check_place(output)
    check_place(trace)
    inspection = inspect_request(
        folder,
        _prompt(prompt, prompt_file),
        max_tokens=max_tokens,
        trace=trace,
        device=device,
        dtype=dtype,
        load_format=load_format,
        kv_cache_dtype=kv_cache_dtype,
        memory_limit=memory_limit,
    )
    output.write_text(page(inspection), encoding="utf-8")
    print(f"{output}: {len(inspection.tokens)} tokens, {len(inspection.selections)} indexers; trace in {trace}")


inspect.__doc__ = HELP


def _prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is None and prompt_file is None:
        shipped = read_prompts(bundled_model().parent / "prompts.jsonl")
        return next(str(entry["prompt"]) for entry in shipped if entry["kind"] == "retrieval")
    if prompt_file is None:
        return read_stdin() if prompt == "-" else str(prompt)
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {prompt_file}: {error}") from error
