"""``sidestream serve``: a model behind the OpenAI API."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from sidestream.config.engine import EngineConfig
from sidestream.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from sidestream.engine.wire import Phase

NEEDED = ("fastapi", "uvicorn", "pydantic", "msgspec", "zmq", "prometheus_client")

HELP = """
Serve a model over HTTP with the OpenAI API, on this machine alone unless `--host` says otherwise.

Without MODEL the small checkpoint that ships with Sidestream answers.

- `sidestream serve path/to/checkpoint --port 8000`
- `curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Question: What is 12 + 30?"}'`
- `/ready` says when requests are served, `/metrics` is for Prometheus, `/dashboard` for a browser.

SIGTERM and Ctrl+C let running requests end. If the engine dies, requests get 503 and the exit code is 2.
"""


def serve(
    model: Annotated[Path | None, typer.Argument(help="Folder of a hub checkpoint.")] = None,
    host: Annotated[str, typer.Option(help="Address to bind; 0.0.0.0 for every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    served_model_name: Annotated[str | None, typer.Option(help="Name for clients; the folder's without it.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="SIDESTREAM_API_KEY", help="Callers must send it.", show_envvar=True)
    ] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Largest request body.")] = 32 * 1024 * 1024,
    max_sequences: Annotated[int, typer.Option(help="Prompts times n of one request.")] = 1024,
    drain_seconds: Annotated[
        int | None, typer.Option(help="How long running requests may go on after SIGTERM; all the time without it.")
    ] = None,
    answer_parser: Annotated[
        str, typer.Option(help="Reasoning and tool calls of chats: auto, none, glm, deepseek_v31, deepseek_v32.")
    ] = "auto",
    cors_origin: Annotated[list[str] | None, typer.Option(help="Origin whose pages may call; repeatable.")] = None,
    enable_prefix_caching: Annotated[
        bool, typer.Option("--prefix-caching/--no-prefix-caching", help="Share what equal prompts begin with.")
    ] = True,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, or sim (a GPU simulated on the CPU).")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.")] = "auto",
    load_format: Annotated[str, typer.Option(help="auto, or dummy for seeded random weights.")] = "auto",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, bf16, fp8_ds_mla or mxfp8.")] = "auto",
    max_num_seqs: Annotated[int, typer.Option(help="Sequences that run at once.")] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens a step.")] = 1024,
    max_model_len: Annotated[int | None, typer.Option(help="Longest sequence; the model's limit without it.")] = None,
    block_size: Annotated[int, typer.Option(help="Tokens a KV block.")] = 64,
    cudagraph_mode: Annotated[str, typer.Option(help="auto, none, piecewise, full or full_and_piecewise.")] = "auto",
    max_capture_tokens: Annotated[int | None, typer.Option(help="Largest mixed batch with a graph.")] = None,
    stream_policy: Annotated[str, typer.Option(help="auto, external or stream.")] = "auto",
    num_blocks: Annotated[int | None, typer.Option(help="KV blocks; derived from the memory limit without it.")] = None,
    memory_limit: Annotated[str | None, typer.Option(help="'8GiB' or '60%' of the device's memory.")] = None,
    hisparse_host_memory: Annotated[
        str | None, typer.Option(help="'64GiB' or '40%' of the machine: KV rows go there when the device is short.")
    ] = None,
    hisparse_hot_factor: Annotated[int, typer.Option(help="Hot slots a sequence, times index_topk.")] = 2,
    hisparse_watermark: Annotated[float, typer.Option(help="Share of KV blocks kept free ahead of need.")] = 0.125,
    seed: Annotated[int, typer.Option(help="Of requests that bring none.")] = 0,
) -> None:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(f"serve needs {', '.join(missing)}; install 'sidestream[server]'")
    from sidestream.engine.llm import bundled_model
    from sidestream.server.run import run_server
    from sidestream.server.settings import ServerSettings

    folder = bundled_model() if model is None else model.expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"model {str(folder)!r} is not a folder; give the folder of a hub checkpoint")
    engine = EngineConfig(
        device=device,
        dtype=dtype,
        load_format=load_format,
        kv_cache_dtype=kv_cache_dtype,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        block_size=block_size,
        cudagraph_mode=cudagraph_mode,
        max_capture_tokens=max_capture_tokens,
        stream_policy=stream_policy,
        num_blocks=num_blocks,
        memory_limit=memory_limit,
        enable_prefix_caching=enable_prefix_caching,
        hisparse_host_memory=hisparse_host_memory,
        hisparse_hot_factor=hisparse_hot_factor,
        hisparse_watermark=hisparse_watermark,
        seed=seed,
    )
    settings = ServerSettings(
        folder=folder,
        model_name=served_model_name or folder.resolve().name,
        engine=engine,
        host=host,
        port=port,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        max_sequences=max_sequences,
        drain_seconds=drain_seconds,
        answer_parser=answer_parser,
        cors_origins=tuple(cors_origin or ()),
    )
    with StartReport(settings.model_name) as report:
        run_server(settings, on_listening=report.listening, on_phase=report.phase, on_ready=report.ready)


serve.__doc__ = HELP


class StartReport:
    """Shows how a server starts, on stderr: bars on a terminal, one line a phase elsewhere."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._address = ""
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bars: Progress | None = None
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bars = Progress(*columns, console=self._console)
        self._tasks: dict[str, int] = {}

    def __enter__(self) -> StartReport:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def listening(self, address: str) -> None:
        self._address = address
        self._console.print(f"{self._model}: listening on {address}, starting the engine")

    def phase(self, phase: Phase) -> None:
        if self._bars is not None:
            if phase.name not in self._tasks:
                self._tasks[phase.name] = self._bars.add_task(phase.name, total=phase.total)
            self._bars.update(self._tasks[phase.name], completed=phase.done)  # type: ignore[arg-type]
        elif phase.done == phase.total:
            self._console.print(f"{phase.name}: {phase.seconds:.1f} s")
            sys.stderr.flush()

    def ready(self, seconds: float) -> None:
        if self._bars is not None:
            self._bars.stop()
        self._console.print(f"ready after {seconds:.1f} s: {self._address}/v1, {self._address}/dashboard")
        sys.stderr.flush()
