"""The OpenAI-compatible interface `/v1/*`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime import program_version
from runtime.engine.generation import Piece
from runtime.server.answer import json_answer
from runtime.server.errors import unknown_model
from runtime.server.openai.asking_again import answered
from runtime.server.openai.embeddings import EmbeddingsRequest, embeddings_body
from runtime.server.openai.openapi import document
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.response_requests import ResponsesRequest
from runtime.server.openai.response_writer import ResponseWriter
from runtime.server.openai.responses import Body, ChatWriter, CompletionWriter, Writer
from runtime.server.reading import Reader, parse
from runtime.server.security.policy import HEALTH_PATH
from runtime.server.service.interfaces import EngineLike
from runtime.server.service.service import Accepted, Embedded, GenerationRequest, Service
from runtime.server.streaming import Events, sse, unless_disconnected
from runtime.text.call_grammar import CallRules
from runtime.text.call_reader import CallReader
from runtime.wire.answers import ModelEntry

C = TypeVar("C", ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingsRequest)


@dataclass(frozen=True, slots=True)
class PublicInterface:
    """The handlers of `/v1/*`."""

    service: Service
    ping_s: float
    reader: Reader

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route(HEALTH_PATH, self.health, methods=["GET"]),
        ]

    async def models(self, _request: Request) -> Response:
        """GET /v1/models."""
        entries = await asyncio.to_thread(self.service.catalogue.entries)
        return json_answer({"object": "list", "data": [_model(entry) for entry in entries]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/NAME."""
        name = request.path_params["name"]
        entry = await asyncio.to_thread(self.service.catalogue.find, name)
        if entry is None:
            raise unknown_model(name)
        return json_answer(_model(entry))

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        asked, messages = await self.reader.read(request, _chat)
        options = await asyncio.to_thread(asked.sampling)
        resume = bool(asked.continue_final_message)
        tools, variables = list(asked.tool_use.tools), asked.chat_template_kwargs

        def prompt(engine: EngineLike) -> Sequence[int]:
            return engine.chat_prompt(messages, continue_final=resume, tools=tools, variables=variables)

        wanted = GenerationRequest(
            model=asked.model,
            prompt=prompt,
            options=options,
            chat=True,
            name=asked.prompt_cache_key,
            trim=not resume,
            field="messages",
            messages=() if resume else messages,
            variables=variables,
        )

        def begin(accepted: Accepted) -> Writer:
            return ChatWriter(
                accepted,
                version=program_version(),
                with_usage=asked.wants_usage,
                logprobs=bool(asked.logprobs),
                calls=_reader(options.calls),
            )

        return await self._answer(request, wanted, begin, stream=bool(asked.stream))

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        asked = await self.reader.read(request, partial(_checked, CompletionRequest))
        text, options = asked.single_prompt, await asyncio.to_thread(asked.sampling)

        def prompt(engine: EngineLike) -> Sequence[int]:
            return engine.text_prompt(text) if isinstance(text, str) else text

        wanted = GenerationRequest(model=asked.model, prompt=prompt, options=options, field="prompt")

        def begin(accepted: Accepted) -> Writer:
            return CompletionWriter(
                accepted,
                version=program_version(),
                with_usage=asked.wants_usage,
                logprobs=asked.logprobs is not None,
            )

        return await self._answer(request, wanted, begin, stream=bool(asked.stream))

    async def responses(self, request: Request) -> Response:
        """POST /v1/responses."""
        asked, messages = await self.reader.read(request, _responses)
        options = await asyncio.to_thread(asked.sampling)
        tools = list(asked.tool_use.tools)

        def prompt(engine: EngineLike) -> Sequence[int]:
            return engine.chat_prompt(messages, tools=tools)

        wanted = GenerationRequest(
            model=asked.model,
            prompt=prompt,
            options=options,
            chat=True,
            name=asked.prompt_cache_key,
            trim=True,
            field="input",
            messages=messages,
        )

        def begin(accepted: Accepted) -> Writer:
            return ResponseWriter(asked, accepted, _reader(options.calls))

        return await self._answer(request, wanted, begin, stream=bool(asked.stream), named=True)

    async def openapi(self, _request: Request) -> Response:
        """GET /openapi.json: the OpenAPI document."""
        return json_answer(document())

    async def embeddings(self, request: Request) -> Response:
        """POST /v1/embeddings."""
        asked = await self.reader.read(request, partial(_checked, EmbeddingsRequest))

        async def work() -> list[Embedded]:
            async with aclosing(self.service.embed(asked.model, asked.texts)) as found:
                return [one async for one in found]

        return json_answer(embeddings_body(asked, await unless_disconnected(request, work)))

    async def health(self, _request: Request) -> Response:
        """GET /health: needs no token, and only shows that the server is up."""
        return json_answer({"status": "ok"})

    async def _answer(
        self,
        request: Request,
        wanted: GenerationRequest,
        begin: Callable[[Accepted], Writer],
        *,
        stream: bool,
        named: bool = False,
    ) -> Response:
        """Respond with a stream, whose events may be named, or with a body."""
        if stream:
            return await sse(self._events(wanted, begin), ping_s=self.ping_s, done=not named, named=named)
        return json_answer(await unless_disconnected(request, lambda: self._whole(wanted, begin)))

    async def _events(self, wanted: GenerationRequest, begin: Callable[[Accepted], Writer]) -> Events:
        """The chunks of a stream."""
        async with aclosing(answered(self.service, wanted)) as items:
            writer = begin(await _accepted(items))
            for chunk in writer.opening():
                yield chunk
            async for piece in items:
                assert isinstance(piece, Piece)
                for chunk in writer.chunks(piece):
                    yield chunk

    async def _whole(self, wanted: GenerationRequest, begin: Callable[[Accepted], Writer]) -> Body:
        """The body of a non-streaming response."""
        async with aclosing(answered(self.service, wanted)) as items:
            writer = begin(await _accepted(items))
            return writer.body([item async for item in items if isinstance(item, Piece)])


def _checked(kind: type[C], body: bytes) -> C:
    asked = parse(body, kind)
    asked.check()
    return asked


def _chat(body: bytes) -> tuple[ChatRequest, list[dict[str, Any]]]:
    asked = _checked(ChatRequest, body)
    assert asked.tool_use is not None, "it raises for tools that can't be used"
    return asked, asked.conversation


def _responses(body: bytes) -> tuple[ResponsesRequest, list[dict[str, Any]]]:
    asked = _checked(ResponsesRequest, body)
    assert asked.tool_use is not None, "it raises for tools that can't be used"
    return asked, asked.messages


def _reader(rules: CallRules | None) -> CallReader | None:
    """A parser of calls in an answer, if there are tools. Calls that are checked afterwards are not streamed."""
    if rules is None:
        return None
    enforced = [tool.name for tool in rules.tools if tool.name not in rules.relaxed]
    return CallReader(rules.tools, most=None if rules.several else 1, enforced=enforced)


async def _accepted(items: AsyncGenerator[Accepted | Piece, None]) -> Accepted:
    """The first item of a generation."""
    first = await anext(items)
    assert isinstance(first, Accepted)
    return first


def _model(entry: ModelEntry) -> Body:
    """A model in OpenAI's format."""
    return {"id": entry.name, "object": "model", "created": entry.created, "owned_by": "lowbit-chat"}
