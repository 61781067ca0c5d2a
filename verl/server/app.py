"""The application: routes, the published schema, the chat page, and one form for every error.

    Guard (host, token, body) --> FastAPI (routes, schema) --> completions, chat --> fleet

`build_app` needs no running server; `running` puts it behind a socket. The schema is what FastAPI
derives from the routes, completed with the token, the errors of every route, and the model's name
and vocabulary. The chat page is one file with its style and its script; the policy sent with it
allows these two, by their hashes, and nothing else.
"""

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from verl.server import answers
from verl.server.chat import complete, converse
from verl.server.errors import ApiError, ErrorAnswer, internal_error, unavailable
from verl.server.events import CONTENT_TYPE as EVENTS
from verl.server.guard import Guard
from verl.server.schemas import (
    MODEL_NAME,
    TOKEN_ID,
    ChatRequest,
    CompletionRequest,
    ImagePart,
    ImageUrl,
    TextPart,
)
from verl.server.service import Service
from verl.utils.exposition import CONTENT_TYPE as METRICS
from verl.utils.json_server import page_policy

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
    publish_schema(app, service)
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
        return await complete(
            service, await service.parsed(CompletionRequest, await request.body())
        )

    @app.post(
        "/v1/chat/completions",
        response_model=None,
        responses=either(answers.ChatCompletion),
        openapi_extra=body_of(ChatRequest),
    )
    async def chat_completions(request: Request) -> Any:
        form = await service.parsed(ChatRequest, await request.body())
        return await converse(service, form)


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


def page_text() -> str:
    return (files("verl.server") / "page.html").read_text(encoding="utf-8")


ERRORS = {
    "400": "The request is wrong",
    "401": "The token is missing or wrong",
    "403": "Called by a name that the server does not know",
    "404": "No such model",
    "413": "The body is too large",
    "415": "The body is not plain JSON",
    "429": "Too many requests wait already",
    "500": "The server failed",
    "502": "An engine was lost",
    "503": "No engine can answer now",
    "504": "The answer took too long",
}
REF = "#/components/schemas/"


def publish_schema(app: FastAPI, service: Service) -> None:
    """Let `app.openapi()`, and with it `/openapi.json`, give the schema of this model."""
    schema = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes
    )
    components = schema.setdefault("components", {})
    for model_class in (ErrorAnswer, CompletionRequest, ChatRequest):
        form = model_class.model_json_schema(ref_template=REF + "{model}")
        components.setdefault("schemas", {}).update(form.pop("$defs"))
        components["schemas"][model_class.__name__] = form
    components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path in schema["paths"].values():
        for operation in path.values():
            complete_operation(operation)
    facts = {
        TOKEN_ID: {"maximum": service.encoder.vocabulary - 1},
        MODEL_NAME: {"enum": [service.options.model]},
    }
    fill_in(schema, facts)
    if not service.encoder.reads_images:
        leave_out_images(schema)
    app.openapi = lambda: schema


def body_of(form: type[BaseModel]) -> dict[str, Any]:
    """What a route whose body is read by ourselves says of it."""
    schema = {"$ref": REF + form.__name__}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def complete_operation(operation: dict[str, Any]) -> None:
    operation.setdefault("security", [{"token": []}])
    content = {"application/json": {"schema": {"$ref": REF + "ErrorAnswer"}}}
    for status, text in ERRORS.items():
        operation["responses"][status] = {"description": text, "content": content}


def leave_out_images(node: Any) -> None:
    """Where a part may be text or an image, it is text."""
    if isinstance(node, dict):
        if {"$ref": f"{REF}{ImagePart.__name__}"} in node.get("oneOf", ()):
            node.clear()
            node["$ref"] = f"{REF}{TextPart.__name__}"
        for unused in (ImagePart, ImageUrl):
            node.pop(unused.__name__, None)
        for inner in node.values():
            leave_out_images(inner)
    elif isinstance(node, list):
        for inner in node:
            leave_out_images(inner)


def fill_in(node: Any, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to every part with one of these titles what is only known here."""
    if isinstance(node, dict):
        node.update(facts.get(node.get("title", ""), {}))
        for inner in node.values():
            fill_in(inner, facts)
    elif isinstance(node, list):
        for inner in node:
            fill_in(inner, facts)
