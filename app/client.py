"""`RuntimeClient`: the UI's HTTP client of a runtime. Importing this needs neither torch nor httpx."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.conversation import MAX_TEXT
from app.errors import ClientError, ConnectionLostError, ProtocolError
from app.language import _
from app.protocol import (
    AnswerLimits,
    ChatDelta,
    ChatOptions,
    check_place,
    event_data,
    read,
    read_body,
    read_delta,
    read_items,
    read_object,
    status_error,
    stream_error,
    translated,
)
from models.progress import Progress
from runtime.wire.answers import Caches, Holding, Loaded, ModelEntry, ModelList, Pulled, Quantized, Status
from runtime.wire.codec import to_json
from runtime.wire.requests import (
    ForgetRequest,
    Inspection,
    InspectRequest,
    LoadRequest,
    PullRequest,
    QuantizeRequest,
    RemoveRequest,
    TuneRequest,
)

if TYPE_CHECKING:
    import httpx

    from runtime.wire.device import DeviceReport, Prospect

PLAIN = "identity"
_COMPLETION = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed", "stop"),
    "response_format",
)
"""Options that a completion has, too."""
D = TypeVar("D", Loaded, Quantized, Pulled, Inspection)

CONNECT_S = 5.0
"""Maximum wait for a connection, in seconds."""
ANSWER_S = 30.0
"""Maximum wait for a short response, in seconds."""
TURN_S = 600.0
"""Maximum wait for a response that queues behind other requests, in seconds."""
SILENCE_S = 60.0
"""Maximum silence in a stream, in seconds; the runtime sends a comment every few seconds."""
MAX_BYTES = 2**24
"""Maximum size of a short response, or of one event of a stream."""


class RuntimeClient:
    """A client of a runtime. Closing an iterator that it returned cancels the work behind it.

    Methods raise errors of `app.errors`: ConnectionLostError if the runtime is gone, AnswerError for its refusals.
    """

    def __init__(self, base_url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Prepare a client without sending anything.

        Args:
            base_url: Address of the runtime, such as `http://127.0.0.1:43210`.
            token: Bearer token from the lock file.
            transport: Replaces the network in tests.
        """
        import httpx

        self.base_url = base_url
        self.silence_s = SILENCE_S
        self.patience_s: float | None = None
        """Maximum wait in seconds for an event in a stream that is not silent; None for no limit."""
        self.who = _("the runtime")
        """Its name in error messages."""
        self._model: str | None = None
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            transport=transport,
            trust_env=False,  # loopback needs no proxy, and the token must not reach one
        )

    async def aclose(self) -> None:
        """Close the connection. Safe to call twice."""
        await self._http.aclose()

    async def status(self) -> Status:
        """The runtime's state, model and device."""
        status = read(Status, await self._json("GET", "/runtime/status"))
        self._model = status.model or self._model
        return status

    async def models(self) -> Sequence[ModelEntry]:
        """The models that can be loaded."""
        return read(ModelList, await self._json("GET", "/runtime/models")).models

    async def load(self, request: LoadRequest) -> AsyncGenerator[Progress, None]:
        """Load a model. The iterator's end means that it is loaded."""
        async with aclosing(self._progress("/runtime/load", request, Loaded)) as reports:
            async for progress in reports:
                if isinstance(progress, Progress):
                    yield progress
        self._model = request.model

    async def tune(self, request: TuneRequest) -> AsyncGenerator[Progress, None]:
        """Change the compensation of the loaded model. The iterator's end means that it is applied."""
        async with aclosing(self._progress("/runtime/tune", request, Loaded)) as reports:
            async for progress in reports:
                if isinstance(progress, Progress):
                    yield progress

    async def device(self) -> DeviceReport:
        """The device, and how the loaded model is tuned to it."""
        from runtime.wire.device import DeviceReport

        return read(DeviceReport, await self._json("GET", "/runtime/device"))

    async def prospects(self) -> Sequence[Prospect]:
        """The models that can be downloaded, judged for this machine as it is now."""
        from runtime.wire.device import ProspectList

        return read(ProspectList, await self._json("GET", "/runtime/prospects")).prospects

    async def quantize(self, request: QuantizeRequest) -> AsyncGenerator[Progress, None]:
        """Quantize a model. The last report has the phase `done` and the new model's name as its message."""
        request = replace(request, source=_absolute(request.source))
        async with aclosing(self._progress("/runtime/quantize", request, Quantized)) as reports:
            async for progress in reports:
                yield progress if isinstance(progress, Progress) else _done(progress.model.name)

    async def pull(self, request: PullRequest) -> AsyncGenerator[Progress, None]:
        """Download a checkpoint. The last report has the phase `done` and its folder as its message."""
        async with aclosing(self._progress("/runtime/pull", request, Pulled)) as reports:
            async for progress in reports:
                yield progress if isinstance(progress, Progress) else _done(progress.path)

    async def remove(self, name: str) -> None:
        await self._json("POST", "/runtime/remove", RemoveRequest(name=name), timeout_s=TURN_S)
        self._model = None if self._model == name else self._model

    async def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """Inspect the model's distribution at each token of an answer: progress reports, then the result."""
        async with aclosing(self._progress("/runtime/inspect", request, Inspection)) as reports:
            async for report in reports:
                yield report

    async def caches(self) -> Caches:
        """The conversations' caches on disk, and what each kind of cache costs for the loaded model."""
        return read(Caches, await self._json("GET", "/runtime/caches"))

    async def forget(self, chat: str | None = None) -> Holding:
        """Delete a conversation's caches in memory and on disk.

        Args:
            chat: The conversation's name, as in `ChatOptions`; None for all conversations.

        Returns:
            What was deleted from disk.
        """
        return read(Holding, await self._json("POST", "/runtime/forget", ForgetRequest(chat=chat), timeout_s=TURN_S))

    async def unload(self) -> None:
        await self._json("POST", "/runtime/unload", {}, timeout_s=TURN_S)

    async def shutdown(self) -> None:
        """Ask the runtime process to end."""
        await self._json("POST", "/runtime/shutdown", {})

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> AsyncGenerator[ChatDelta, None]:
        """Generate an answer to a conversation.

        Args:
            messages: `{"role": ..., "content": ...}`, with `tool_calls` and their results.
            options: Sampling options.
        """
        model = await self._named(options)
        asked = {key: value for key, value in asdict(options).items() if value is not None}
        if "chat" in asked:
            asked["prompt_cache_key"] = asked.pop("chat")
        if asked.pop("continue_final"):
            asked |= {"continue_final_message": True, "add_generation_prompt": False}  # vLLM and SGLang require both
        body = {**asked, "messages": list(messages)}
        async with aclosing(self._answer("/v1/chat/completions", body, model)) as deltas:
            async for delta in deltas:
                yield delta

    async def complete(self, text: str, options: ChatOptions) -> AsyncGenerator[ChatDelta, None]:
        """Continue a text as it is, without a chat template."""
        given = {name: value for name in _COMPLETION if (value := getattr(options, name)) is not None}
        asked = {"max_tokens": -1, **given}  # as in a chat: up to the end of the context
        body = {**asked, "prompt": text}
        async with aclosing(self._answer("/v1/completions", body, await self._named(options))) as deltas:
            async for delta in deltas:
                yield delta

    async def _named(self, options: ChatOptions) -> str:
        """The model that is to answer."""
        model = options.model or self._model or (await self.status()).model
        if model is None:
            raise ClientError(_("no model is loaded; load one first"))
        return model

    async def _answer(self, path: str, asked: Mapping[str, Any], model: str) -> AsyncGenerator[ChatDelta, None]:
        """The pieces of a streamed answer; raises if it ends early, or never."""
        finished, length, limits = False, 0, AnswerLimits(self.who, self.patience_s)
        async with aclosing(self._events(path, {**asked, "model": model, "stream": True})) as events:
            async for event in events:
                choices = read_items(event.get("choices"))
                limits.check(choices)
                for choice in choices:
                    finished = finished or choice.get("finish_reason") is not None
                    delta = read_delta(choice, event.get("timings"), event.get("model"))
                    limits.count(delta.calls)
                    length += len(delta.text) + sum(1 + len(call.arguments) for call in delta.calls)
                    if length > MAX_TEXT:
                        raise ProtocolError(
                            _(
                                "{who} sent an endless answer: more than {most:,} characters",
                                who=self.who,
                                most=MAX_TEXT,
                            )
                        )
                    yield delta
        if not finished:
            raise ConnectionLostError(_("the answer was cut off: {who} stopped before the end", who=self.who))

    # Transport of requests and streams

    async def _json(
        self, method: str, path: str, request: object = None, *, timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """Send a record and return the JSON object of the response."""
        body = None if request is None else to_json(request)
        with translated(self.who):
            async with asyncio.timeout(timeout_s), self._sent(method, path, body, timeout_s) as response:
                content = await read_body(response, MAX_BYTES)
        if len(content) > MAX_BYTES:
            raise ProtocolError(_("the response of {who} exceeds {most:,} bytes", who=self.who, most=MAX_BYTES))
        return read_object(content)

    async def _progress(self, path: str, request: object, end: type[D]) -> AsyncGenerator[Progress | D, None]:
        """Progress reports of a job, then its result; raises if the stream ends early."""
        async with aclosing(self._events(path, to_json(request))) as events:
            async for event in events:
                if event.get("phase") == "done":
                    yield read(end, event)
                    return
                yield read(Progress, event)
        raise ConnectionLostError(_("the work was cut off: {who} stopped before the end", who=self.who))

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of a stream of events."""
        async with (
            self._sent("POST", path, body, self.silence_s) as response,
            aclosing(
                event_data(response, self.who, most=MAX_BYTES, silence_s=self.silence_s, patience_s=self.patience_s)
            ) as events,
        ):
            async for data in events:
                if data == "[DONE]":
                    return
                event = read_object(data)
                if "error" in event:
                    raise stream_error(event)
                yield event

    @asynccontextmanager
    async def _sent(self, method: str, path: str, body: object, silence_s: float) -> AsyncIterator[httpx.Response]:
        """A response with an unread body. Compression is refused, since a few compressed bytes can fill the memory."""
        import httpx

        request = self._http.build_request(
            method,
            path,
            json=body,
            headers={"Accept-Encoding": PLAIN},
            timeout=httpx.Timeout(None, connect=CONNECT_S),  # how long to wait for data is decided by who reads it
        )
        with translated(self.who):
            async with asyncio.timeout(silence_s):
                response = await self._http.send(request, stream=True)
        try:
            self._http.cookies.clear()  # servers must not set cookies
            check_place(response, self.who)
            if (packed := response.headers.get("content-encoding", "").strip().lower()) not in ("", PLAIN):
                raise ProtocolError(
                    _(
                        "{who} compresses its responses ({packed}) although it was asked not to",
                        who=self.who,
                        packed=packed[:40],
                    )
                )
            if response.is_error:
                with translated(self.who):
                    async with asyncio.timeout(ANSWER_S):
                        content = await read_body(response, MAX_BYTES)
                raise status_error(response.status_code, content)
            yield response
        finally:
            await response.aclose()


def _done(made: str) -> Progress:
    return Progress(phase="done", done=1, total=1, unit="", message=made)


def _absolute(source: str) -> str:
    """The absolute path of a folder, since the runtime's working folder may differ; anything else unchanged."""
    folder = Path(source).expanduser()
    return str(folder.absolute()) if folder.is_dir() else source
