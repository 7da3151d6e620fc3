"""Calls that no grammar could fully enforce: checked when they are complete, and asked for once more if they don't fit.

Text is passed on as it comes; from the beginning of the first call on, pieces are held back until the answer ends. If
a call does not fit its schema, the model sees what is wrong with it and calls again; that answer counts, whatever it
is, because a small model would otherwise be asked forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from runtime.engine.engine import Engine
from runtime.engine.generation import Piece
from runtime.load.loading import Accepted
from runtime.server.openai.forms import CalledFunction, CalledTool
from runtime.server.records import GenerationRequest
from runtime.server.service import Service
from runtime.text.call_grammar import CallRules
from runtime.text.call_reader import CallReader
from runtime.text.schema_process import problem_of
from runtime.text.tool_calls import ToolCall


async def generate(
    service: Service, wanted: GenerationRequest, rules: CallRules
) -> AsyncGenerator[Accepted | Piece, None]:
    """Answer a conversation as `Service.generate` does, and check the calls in it against the schemas of their tools.

    Raises:
        ApiError: see `Service.generate`.
    """
    held: list[Piece] = []
    reader, calls = CallReader(rules.tools), list[ToolCall]()
    async with aclosing(service.generate(wanted)) as items:
        async for item in items:
            if isinstance(item, Accepted):
                yield item
                continue
            held.append(item)
            calls += _calls(reader, item)
            if not calls and not reader.holds:
                for piece in held:
                    yield piece
                held.clear()
    again = await asyncio.to_thread(_again, wanted, rules, calls)
    if again is None:
        for piece in held:
            yield piece
        return
    async with aclosing(service.generate(again)) as items:
        async for item in items:
            if isinstance(item, Piece):
                yield item


def _calls(reader: CallReader, piece: Piece) -> list[ToolCall]:
    pieces = reader.feed(piece.text)[1]
    if piece.finish_reason is not None:
        pieces += reader.finish()[1]
    return [call for call in pieces if isinstance(call, ToolCall)]


def _again(wanted: GenerationRequest, rules: CallRules, calls: Sequence[ToolCall]) -> GenerationRequest | None:
    """The request with what is wrong with the calls; None if nothing is."""
    again = corrected(wanted.messages, rules, calls)
    if again is None:
        return None
    messages, once_more = again

    def prompt(engine: Engine) -> Sequence[int]:
        return engine.chat_prompt(messages, tools=list(rules.tools), variables=wanted.variables)

    return replace(wanted, prompt=prompt, options=replace(wanted.options, calls=once_more, grammar=None))


def corrected(
    messages: Sequence[Mapping[str, Any]], rules: CallRules, calls: Sequence[ToolCall]
) -> tuple[list[Mapping[str, Any]], CallRules] | None:
    """A conversation in which the model sees what is wrong with its calls, and must call again; None if nothing is."""
    schemas = {tool.name: tool.parameters for tool in rules.tools}
    problems = [problem_of(call.arguments, schemas[call.name]) for call in calls]
    if not any(problems):
        return None
    said: list[dict[str, Any]] = [
        CalledTool(id=f"call{at:05}", function=CalledFunction(name=call.name, arguments=call.arguments)).record()
        for at, call in enumerate(calls)
    ]
    results = [
        {"role": "tool", "tool_call_id": f"call{at:05}", "content": f"Error: {problem or 'not called; call it again'}"}
        for at, problem in enumerate(problems)
    ]
    wrong = {call.name for call, problem in zip(calls, problems, strict=True) if problem}
    once_more = CallRules.of([tool for tool in rules.tools if tool.name in wrong], required=True, several=rules.several)
    return [*messages, {"role": "assistant", "content": "", "tool_calls": said}, *results], once_more
