"""Answers of every interface: a conversation as a request of the service, its parts, and its response."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from runtime.engine.engine import Engine
from runtime.engine.generation import Piece
from runtime.load.loading import Accepted
from runtime.server.bodies import Events, json_answer, unless_disconnected
from runtime.server.openai import tool_call_retry
from runtime.server.openai.forms import ToolUse
from runtime.server.openai.responses import Body
from runtime.server.records import GenerationRequest
from runtime.server.service import Service
from runtime.text.call_grammar import CallRules
from runtime.text.call_reader import CallReader
from runtime.text.reasoning import unfinished
from runtime.text.sampling import SamplingOptions

LEFT_OUT, MAX_HEADER = "X-Left-Out", 2000
"""The header that names what of a request could not be used, and its most characters."""
logger = logging.getLogger(__name__)


class Writer(Protocol):
    """Writes one response, as a body or in chunks."""

    def opening(self) -> list[Body]:
        """What comes before the first piece."""

    def chunks(self, piece: Piece) -> list[Body]:
        """What a piece adds; empty if nothing."""

    def body(self, pieces: Sequence[Piece]) -> Body:
        """The whole response."""


class Conversation(Protocol):
    """A request that a conversation be answered."""

    model: str

    @property
    def left_open(self) -> Collection[str]:
        """Sampling options that are left to the model."""

    @property
    def tool_use(self) -> ToolUse:
        """The tools that the model may call."""

    @property
    def variables(self) -> dict[str, Any]:
        """Further variables of the chat template."""


def generation(
    asked: Conversation,
    messages: Sequence[Mapping[str, Any]],
    options: SamplingOptions,
    field: str,
    *,
    name: str | None = None,
    resume: bool = False,
) -> GenerationRequest:
    """How a conversation is answered.

    Args:
        asked: The request.
        messages: Its messages, as chat templates take them.
        options: Its sampling options.
        field: The request's name for its messages.
        name: The client's name of the conversation.
        resume: Whether the last message is continued rather than answered.
    """
    tools, variables = list(asked.tool_use.tools), asked.variables
    if resume and unfinished(messages[-1]["content"]):
        options = replace(options, thought=messages[-1]["content"])

    def prompt(engine: Engine) -> Sequence[int]:
        return engine.chat_prompt(messages, continue_final=resume, tools=tools, variables=variables)

    return GenerationRequest(
        model=asked.model,
        prompt=prompt,
        options=options,
        left_open=asked.left_open,
        name=name,
        trim=not resume,
        field=field,
        messages=() if resume else messages,
        variables=variables,
    )


def call_reader(rules: CallRules | None, *, whole: bool = False) -> CallReader | None:
    """A parser of calls in an answer, if there are tools.

    Args:
        rules: What may be called.
        whole: Whether calls come whole; else the arguments of those that a grammar enforces are streamed. Calls that
            are checked afterwards never are.
    """
    if rules is None:
        return None
    enforced = [tool.name for tool in rules.tools if tool.name not in rules.relaxed]
    return CallReader(rules.tools, most=None if rules.several else 1, enforced=() if whole else enforced)


@dataclass(frozen=True, slots=True)
class Answering:
    """Responses to requests of the service."""

    service: Service
    stream: Callable[[Events], Awaitable[Response]]
    """Sends events as they arrive."""

    async def respond(
        self,
        request: Request,
        wanted: GenerationRequest,
        begin: Callable[[Accepted], Writer],
        *,
        stream: bool,
        left_out: Sequence[str] = (),
    ) -> Response:
        """Respond with a stream or with a body; a header says what of the request was left out.

        Raises:
            ApiError: the request or its model is invalid, or the work failed.
        """
        if stream:
            answer = await self.stream(self._events(wanted, begin))
        else:
            answer = json_answer(await unless_disconnected(request, lambda: self._whole(wanted, begin)))
        if left_out:
            said = "; ".join(left_out)[:MAX_HEADER].encode("ascii", "replace").decode()
            said = "".join(letter if letter.isprintable() else "?" for letter in said)
            answer.headers[LEFT_OUT] = said
            logger.info("left out of a request: %s", said)
        return answer

    def _generated(self, wanted: GenerationRequest) -> AsyncGenerator[Accepted | Piece, None]:
        """The answer; calls of tools whose schemas no grammar fully enforces are checked, and asked for once more."""
        rules = wanted.options.calls
        if rules is not None and rules.relaxed and wanted.messages:
            return tool_call_retry.generate(self.service, wanted, rules)
        return self.service.generate(wanted)

    async def _events(self, wanted: GenerationRequest, begin: Callable[[Accepted], Writer]) -> Events:
        """The chunks of a stream."""
        async with aclosing(self._generated(wanted)) as items:
            writer = begin(await _accepted(items))
            for chunk in writer.opening():
                yield chunk
            async for piece in items:
                assert isinstance(piece, Piece)
                for chunk in writer.chunks(piece):
                    yield chunk

    async def _whole(self, wanted: GenerationRequest, begin: Callable[[Accepted], Writer]) -> Body:
        """The body of a non-streaming response."""
        async with aclosing(self._generated(wanted)) as items:
            writer = begin(await _accepted(items))
            return writer.body([item async for item in items if isinstance(item, Piece)])


async def _accepted(items: AsyncGenerator[Accepted | Piece, None]) -> Accepted:
    """The first item of a generation."""
    first = await anext(items)
    assert isinstance(first, Accepted)
    return first
