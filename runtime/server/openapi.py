"""The OpenAPI document of all interfaces, made from the models that validate requests."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic.json_schema import models_json_schema

from runtime import program_version
from runtime.server.anthropic.requests import CountRequest, MessagesRequest
from runtime.server.errors import ErrorForm, anthropic_form, form_of, ollama_form, openai_form
from runtime.server.ollama.requests import ModelRequest, OllamaChat, OllamaEmbeddings, OllamaGenerate
from runtime.server.openai.embeddings import EmbeddingsRequest
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.responses_api import ResponsesRequest

_REFERENCE = "#/components/schemas/{model}"
_TEXT = {"type": "string"}
_DETAILS = {"message": _TEXT, "type": _TEXT}
_OPTIONAL = {"type": ["string", "null"]}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


_ERRORS: dict[ErrorForm, tuple[str, dict[str, Any]]] = {
    openai_form: (
        "Error",
        _object({"error": _object({**_DETAILS, "param": _OPTIONAL, "code": _OPTIONAL}, *_DETAILS)}, "error"),
    ),
    anthropic_form: (
        "AnthropicError",
        _object({"type": _TEXT, "error": _object(_DETAILS, *_DETAILS)}, "type", "error"),
    ),
    ollama_form: ("OllamaError", _object({"error": _TEXT}, "error")),
}
"""Name and schema of the errors that each form writes."""
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
    ("/v1/messages", "Answer a conversation, in Anthropic's form", MessagesRequest),
    ("/v1/messages/count_tokens", "Count a conversation's tokens", CountRequest),
    ("/api/chat", "Answer a conversation, in Ollama's form", OllamaChat),
    ("/api/generate", "Answer a message, or continue a text", OllamaGenerate),
    ("/api/embed", "Texts as vectors", OllamaEmbeddings),
    ("/api/embeddings", "A text as a vector", OllamaEmbeddings),
    ("/api/show", "Look a model up", ModelRequest),
    ("/api/pull", "Download a model, and make it", ModelRequest),
)
_GETS = (
    ("/v1/models", "List the models"),
    ("/api/tags", "List the models"),
    ("/api/ps", "List the loaded models"),
    ("/api/version", "The version of Ollama whose interface this is"),
)


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    """The OpenAPI 3.1 document of `/v1/*`, `/api/*` and `/health`."""
    models = [(model, "validation") for model in dict.fromkeys(model for _, _, model in _POSTS)]
    _, schemas = models_json_schema(models, ref_template=_REFERENCE)  # type: ignore[arg-type]
    paths: dict[str, Any] = {
        path: {"post": _operation(path, summary, {"requestBody": _body(model.__name__)})}
        for path, summary, model in _POSTS
    }
    paths |= {path: {"get": _operation(path, summary)} for path, summary in _GETS}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    paths["/v1/models/{name}"] = {"get": _operation("/v1/models", "Look a model up", {"parameters": [name]})}
    paths["/health"] = {"get": {**_operation("/health", "Whether the server answers"), "security": []}}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "lowbit-chat",
            "version": program_version(),
            "description": "A language model on this machine, behind OpenAI's, Anthropic's and Ollama's interfaces.",
        },
        "security": [{"token": []}],
        "paths": paths,
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {**schemas.get("$defs", {}), **dict(_ERRORS.values())},
        },
    }


def _body(model: str) -> dict[str, Any]:
    schema = {"$ref": _REFERENCE.format(model=model)}
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _operation(path: str, summary: str, more: dict[str, Any] | None = None) -> dict[str, Any]:
    form = form_of(path)
    error = {"application/json": {"schema": {"$ref": _REFERENCE.format(model=_ERRORS[form][0])}}}
    streamed = "application/x-ndjson" if form is ollama_form else "text/event-stream"
    answers: dict[str, Any] = {
        "200": {
            "description": "the answer; a stream where the request says so",
            "content": {"application/json": {}, streamed: {}},
        }
    }
    answers |= {status: {"description": why, "content": error} for status, why in _REFUSED.items()}
    if path == "/api/pull":
        answers["409"] = {"description": "another model is being made or downloaded", "content": error}
    if form is anthropic_form:
        answers["529"] = {**answers["503"], "description": "too many requests wait"}
    return {"summary": summary, **(more or {}), "responses": answers}
