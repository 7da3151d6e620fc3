"""`RuntimeClient`: the UI's way to a runtime, over HTTP. Importing this needs neither torch nor httpx."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.errors import ClientError, ConnectionLostError, ProtocolError
from app.protocol import ChatDelta, ChatOptions, read, read_delta, read_items, read_object, status_error, stream_error
from models.progress import Progress
from runtime.wire.answers import Caches, Holding, Loaded, ModelEntry, ModelList, Pulled, Quantized, Status
from runtime.wire.codec import to_json
from runtime.wire.inspection import Inspection, InspectRequest
from runtime.wire.requests import (
    ForgetRequest,
    LoadRequest,
    PullRequest,
    QuantizeRequest,
    RemoveRequest,
    TuneRequest,
)

if TYPE_CHECKING:
    import httpx

    from runtime.wire.device import DeviceReport
    from runtime.wire.prospects import Prospect

D = TypeVar("D", Loaded, Quantized, Pulled, Inspection)

CONNECT_S = 5.0
"""Longest wait for a connection."""
ANSWER_S = 30.0
"""Longest wait for a short answer."""
TURN_S = 600.0
"""Longest wait for an answer that has to wait for other requests."""
SILENCE_S = 60.0
"""Longest silence in a stream; the runtime sends a comment every few seconds."""


class RuntimeClient:
    """A connection to a runtime. Closing an iterator it gave cancels the work behind it.

    Methods raise errors of `app.errors`: ConnectionLostError where the runtime is gone, AnswerError for its refusals.
    """

    def __init__(self, base_url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Prepare a connection; nothing is sent yet.

        Args:
            base_url: Where the runtime listens, `http://127.0.0.1:43210`.
            token: Bearer token of the lock file.
            transport: Takes the place of the network in tests.
        """
        import httpx

        self.base_url = base_url
        self.silence_s = SILENCE_S
        self.who = "the runtime"
        """What it is called where something goes wrong."""
        self._model: str | None = None
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S),
            transport=transport,
            trust_env=False,  # loopback is never reached through a proxy, and the token must not go to one
        )

    async def aclose(self) -> None:
        """Close the connection. Safe to call twice."""
        await self._http.aclose()

    async def status(self) -> Status:
        """What the runtime is doing and with what."""
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
        """The device that runs models, and how the loaded model was tuned to it."""
        from runtime.wire.device import DeviceReport

        return read(DeviceReport, await self._json("GET", "/runtime/device"))

    async def prospects(self) -> Sequence[Prospect]:
        """The models that can be fetched, seen from this machine as it is now."""
        from runtime.wire.prospects import ProspectList

        return read(ProspectList, await self._json("GET", "/runtime/prospects")).prospects

    async def quantize(self, request: QuantizeRequest) -> AsyncGenerator[Progress, None]:
        """Make a low-bit model. The last report has the phase `done`, and the new model's name as its message."""
        request = replace(request, source=_absolute(request.source))
        async with aclosing(self._progress("/runtime/quantize", request, Quantized)) as reports:
            async for progress in reports:
                yield progress if isinstance(progress, Progress) else _done(progress.model.name)

    async def pull(self, request: PullRequest) -> AsyncGenerator[Progress, None]:
        """Download a checkpoint. The last report has the phase `done`, and its folder as its message."""
        async with aclosing(self._progress("/runtime/pull", request, Pulled)) as reports:
            async for progress in reports:
                yield progress if isinstance(progress, Progress) else _done(progress.path)

    async def remove(self, name: str) -> None:
        """Delete a stored model."""
        await self._json("POST", "/runtime/remove", RemoveRequest(name=name), timeout_s=TURN_S)
        self._model = None if self._model == name else self._model

    async def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """What the model thought at each token of an answer: reports, then that."""
        async with aclosing(self._progress("/runtime/inspect", request, Inspection)) as reports:
            async for report in reports:
                yield report

    async def caches(self) -> Caches:
        """What is on disk of conversations' caches, and what each kind of cache means for the loaded model."""
        return read(Caches, await self._json("GET", "/runtime/caches"))

    async def forget(self, chat: str | None = None) -> Holding:
        """Delete what memory and disk hold of a conversation.

        Args:
            chat: Its name, as in `ChatOptions`; None: all conversations.

        Returns:
            What was deleted from disk.
        """
        return read(Holding, await self._json("POST", "/runtime/forget", ForgetRequest(chat=chat), timeout_s=TURN_S))

    async def unload(self) -> None:
        """Unload the model."""
        await self._json("POST", "/runtime/unload", {}, timeout_s=TURN_S)

    async def shutdown(self) -> None:
        """Ask the runtime process to end."""
        await self._json("POST", "/runtime/shutdown", {})

    async def chat(
        self, messages: Sequence[Mapping[str, str]], options: ChatOptions
    ) -> AsyncGenerator[ChatDelta, None]:
        """Have a conversation answered.

        Args:
            messages: `{"role": ..., "content": ...}`.
            options: How the answer is drawn.
        """
        model = options.model or self._model or (await self.status()).model
        if model is None:
            raise ClientError("no model is loaded: load one first")
        asked = {key: value for key, value in asdict(options).items() if value is not None}
        if "chat" in asked:
            asked["prompt_cache_key"] = asked.pop("chat")
        if asked.pop("continue_final"):
            asked |= {"continue_final_message": True, "add_generation_prompt": False}  # vLLM and SGLang want both
        body = {**asked, "model": model, "messages": list(messages), "stream": True}
        finished = False
        async with aclosing(self._events("/v1/chat/completions", body)) as events:
            async for event in events:
                for choice in read_items(event.get("choices")):
                    finished = finished or choice.get("finish_reason") is not None
                    yield read_delta(choice, event.get("timings"), event.get("model"))
        if not finished:
            raise ConnectionLostError(f"the answer broke off: {self.who} stopped before the end")

    # Below: how requests and streams travel

    async def _json(
        self, method: str, path: str, request: object = None, *, timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """Ask for one JSON object with a record."""
        import httpx

        with _translated(self.who):
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
            body = None if request is None else to_json(request)
            response = await self._http.request(method, path, json=body, timeout=timeout)
        if response.is_error:
            raise status_error(response.status_code, response.content)
        return read_object(response.content)

    async def _progress(self, path: str, request: object, end: type[D]) -> AsyncGenerator[Progress | D, None]:
        """Reports of a long piece of work, then its end; raises where the stream ends before that."""
        async with aclosing(self._events(path, to_json(request))) as events:
            async for event in events:
                if event.get("phase") == "done":
                    yield read(end, event)
                    return
                yield read(Progress, event)
        raise ConnectionLostError(f"the work broke off: {self.who} stopped before the end")

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of a stream of events."""
        async with self._stream(path, body) as response, aclosing(_lines(response, self.who)) as lines:
            async for line in lines:
                if not line.startswith("data:"):
                    continue
                data = line.removeprefix("data:").strip()
                if data == "[DONE]":
                    return
                event = read_object(data)
                if "error" in event:
                    raise stream_error(event)
                yield event

    @asynccontextmanager
    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """A response whose body has not been read."""
        import httpx

        timeout = httpx.Timeout(self.silence_s, connect=CONNECT_S)
        request = self._http.build_request("POST", path, json=body, timeout=timeout)
        with _translated(self.who):
            response = await self._http.send(request, stream=True)
        try:
            if response.is_error:
                with _translated(self.who):
                    content = await response.aread()
                raise status_error(response.status_code, content)
            yield response
        finally:
            await response.aclose()


def _done(made: str) -> Progress:
    return Progress(phase="done", done=1, total=1, unit="", message=made)


def _absolute(source: str) -> str:
    """A folder's full path, for the runtime's own working folder may be another; anything else as it is."""
    folder = Path(source).expanduser()
    return str(folder.absolute()) if folder.is_dir() else source


async def _lines(response: httpx.Response, who: str) -> AsyncGenerator[str, None]:
    """Lines of a stream as they come."""
    with _translated(who):
        async for line in response.aiter_lines():
            yield line


@contextmanager
def _translated(who: str) -> Iterator[None]:
    """Turn what the network does into errors of this program.

    Args:
        who: what the other side is called.
    """
    import httpx

    try:
        yield
    except httpx.TimeoutException as error:
        raise ConnectionLostError(f"{who} does not answer ({type(error).__name__})") from error
    except httpx.TransportError as error:
        detail = f": {error}" if str(error) else ""
        raise ConnectionLostError(f"{who} cannot be reached ({type(error).__name__}{detail})") from error
    except httpx.HTTPError as error:
        raise ProtocolError(f"the answer of {who} cannot be read: {error}") from error
