"""The published schema: what FastAPI derives from the routes, completed.

Added are the token that is needed, the errors that every route can answer with, and what only a
running server knows: the model's name and the size of its vocabulary.
"""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from verl.server.errors import ErrorAnswer
from verl.server.schemas import MODEL_NAME, TOKEN_ID, ChatRequest, CompletionRequest

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


def publish_schema(app: FastAPI, *, model: str, vocabulary: int) -> None:
    """Let `app.openapi()`, and with it `/openapi.json`, give the completed schema."""
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
    facts = {TOKEN_ID: {"maximum": vocabulary - 1}, MODEL_NAME: {"enum": [model]}}
    fill_in(schema, facts)
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


def fill_in(node: Any, facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Add to every part with one of these titles what is only known here."""
    if isinstance(node, dict):
        node.update(facts.get(node.get("title", ""), {}))
        for inner in node.values():
            fill_in(inner, facts)
    elif isinstance(node, list):
        for inner in node:
            fill_in(inner, facts)
