"""`LocalRuntime`: a model loaded in this very process, with the part of `RuntimeClient` that a conversation needs.

Answers are those of a runtime process: the same prompts, written by the same writers, without HTTP in between. Whoever
holds one of the two need not know which.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from app.errors import ClientError
from app.language import _
from app.protocol import ChatDelta, ChatOptions, read_delta, stream_error
from runtime import program_version
from runtime.engine.generation import Piece
from runtime.errors import ContextOverflowError, RuntimeFailure
from runtime.load.loading import LoadedModel
from runtime.server.errors import api_error
from runtime.server.openai.responses import ChatWriter, CompletionWriter, PartReader
from runtime.text.call_grammar import CallRules
from runtime.text.call_reader import CallReader
from runtime.text.constraint import Grammar
from runtime.text.sampling import SamplingOptions
from runtime.text.tool_calls import Tool
from runtime.wire.answers import Status
from runtime.wire.codec import to_json

_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class LocalRuntime:
    """Answers conversations with a loaded model, one at a time; closes it."""

    who = _("the model")
    """Its name in error messages."""

    def __init__(self, loaded: LoadedModel) -> None:
        self.loaded = loaded

    async def aclose(self) -> None:
        """Unload the model. Safe to call twice."""
        self.loaded.engine.close()

    async def status(self) -> Status:
        """The model, and how it runs."""
        loaded = self.loaded
        return Status(
            state="ready",
            model=loaded.name,
            backend=loaded.backend,
            reason=loaded.reason,
            bits=loaded.bits,
            base=not loaded.engine.tokenizer.has_chat_template,
            kv=loaded.kv,
            k_chunk=dict(loaded.k_chunk),
            exact=loaded.exact,
            context=loaded.context,
            kv_bytes=loaded.kv_bytes,
            sampling=dict(loaded.sampling),
            speculates=bool(loaded.speculation),
            drafts_by_head=loaded.drafts_by_head,
        )

    def tokens(self, text: str) -> int | None:
        """Tokens of a text; None if they are certainly more than the context holds."""
        try:
            return len(self.loaded.engine.tokenizer.encode(text, special=False, most=self.loaded.context))
        except ContextOverflowError:
            return None

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> AsyncGenerator[ChatDelta, None]:
        """Generate an answer to a conversation; see `RuntimeClient.chat`.

        Raises:
            ClientError: as of a runtime.
        """
        engine, reader, rules = self.loaded.engine, None, None
        tools = [Tool(**_of_openai(tool)) for tool in options.tools or ()]
        try:
            if tools:
                rules, reader = CallRules.of(tools, required=False), CallReader(tools)
            prompt = engine.chat_prompt(
                [_with_arguments(message) for message in messages],
                continue_final=options.continue_final,
                tools=tools,
                variables=options.chat_template_kwargs,
            )
            sampling = self._sampling(options, stop=options.stop or (), calls=rules)
            opening = "" if options.continue_final else engine.reasoning_opened(prompt)
            parts = PartReader(opening, reader, apart=not options.reasoning_in_content)
            writer = ChatWriter(self.loaded.accepted(prompt, opening), parts, version=program_version())
        except RuntimeFailure as error:
            raise _as_client_error(error) from error
        async with aclosing(
            self._written(writer, prompt, sampling, options, trim=not options.continue_final)
        ) as deltas:
            async for delta in deltas:
                yield delta

    async def complete(self, text: str, options: ChatOptions) -> AsyncGenerator[ChatDelta, None]:
        """Continue a text as it is, without a chat template; see `RuntimeClient.complete`.

        Raises:
            ClientError: as of a runtime.
        """
        engine = self.loaded.engine
        try:
            prompt, sampling = engine.text_prompt(text), self._sampling(options, stop=tuple(options.stop or ()))
        except RuntimeFailure as error:
            raise _as_client_error(error) from error
        writer = CompletionWriter(self.loaded.accepted(prompt), version=program_version())
        async with aclosing(self._written(writer, prompt, sampling, options, trim=False)) as deltas:
            async for delta in deltas:
                yield delta

    def _sampling(self, options: ChatOptions, **more: Any) -> SamplingOptions:
        """Sampling options: those that are given, else what the model's maker advises, else OpenAI's."""
        given = {name: value for name in _SAMPLED if (value := getattr(options, name)) is not None}
        drawn: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, **self.loaded.sampling, **given}
        if options.response_format is not None:
            drawn["grammar"] = Grammar.of_schema(options.response_format["json_schema"]["schema"])
        return SamplingOptions(
            **drawn, seed=options.seed, max_tokens=options.max_tokens, end_loops=bool(options.end_loops), **more
        )

    async def _written(
        self,
        writer: ChatWriter | CompletionWriter,
        prompt: Sequence[int],
        sampling: SamplingOptions,
        options: ChatOptions,
        *,
        trim: bool,
    ) -> AsyncGenerator[ChatDelta, None]:
        """Run the engine's steps; between them others of the event loop get their turn, and may close this iterator."""
        engine, closed = self.loaded.engine, False
        items: deque[Piece | Exception] = deque()
        try:
            engine.submit(prompt, sampling, items.append, lambda: closed, trim=trim, chat=options.chat)
            chunks = writer.opening()
            while True:
                for chunk in chunks:
                    for choice in chunk["choices"]:
                        yield read_delta(choice, chunk.get("timings"), chunk["model"])
                        if choice["finish_reason"] is not None:
                            return
                await asyncio.sleep(0)
                if not items:
                    engine.step()
                chunks = []
                while items:
                    item = items.popleft()
                    if isinstance(item, Exception):
                        raise item
                    chunks += writer.chunks(item)
        except RuntimeFailure as error:
            raise _as_client_error(error) from error
        finally:
            closed = True
            engine.step()  # ends the request if the rest is not wanted


def _of_openai(tool: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `Tool`, of a function in OpenAI's format."""
    function = tool["function"]
    given = {name: function.get(name) for name in ("name", "description", "parameters")}
    return {name: value for name, value in given.items() if value is not None}


def _with_arguments(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message whose calls have their arguments as objects, as chat templates take them."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _parsed(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _parsed(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _as_client_error(error: RuntimeFailure) -> ClientError:
    """The error that a client would raise for a runtime's."""
    return stream_error({"error": to_json(api_error(error).record)})
