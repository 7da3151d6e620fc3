"""`RuntimeClient`: the UI's way to a runtime, over HTTP. Importing this needs neither torch nor httpx."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from app.errors import ClientError, ConnectionLostError, ProtocolError, answer_error
from models.progress import Progress

if TYPE_CHECKING:
    import httpx

CONNECT_S = 5.0
"""Longest wait for a connection."""
ANSWER_S = 30.0
"""Longest wait for a short answer."""
TURN_S = 600.0
"""Longest wait for an answer that has to wait for other requests."""
SILENCE_S = 60.0
"""Longest silence in a stream; the runtime sends a comment every few seconds."""
_STATUS_OF_CODE = {
    "model_not_found": 404,
    "busy": 409,
    "out_of_memory": 503,
    "backend_unavailable": 503,
    "model_unavailable": 503,
    "overloaded": 503,
    "cancelled": 503,
}
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What the runtime is doing and with what; fields about a model are None while none is loaded."""

    state: str
    """`empty`, `loading`, `ready`, `generating` or `failed`."""
    model: str | None
    """The model that is loaded, or being loaded."""
    backend: str | None
    """What runs it."""
    reason: str | None
    """Why that."""
    bits: float | None
    """Bits of its base weights."""
    kv: str | None
    """Precision of its KV cache."""
    k_chunk: Mapping[str, int] | None
    """Compensated channels per 1024, by layer type."""
    context: int | None
    """Tokens of context."""
    memory_bytes: int | None
    """Memory that the runtime process holds."""
    weight_bytes: int | None
    """Bytes of weights read for one token."""
    kv_bytes: int | None
    """Bytes of the KV cache."""
    waiting: int
    """Requests that wait for their turn."""
    pid: int
    """Process id of the runtime."""
    version: str
    """Version of the program that runs it."""
    error: Mapping[str, str | None] | None
    """Why the last load failed: message, type, param, code."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model that can be loaded."""

    name: str
    """Its name."""
    bits: int
    """Bits of its base weights."""
    bits_per_weight: float
    """Bits of all linear layers, scales included, divided by their weights."""
    disk_bytes: int
    """Size on disk."""
    gpu_bytes: int
    """Bytes that a device needs for the weights."""
    residual_bytes: int
    """Bytes of the residual codes."""
    parameters: int
    """Weights of the full-precision model."""
    family: str
    """Architecture."""
    context: int
    """Longest context in tokens."""
    bundled: bool
    """Whether it came with the program."""
    perplexity_before: float | None
    """Of the full-precision model, on a short text."""
    perplexity_after: float | None
    """Of the low-bit model, on the same text."""
    warning: str | None
    """What a person should know before using it."""
    loaded: bool
    """Whether it is loaded now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """What an answer cost."""

    ttft_s: float
    """Seconds from the request to the first token."""
    prefill_tokens_per_s: float
    """Speed of reading the prompt."""
    decode_tokens_per_s: float
    """Speed of writing the answer."""
    prompt_tokens: int
    """Tokens of the prompt."""
    cached_tokens: int
    """Of these, tokens that were in the cache still."""
    completion_tokens: int
    """Tokens of the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How an answer is drawn. None leaves it to the runtime."""

    model: str | None = None
    """Model that answers; None is the one that is loaded, or was loaded last through this client."""
    temperature: float | None = None
    """Spread of sampling; 0 takes the most likely token."""
    top_p: float | None = None
    """Share of probability sampled from."""
    top_k: int | None = None
    """Most tokens sampled from; 0 is all."""
    min_p: float | None = None
    """Least probability relative to the best."""
    repetition_penalty: float | None = None
    """Divides the logits of tokens seen before."""
    max_tokens: int | None = None
    """Most tokens of the answer."""
    seed: int | None = None
    """Makes draws repeatable."""
    stop: Sequence[str] | None = None
    """Texts that end the answer."""
    continue_final: bool = False
    """Whether the last message, the assistant's, is continued rather than answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDelta:
    """A piece of an answer."""

    text: str
    """What was added; maybe empty."""
    finish_reason: str | None = None
    """`stop` or `length`, in the last piece."""
    timings: Timings | None = None
    """In the last piece."""


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
        status = _record(Status, await self._json("GET", "/runtime/status"))
        self._model = status.model or self._model
        return status

    async def models(self) -> list[ModelEntry]:
        """The models that can be loaded."""
        body = await self._json("GET", "/runtime/models")
        return [_record(ModelEntry, item) for item in _items(body.get("models"))]

    async def load(self, model: str, **options: Any) -> AsyncGenerator[Progress, None]:
        """Load a model. The iterator's end means that it is loaded.

        Args:
            model: Its name.
            options: kv, k_chunk, context, backend; None leaves one to the runtime.
        """
        body = {"model": model, **_given(options)}
        async with aclosing(self._progress("/runtime/load", body)) as reports:
            async for progress in reports:
                yield progress
        self._model = model

    async def quantize(self, source: str, **options: Any) -> AsyncGenerator[Progress, None]:
        """Make a low-bit model. The last report has the phase `done`, and the new model's name as its message.

        Args:
            source: A checkpoint's folder, or its name on the hub.
            options: bits, method, group_size, residual_bits, name, force.
        """
        folder = Path(source).expanduser()
        if folder.is_dir():
            source = str(folder.absolute())  # the runtime's own working folder may be another
        async with aclosing(self._progress("/runtime/quantize", {"source": source, **_given(options)})) as reports:
            async for progress in reports:
                yield progress

    async def pull(self, name: str, revision: str | None = None) -> AsyncGenerator[Progress, None]:
        """Download a checkpoint. The last report has the phase `done`, and its folder as its message."""
        body = {"name": name, **_given({"revision": revision})}
        async with aclosing(self._progress("/runtime/pull", body)) as reports:
            async for progress in reports:
                yield progress

    async def remove(self, name: str) -> None:
        """Delete a stored model."""
        await self._json("POST", "/runtime/remove", {"name": name}, timeout_s=TURN_S)
        self._model = None if self._model == name else self._model

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
        asked = asdict(options)
        del asked["model"], asked["continue_final"]
        body = {"model": model, "messages": list(messages), "stream": True, **_given(asked)}
        if options.continue_final:
            body["continue_final_message"] = True
        finished = False
        async with aclosing(self._events("/v1/chat/completions", body)) as events:
            async for event in events:
                for choice in _items(event.get("choices")):
                    finished = finished or choice.get("finish_reason") is not None
                    yield _delta(choice, event.get("timings"))
        if not finished:
            raise ConnectionLostError("the answer broke off: the runtime stopped before the end")

    # Below: how requests and streams travel

    async def _json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float = ANSWER_S
    ) -> dict[str, Any]:
        """Ask for one JSON object."""
        import httpx

        with _translated():
            timeout = httpx.Timeout(timeout_s, connect=CONNECT_S)
            response = await self._http.request(method, path, json=body, timeout=timeout)
        return _object(_checked(response, response.content))

    async def _progress(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Progress, None]:
        """Reports of a long piece of work; raises where the stream ends without having said that it is done."""
        async with aclosing(self._events(path, body)) as events:
            async for event in events:
                if event.get("phase") != "done":
                    yield _record(Progress, event)
                    continue
                result = event.get("model")
                made = result.get("name") if isinstance(result, dict) else event.get("path")
                if isinstance(made, str):
                    yield Progress(phase="done", done=1, total=1, unit="", message=made)
                return
        raise ConnectionLostError("the work broke off: the runtime stopped before the end")

    async def _events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The JSON objects of a stream of events."""
        async with self._stream(path, body) as response:
            async with aclosing(_lines(response)) as lines:
                async for line in lines:
                    if not line.startswith("data:"):
                        continue
                    data = line.removeprefix("data:").strip()
                    if data == "[DONE]":
                        return
                    event = _object(data)
                    if "error" in event:
                        raise _error(None, event)
                    yield event

    @asynccontextmanager
    async def _stream(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[httpx.Response]:
        """A response whose body has not been read."""
        import httpx

        timeout = httpx.Timeout(SILENCE_S, connect=CONNECT_S)
        request = self._http.build_request("POST", path, json=body, timeout=timeout)
        with _translated():
            response = await self._http.send(request, stream=True)
        try:
            if response.is_error:
    XX            yield response
        finally:
            await response.aclose()


async def _lines(response: httpx.Response) -> AsyncGenerator[str, None]:
    """Lines of a stream as they come."""
    with _translated():
        async for line in response.aiter_lines():
            yield line


@contextmanager
def _translated() -> Iterator[None]:
    """Turn what the network does into errors of this program."""
    import httpx

    try:
        yield
    except httpx.TimeoutException as error:
        raise ConnectionLostError(f"the runtime does not answer ({type(error).__name__})") from error
    except httpx.TransportError as error:
        detail = f": {error}" if str(error) else ""
        raise ConnectionLostError(f"the runtime cannot be reached ({type(error).__name__}{detail})") from error
    except httpx.HTTPError as error:
        raise ProtocolError(f"the runtime's answer cannot be read: {error}") from error


def _checked(response: httpx.Response, content: bytes) -> bytes:
    """The body of an answer; an error status raises the error it tells."""
    if response.is_success:
        return content
    try:
        body = json.loads(content)
    except ValueError:
        body = None
    raise _error(response.status_code, body if isinstance(body, dict) else {})


def _error(status: int | None, body: Mapping[str, Any]) -> ClientError:
    """The error that an error object tells. In a stream, where there is no status, its code tells the kind."""
    found = body.get("error")
    fields_ = found if isinstance(found, dict) else {}
    message, param, code = fields_.get("message"), fields_.get("param"), fields_.get("code")
    if status is None:
        refusal = 400 if fields_.get("type") == "invalid_request_error" else 500
        status = _STATUS_OF_CODE.get(code if isinstance(code, str) else "", refusal)
    return answer_error(
        status,
        message if isinstance(message, str) and message else f"the runtime answered with status {status}",
        param=param if isinstance(param, str) else None,
        code=code if isinstance(code, str) else None,
    )


def _object(data: str | bytes) -> dict[str, Any]:
    """A JSON object."""
    try:
        body = json.loads(data)
    except ValueError as error:
        raise ProtocolError("the runtime answered with something that is not JSON") from error
    if not isinstance(body, dict):
        raise ProtocolError("the runtime answered with something that is not a JSON object")
    return body


def _items(value: object) -> list[dict[str, Any]]:
    """A list of JSON objects."""
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ProtocolError("the runtime's answer lacks a list that it should have")
    return value


def _record(kind: type[R], body: Mapping[str, Any]) -> R:
    """A dataclass from a JSON object; fields that this version does not know are left out."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    missing = [name for name in names if name not in body]
    if missing:
        raise ProtocolError(f"the runtime's answer lacks {', '.join(missing)}")
    return kind(**{name: body[name] for name in names})


def _delta(choice: Mapping[str, Any], timings: object) -> ChatDelta:
    """One choice of a chunk."""
    delta, finish = choice.get("delta"), choice.get("finish_reason")
    text = delta.get("content") if isinstance(delta, dict) else None
    return ChatDelta(
        text=text if isinstance(text, str) else "",
        finish_reason=finish if isinstance(finish, str) else None,
        timings=_record(Timings, timings) if isinstance(timings, dict) else None,
    )


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options that are not left open."""
    return {key: value for key, value in options.items() if value is not None}
