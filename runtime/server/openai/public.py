"""The OpenAI-compatible interface `/v1/*`."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime import program_version
from runtime.engine.engine import Engine
from runtime.load.loading import Accepted
from runtime.server.bodies import Reader, json_answer, parse, sse, unless_disconnected
from runtime.server.errors import event_form, unknown_model
from runtime.server.openai.answering import Answering, Writer, call_reader, generation
from runtime.server.openai.embeddings import EmbeddingsRequest, embeddings_body
from runtime.server.openai.forms import LeftOut
from runtime.server.openai.requests import ChatRequest, CompletionRequest
from runtime.server.openai.responses import Body, ChatWriter, CompletionWriter, PartReader, scored_body
from runtime.server.openai.responses_api import ResponsesRequest, ResponseWriter
from runtime.server.records import Embedded, GenerationRequest, Scored
from runtime.server.security import HEALTH_PATH
from runtime.server.service import Service
from runtime.text.sampling import SamplingOptions
from runtime.wire.answers import ModelEntry

MAX_ANSWERED = 512
C = TypeVar("C", ChatRequest, CompletionRequest, ResponsesRequest, EmbeddingsRequest)


@dataclass(frozen=True, slots=True)
class PublicInterface:
    """The handlers of `/v1/*`."""

    service: Service
    ping_s: float
    reader: Reader
    answered: OrderedDict[str, Body] = field(default_factory=OrderedDict)
    """The last `MAX_ANSWERED` items of responses, by their ids: clients that believe them stored refer to them."""

    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{name:path}", self.model, methods=["GET"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/responses", self.responses, methods=["POST"]),
            Route("/v1/embeddings", self.embeddings, methods=["POST"]),
            Route(HEALTH_PATH, self.health, methods=["GET"]),
        ]

    async def models(self, _request: Request) -> Response:
        """GET /v1/models. The loaded model is first, since many clients take the first one."""
        entries = await asyncio.to_thread(self.service.catalogue.entries)
        entries = sorted(entries, key=lambda entry: not self.service.holds(entry.name))
        data = [_model(entry) for entry in entries]
        ends = {"has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
        return json_answer({"object": "list", "data": data, **ends})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        entry = await asyncio.to_thread(self.service.catalogue.find, name)
        if entry is None:
            raise unknown_model(name)
        return json_answer(_model(entry))

    async def chat(self, request: Request) -> Response:
        asked, messages, left_out = await self.reader.read(request, _chat)
        options = await asyncio.to_thread(asked.sampling)
        name, resume, apart = asked.prompt_cache_key, asked.resumes, not asked.reasoning_in_content
        wanted = generation(asked, messages, options, "messages", name=name, resume=resume)

        def begin(accepted: Accepted) -> Writer:
            return ChatWriter(
                accepted,
                PartReader(accepted.opening if apart or not resume else "", call_reader(options.calls), apart=apart),
                version=program_version(),
                with_usage=asked.wants_usage,
                logprobs=bool(asked.logprobs),
            )

        return await self._chunks.respond(request, wanted, begin, stream=bool(asked.stream), left_out=left_out)

    async def completions(self, request: Request) -> Response:
        asked = await self.reader.read(request, partial(_checked, CompletionRequest))
        options = await asyncio.to_thread(asked.sampling)
        if asked.echo:
            return await self._scored(request, asked, options)
        text = asked.single_prompt

        def prompt(engine: Engine) -> Sequence[int]:
            return engine.text_prompt(text) if isinstance(text, str) else text

        wanted = GenerationRequest(
            model=asked.model, prompt=prompt, options=options, left_open=asked.left_open, field="prompt"
        )

        def begin(accepted: Accepted) -> Writer:
            return CompletionWriter(
                accepted,
                version=program_version(),
                with_usage=asked.wants_usage,
                logprobs=asked.logprobs is not None,
            )

        return await self._chunks.respond(request, wanted, begin, stream=bool(asked.stream))

    async def _scored(self, request: Request, asked: CompletionRequest, options: SamplingOptions) -> Response:
        async def work() -> list[Scored]:
            prompts, more = asked.prompts, bool(asked.max_tokens)
            async with aclosing(self.service.score(asked.model, prompts, options, more=more)) as scored:
                return [one async for one in scored]

        return json_answer(scored_body(await unless_disconnected(request, work), logprobs=asked.logprobs is not None))

    async def responses(self, request: Request) -> Response:
        asked, messages, left_out = await self.reader.read(request, partial(_responses, self.answered))
        options = await asyncio.to_thread(asked.sampling)
        wanted = generation(asked, messages, options, "input", name=asked.prompt_cache_key)

        def begin(accepted: Accepted) -> Writer:
            parts = PartReader(accepted.opening, call_reader(options.calls))
            return ResponseWriter(asked, accepted, parts, self._keep)

        events = Answering(self.service, partial(sse, ping_s=self.ping_s, named=True, form=event_form))
        return await events.respond(request, wanted, begin, stream=bool(asked.stream), left_out=left_out)

    @property
    def _chunks(self) -> Answering:
        return Answering(self.service, partial(sse, ping_s=self.ping_s, done=True))

    def _keep(self, items: Sequence[Body]) -> None:
        """Keep the items of a response for requests that refer to them."""
        for item in items:
            self.answered[item["id"]] = item
        while len(self.answered) > MAX_ANSWERED:
            self.answered.popitem(last=False)

    async def embeddings(self, request: Request) -> Response:
        asked = await self.reader.read(request, partial(_checked, EmbeddingsRequest))

        async def work() -> list[Embedded]:
            async with aclosing(self.service.embed(asked.model, asked.texts)) as vectors:
                return [one async for one in vectors]

        return json_answer(embeddings_body(asked, await unless_disconnected(request, work)))

    async def health(self, _request: Request) -> Response:
        """GET /health: needs no token, and only shows that the server is up."""
        return json_answer({"status": "ok"})


def _checked(kind: type[C], body: bytes) -> C:
    asked = parse(body, kind)
    asked.check()
    return asked


def _chat(body: bytes) -> tuple[ChatRequest, list[dict[str, Any]], LeftOut]:
    asked = _checked(ChatRequest, body)
    assert asked.tool_use is not None, "it raises for tools that can't be used"
    return asked, *asked.conversation


def _responses(answered: Mapping[str, Body], body: bytes) -> tuple[ResponsesRequest, list[dict[str, Any]], LeftOut]:
    asked = _checked(ResponsesRequest, body)
    assert asked.tool_use is not None, "it raises for tools that can't be used"
    return asked, *asked.messages(answered)


def _model(entry: ModelEntry) -> Body:
    """A model in OpenAI's format, and in Anthropic's, whose clients ask at the same path."""
    made = datetime.fromtimestamp(entry.created, UTC).isoformat()
    return {
        "id": entry.name,
        "object": "model",
        "created": entry.created,
        "owned_by": "lowbit-chat",
        "type": "model",
        "display_name": entry.name,
        "created_at": made,
        "certificate": entry.certificate,
    }
