"""``sidestream serve``: a model behind the OpenAI API."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from sidestream.cli.engine_options import engine_options
from sidestream.config.engine import EngineConfig
from sidestream.config.model import ModelConfig
from sidestream.config.resolved import check
from sidestream.engine.bundled import bundled_model
from sidestream.errors import CheckpointError, ConfigError
from sidestream.server.settings import (
    ANSWER_PARSERS,
    DEFAULT_HOST,
    DEFAULT_MAX_BODY_BYTES,
    DEFAULT_MAX_SEQUENCES,
    DEFAULT_PORT,
    ServerSettings,
)

SERVER = "Server"
NEEDED = ("fastapi", "uvicorn", "pydantic", "msgspec", "zmq", "prometheus_client")

HELP = """
Serve a model over HTTP with the OpenAI API, on this machine alone unless `--host` says otherwise.

Without MODEL the small checkpoint that ships with Sidestream answers. `/ready` says when requests are served,
`/metrics` is for Prometheus, `/dashboard` for a browser.

**Examples**

- `sidestream serve path/to/checkpoint --port 8000`
- `curl localhost:8000/v1/completions -H 'content-type: application/json' -d '{"prompt": "Question: What is 12 + 30?"}'`

SIGTERM and Ctrl+C let running requests end; a second Ctrl+C does not wait. If the engine dies, requests get 503 and the
exit code is 2.
"""


@engine_options(prefill_pacing=True)
def serve(
    model: Annotated[
        Path | None, typer.Argument(help="Folder of a hub checkpoint.", show_default="the bundled one")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to bind; 0.0.0.0 is every network of this machine.", rich_help_panel=SERVER)
    ] = DEFAULT_HOST,
    port: Annotated[int, typer.Option(help="TCP port; 0 takes a free one.", rich_help_panel=SERVER)] = DEFAULT_PORT,
    served_model_name: Annotated[
        str | None,
        typer.Option(help="What clients call the model.", show_default="the folder's name", rich_help_panel=SERVER),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="SIDESTREAM_API_KEY",
            help="Callers must send it as a bearer token.",
            show_envvar=True,
            show_default="none is asked for",
            rich_help_panel=SERVER,
        ),
    ] = None,
    max_body_bytes: Annotated[
        int, typer.Option(help="Largest request body, in bytes.", rich_help_panel=SERVER)
    ] = DEFAULT_MAX_BODY_BYTES,
    max_sequences: Annotated[
        int, typer.Option(help="Most sequences of one request: its prompts times n.", rich_help_panel=SERVER)
    ] = DEFAULT_MAX_SEQUENCES,
    drain_seconds: Annotated[
        int | None,
        typer.Option(
            help="How long running requests may go on after SIGTERM or Ctrl+C, in seconds.",
            show_default="to their end",
            rich_help_panel=SERVER,
        ),
    ] = None,
    answer_parser: Annotated[
        str,
        typer.Option(
            help="Takes reasoning and tool calls out of chat answers: auto (by the checkpoint's architecture), "
            + ", ".join(ANSWER_PARSERS[1:])
            + ".",
            rich_help_panel=SERVER,
        ),
    ] = "auto",
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin whose pages may call from a browser; may be given more than once.",
            show_default="none",
            rich_help_panel=SERVER,
        ),
    ] = None,
    access_log: Annotated[
        bool,
        typer.Option(
            "--access-log/--no-access-log",
            help="Write a line on stderr for each request that is over: path, status, id, tokens, seconds, finish "
            "reason; nothing that it said, and none for what probes and the dashboard ask for.",
            rich_help_panel=SERVER,
        ),
    ] = True,
    *,
    engine: EngineConfig,
) -> None:
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"serve needs {', '.join(missing)}; in the clone's folder run: "
            f"{shlex.quote(sys.executable)} -m pip install -e '.[server]'"
        )
    from sidestream.cli.serve_report import ServeReport
    from sidestream.server.run import run_server

    folder = bundled_model() if model is None else model.expanduser()
    if not folder.is_dir():
        raise CheckpointError(f"model {str(folder)!r} is not a folder; give the folder of a hub checkpoint")
    check(engine, ModelConfig.from_hf(folder))  # refuses what it can before the port is taken and an engine started
    settings = ServerSettings(
        folder=folder,
        model_name=folder.resolve().name if served_model_name is None else served_model_name,
        engine=engine,
        host=host,
        port=port,
        api_key=api_key,
        max_body_bytes=max_body_bytes,
        max_sequences=max_sequences,
        drain_seconds=drain_seconds,
        answer_parser=answer_parser,
        cors_origins=tuple(cors_origin or ()),
        access_log=access_log,
    )
    with ServeReport(settings.model_name) as report:
        run_server(settings, report)


serve.__doc__ = HELP
