"""Anthropic's interface: `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from sse_starlette import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.load.loading import Accepted
from runtime.server.anthropic.requests import CountRequest, MessagesRequest
from runtime.server.anthropic.responses import MessageWriter
from runtime.server.bodies import Reader, encode, json_answer, sse, unless_disconnected
from runtime.server.errors import ANTHROPIC_PATH, anthropic_form
from runtime.server.openai.answering import Answering, Writer, call_reader, generation
from runtime.server.openai.forms import LeftOut
from runtime.server.openai.responses import PartReader
from runtime.server.records import GenerationRequest
from runtime.server.service import Service
from runtime.text.sampling import SamplingOptions

PING = ServerSentEvent(encode({"type": "ping"}), event="ping", sep="\n")
C = TypeVar("C", bound=CountRequest)


@dataclass(frozen=True, slots=True)
class AnthropicInterface:
    """The handlers of `/v1/messages`."""

    service: Service
    ping_s: float
    reader: Reader

    def routes(self) -> list[Route]:
        return [
            Route(ANTHROPIC_PATH, self.messages, methods=["POST"]),
            Route(f"{ANTHROPIC_PATH}/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def messages(self, request: Request) -> Response:
        asked, messages, left_out = await self.reader.read(request, partial(_read, MessagesRequest))
        options = await asyncio.to_thread(asked.sampling)

        def begin(accepted: Accepted) -> Writer:
            parts = PartReader(accepted.opening, call_reader(options.calls))
            return MessageWriter(accepted, parts, thinking=asked.shows_thinking, stops=asked.stops)

        stream = partial(sse, ping_s=self.ping_s, named=True, form=anthropic_form, ping=PING)
        answering, wanted = Answering(self.service, stream), _wanted(asked, messages, options)
        return await answering.respond(request, wanted, begin, stream=bool(asked.stream), left_out=left_out)

    async def count_tokens(self, request: Request) -> Response:
        asked, messages, _ = await self.reader.read(request, partial(_read, CountRequest))
        wanted = _wanted(asked, messages, SamplingOptions())
        tokens = await unless_disconnected(request, lambda: self.service.count(wanted))
        return json_answer({"input_tokens": tokens})


def _wanted(asked: CountRequest, messages: list[dict[str, Any]], options: SamplingOptions) -> GenerationRequest:
    return generation(asked, messages, options, "messages", resume=asked.resumes)


def _read(kind: type[C], body: bytes) -> tuple[C, list[dict[str, Any]], LeftOut]:
    asked = kind.read(body)
    assert asked.tool_use is not None, "it raises for tools that can't be used"
    return asked, *asked.conversation
