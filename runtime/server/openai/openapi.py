"""OpenAPI document of the public interface, generated from the models that validate requests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic.json_schema import models_json_schema

from runtime import program_version
from runtime.server.openai.embeddings import EmbeddingsRequest
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.response_requests import ResponsesRequest

_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_REFUSED = {
    "400": "what is wrong with the request, and where",
    "401": "the token is missing or wrong",
    "403": "the host or the origin is not allowed",
    "404": "there is no such model",
    "413": "the request is too large",
    "503": "not now, or not on this machine: the message says why",
}
_POSTS = (
    ("/v1/chat/completions", "Answer a conversation", ChatRequest),
    ("/v1/completions", "Continue a text", CompletionRequest),
    ("/v1/embeddings", "Texts as vectors", EmbeddingsRequest),
    ("/v1/responses", "Answer a conversation, in the newer form", ResponsesRequest),
)


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of `/v1/*` and `/health`."""
    models = [(model, "validation") for _, _, model in _POSTS]
    _, schemas = models_json_schema(models, ref_template=_REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, Any] = {
        path: {"post": _operation(summary, {"requestBody": _body(model.__name__)})} for path, summary, model in _POSTS
    }
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models"] = {"get": _operation("List the models")}
    paths["/v1/models/{name}"] = {"get": _operation("Look a model up", {"parameters": [name]})}
    paths["/health"] = {"get": {**_operation("Whether the server answers"), "security": []}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lowbit-chat",
            "version": program_version(),
            "description": "A language model on this machine, behind OpenAI's interface.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas.get("$defs", {}), "Error": _ERROR},
        },
    }


def _body(model: str) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model=model)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _operation(summary: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model="Error")}}}
    answers: dict[str, Any] = {
        "200": {
            "description": "the answer; a stream of events where the request says so",
            "content": {"application/json": {}, "text/event-stream": {}},
        }
    }
    answers |= {status: {"description": why, "content": error} for status, why in _REFUSED.items()}
    return {"summary": summary, **(more or {}), "responses": answers}
