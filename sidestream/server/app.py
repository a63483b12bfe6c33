"""The HTTP application: routes and what surrounds them. It starts and ends the engine with itself."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from starlette.responses import HTMLResponse, RedirectResponse, Response

from sidestream import __version__
from sidestream.engine.async_engine import AsyncEngine
from sidestream.errors import EngineDeadError, RequestError
from sidestream.server import complaints, errors
from sidestream.server.access_log import AccessLog
from sidestream.server.chat import create_chat_completion
from sidestream.server.chat_prompt import encode_text, tokenize_chat
from sidestream.server.completions import create_completion
from sidestream.server.cut_off import CutOff
from sidestream.server.errors import JSONAnswer
from sidestream.server.json_body import JSONRoute
from sidestream.server.limits import ApiKey, BodyLimit
from sidestream.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    SamplingFields,
    TokenizeRequest,
)
from sidestream.server.service import Service

LAST_WORDS_SECONDS = 1.0
"""How long a server without its engine answers 503 before it ends."""
DASHBOARD = Path(__file__).parent / "static" / "dashboard.html"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'"
}
"""The page is one file, and talks to this server alone."""
PROMETHEUS_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def create_app(service: Service, *, engine: Callable[[], Awaitable[AsyncEngine]], end: Callable[[], None]) -> FastAPI:
    """The application.

    Args:
        engine: starts the engine; awaited while the app already answers ``/health``.
        end: called when the engine cannot start, or has died: the server is to stop.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(_run_engine(service, engine, end))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    app = FastAPI(title="Sidestream", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.router.route_class = JSONRoute
    errors.install(app, invalid=complaints.of_request)
    _add_status_routes(app, service)
    _add_openai_routes(app, service)
    _add_token_routes(app, service)
    settings = service.settings
    app.add_middleware(BodyLimit, limit=settings.max_body_bytes)
    if settings.api_key is not None:
        app.add_middleware(ApiKey, key=settings.api_key)
    app.add_middleware(CutOff, on_error=service.refused)
    if settings.access_log:
        app.add_middleware(AccessLog, say=service.answered)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(settings.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    return app


async def _run_engine(service: Service, engine: Callable[[], Awaitable[AsyncEngine]], end: Callable[[], None]) -> None:
    """Start the engine, then stay until it dies or the app ends."""
    running: AsyncEngine | None = None
    try:
        running = await engine()
        service.serve(running)
        service.failure = EngineDeadError(await running.died())
        await asyncio.sleep(LAST_WORDS_SECONDS)
    except Exception as error:
        service.failure = error
        raise
    finally:
        if running is not None:
            await running.stop()
        end()


def _add_status_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", summary="The server is alive; 503 once its engine is not")
    async def health() -> Response:
        if not service.alive:
            _ = service.engine
        settings = service.settings
        about = {"model": settings.model_name, "ready": service.ready, "api_key": settings.api_key is not None}
        return JSONAnswer({"status": "ok"} | about)

    @app.get("/ready", summary="Requests are served now")
    async def ready() -> Response:
        return JSONAnswer({"status": "ready", "model": service.settings.model_name} | _about(service))

    @app.get("/version", summary="Of this server")
    async def version() -> Response:
        return JSONAnswer({"version": __version__})

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return RedirectResponse("/dashboard")

    @app.get("/dashboard", summary="A page with charts and a form")
    async def dashboard() -> Response:
        return HTMLResponse(DASHBOARD.read_bytes(), headers=PAGE_HEADERS)

    @app.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), headers={"Content-Type": PROMETHEUS_TEXT})

    @app.get("/ledger", summary="Memory that the engine holds, by part, and what of it is in use")
    async def ledger() -> Response:
        ready, state = service.engine.ready, service.engine.state
        blocks = {"total": ready.num_blocks, "free": state.free_blocks, "tokens_each": ready.block_size}
        return JSONAnswer({"bytes": ready.ledger, "blocks": blocks, "free_slots": state.free_slots})


def _about(service: Service) -> dict[str, Any]:
    ready = service.engine.ready
    names = ("device", "dtype", "cudagraph_mode", "max_model_len", "max_num_seqs", "captured")
    return {name: getattr(ready, name) for name in names}


def _add_openai_routes(app: FastAPI, service: Service) -> None:
    created = int(time.time())

    @app.get("/v1/models")
    async def models() -> Response:
        entry = {
            "id": service.settings.model_name,
            "object": "model",
            "created": created,
            "owned_by": "sidestream",
            "max_model_len": service.engine.ready.max_model_len,
        }
        return JSONAnswer({"object": "list", "data": [entry]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return JSONAnswer({"id": name, "object": "model", "created": created, "owned_by": "sidestream"})

    @app.post("/v1/completions")
    async def completions(body: CompletionRequest, request: Request) -> Response:
        return await _counted(service, body, create_completion(service, body, request))

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        return await _counted(service, body, create_chat_completion(service, body, request))


async def _counted(service: Service, body: SamplingFields, answer: Awaitable[Response]) -> Response:
    """An answer; errors name fields as this body has them, and clients that went away are counted."""
    try:
        return await answer
    except errors.ClientGoneError:
        service.metrics.disconnected()
        raise
    except Exception as error:
        known = errors.as_api_error(error, names=body.names())
        if known is error or known.status == 500:
            raise
        raise known from error


def _add_token_routes(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> Response:
        engine = service.engine
        service.check_model(body.model)
        if engine.tokenizer is None:
            raise RequestError("prompt cannot be tokenised: this checkpoint has no tokenizer")
        if (body.prompt is None) is (body.messages is None):
            raise RequestError("prompt or messages must be given, and not both")
        token_ids = await engine.tokenizing(lambda: _token_ids(engine.tokenizer, body))
        answer: dict[str, Any] = {"tokens": token_ids, "count": len(token_ids)}
        answer["max_model_len"] = engine.ready.max_model_len
        if body.return_token_strs:
            answer["token_strs"] = [service.tokens.text(token) for token in token_ids]
        return JSONAnswer(answer)

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> Response:
        engine = service.engine
        service.check_model(body.model)
        tokenizer = engine.tokenizer
        if tokenizer is None:
            raise RequestError("tokens cannot be decoded: this checkpoint has no tokenizer")
        vocab = engine.ready.vocab_size
        for token in body.tokens:
            if not 0 <= token < vocab:
                raise RequestError(f"tokens holds token id {token}, the model's vocabulary is 0 to {vocab - 1}")
        skip = body.skip_special_tokens
        text = await engine.tokenizing(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip))
        return JSONAnswer({"prompt": text})


def _token_ids(tokenizer: Any, body: TokenizeRequest) -> list[int]:
    if body.messages is not None:
        return tokenize_chat(
            tokenizer,
            body.messages,
            tools=body.tools,
            kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
        )[1]
    return encode_text(tokenizer, body.prompt or "", add_special_tokens=body.add_special_tokens)
