"""The application: routes, the published schema, and one form for every error.

    Guard (host, token, body) --> FastAPI (routes, schema) --> completions, chat --> engines

`build_app` needs no running server; `running` puts it behind a socket.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from starlette.exceptions import HTTPException

from verl.server import answers
from verl.server.bodies import parsed
from verl.server.chat import converse
from verl.server.completions import complete
from verl.server.errors import ApiError, internal_error, unavailable
from verl.server.events import CONTENT_TYPE as EVENTS
from verl.server.guard import Guard
from verl.server.metrics import CONTENT_TYPE as METRICS
from verl.server.openapi import body_of, publish_schema
from verl.server.page import page_policy, page_text
from verl.server.schemas import ChatRequest, CompletionRequest
from verl.server.service import Service

logger = logging.getLogger(__name__)

OPEN: dict[str, Any] = {"security": []}


def build_app(service: Service, token: str) -> Guard:
    """The whole application, guarded by `token`."""
    app = bare_app(service)
    routes = frozenset(route.path for route in app.routes)  # pyright: ignore[reportAttributeAccessIssue]
    return Guard(app, service.options, token, service.metrics, routes)


def bare_app(service: Service) -> FastAPI:
    app = FastAPI(
        title="verl",
        description="Text from a policy, in the form of OpenAI's API.",
        version="1",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan_of(service),
    )
    add_generation_routes(app, service)
    add_watching_routes(app, service)
    add_page(app)
    add_error_handlers(app)
    publish_schema(app, model=service.options.model, vocabulary=service.encoder.vocabulary)
    return app


def lifespan_of(service: Service) -> Any:
    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        service.close()

    return lifespan


def add_generation_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=answers.ModelList)
    async def models() -> answers.ModelList:
        return answers.ModelList(data=[card(service)])

    @app.post(
        "/v1/completions",
        response_model=None,
        responses=either(answers.Completion),
        openapi_extra=body_of(CompletionRequest),
    )
    async def completions(request: Request) -> Any:
        return await complete(service, parsed(CompletionRequest, await request.body()))

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=either(answers.ChatCompletion),
        openapi_extra=body_of(ChatRequest),
    )
    async def chat_completions(request: Request) -> Any:
        return await converse(service, parsed(ChatRequest, await request.body()))


def add_watching_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_model=answers.Health)
    async def health() -> answers.Health:
        num_alive = service.fleet.num_in_service()
        if not num_alive:
            raise unavailable("no engine is alive", "engine_lost")
        num_engines = len(service.fleet.engines)
        status = "ok" if num_alive == num_engines else "degraded"
        return answers.Health(status=status, engines=num_engines, engines_alive=num_alive)

    @app.get("/livez", response_model=answers.Alive, openapi_extra=OPEN)
    async def livez() -> answers.Alive:
        return answers.Alive()

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Any:
        return PlainTextResponse(service.metrics.text(), media_type=METRICS)


def add_page(app: FastAPI) -> None:
    """The chat page; it holds no secret, so it is open."""
    text = page_text()
    headers = {"Content-Security-Policy": page_policy(text)}

    @app.get("/", response_class=HTMLResponse, openapi_extra=OPEN)
    async def chat_page() -> Any:
        return HTMLResponse(text, headers=headers)


def add_error_handlers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        failure = ApiError(
            error.status_code, str(error.detail), code="http", headers=dict(error.headers or {})
        )
        return await api_error(request, failure)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        return await api_error(request, internal_error())


def card(service: Service) -> answers.ModelCard:
    return answers.ModelCard(
        id=service.options.model,
        created=service.created,
        owned_by="verl",
        max_model_len=service.options.max_model_len,
    )


def either(answer: type[answers.Answer]) -> dict[int | str, dict[str, Any]]:
    """An answer as a whole, or in events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    return {200: {"model": answer, "content": {EVENTS: {"schema": event}}}}
