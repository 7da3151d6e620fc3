"""A remote OpenAI-compatible server (vLLM, SGLang, llama.cpp and others) in place of the UI's own runtime.

It answers chats with its own models. Our own runtime's other functions (quantize, tune, measure, inspect) are
not available.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from app.client import CONNECT_S, TURN_S, RuntimeClient
from app.documents.prompt import material
from app.errors import AccessError, ClientError, ContextLengthError, NotFoundError, RequestRefusedError
from app.language import _
from app.network import host_of
from app.protocol import MAX_NAME, ChatDelta, ChatOptions, read_items
from runtime.system.foreign import read_json
from runtime.system.hosts import is_loopback
from runtime.text.reasoning import outside_tags
from runtime.wire.answers import Caches, Holding, ModelEntry, Status

if TYPE_CHECKING:
    import httpx

    from models.progress import Progress
    from runtime.wire.device import DeviceReport, Prospect
    from runtime.wire.requests import Inspection, InspectRequest, LoadRequest, PullRequest, QuantizeRequest, TuneRequest

BACKEND = "remote"
"""The backend name of a remote server in `Status`."""
MAX_MODELS = 10_000
"""Maximum number of a server's models that are listed."""
MAX_CONTEXT = 2**40
"""Maximum plausible context of a server in tokens."""
TOO_LONG = ("context length", "context size")
"""Phrases with which vLLM, SGLang and llama.cpp refuse too long prompts; none of them sends OpenAI's code."""


def endpoint_problem(url: str, token: str) -> str | None:
    """Why an address is invalid, or unsafe to send a token to; None if it is fine."""
    try:
        parts = urlsplit(url)
        _port = parts.port
    except ValueError:
        return _("the endpoint is not an address; correct the host and port")
    if parts.username or parts.password or parts.query or parts.fragment:
        return _("the address must not contain a password or a query; the token has its own setting")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return _("the endpoint is not an address; enter http:// or https:// and a host")
    if not (token.isascii() and token.isprintable()) or token != token.strip():
        return _("the token may contain only visible ASCII characters")
    if token and parts.scheme == "http" and not is_loopback(parts.hostname):
        return _(
            "the token would be sent to {host} unencrypted; use https://, a tunnel from localhost, or no token",
            host=parts.netloc,
        )
    return None


def _inert_message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message without control tokens, but for what the user wrote and the tags around an answer's reasoning."""
    if message["role"] not in ("assistant", "tool"):
        return message
    return {**_inert(message), "content": outside_tags(message["content"], material)}


def _inert(value: Any) -> Any:
    """Data without control tokens; an escape in JSON may be one too."""
    if isinstance(value, str):
        return material(value)
    if isinstance(value, Mapping):
        return {material(key): (_inert_json if key == "arguments" else _inert)(inside) for key, inside in value.items()}
    return [_inert(inside) for inside in value] if isinstance(value, list | tuple) else value


def _inert_json(arguments: Any) -> Any:
    try:
        parsed = read_json(arguments)
    except (TypeError, ValueError):
        return _inert(arguments)
    return arguments if (inert := _inert(parsed)) == parsed else json.dumps(inert, ensure_ascii=False)


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


class RemoteClient(RuntimeClient):
    """A client of a remote server."""

    def __init__(self, url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Prepare a client without sending anything.

        Args:
            url: The server's address, with or without `/v1`.
            token: Bearer token; empty for none.
            transport: Replaces the network in tests.
        """
        import httpx

        self.base_url = _base(url)
        self._model: str | None = None
        self._contexts: Mapping[str, int | None] = {}
        self._host = host_of(url)
        self.who = _("the server at {host}", host=self._host)
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(TURN_S, connect=CONNECT_S),
            transport=transport,
            follow_redirects=False,  # the token and the messages are for this server only
            trust_env=not is_loopback(urlsplit(url).hostname or ""),  # see RuntimeClient
        )
        self.silence_s = self.patience_s = TURN_S  # few servers send keep-alives while they process a long prompt

    async def _names(self) -> Sequence[str]:
        """The names of the server's models; stores their context lengths, if reported."""
        try:
            listed = read_items((await self._json("GET", "/v1/models")).get("data"))
        except ClientError as error:
            raise self._rephrased(error) from error
        lengths = {
            one["id"]: one.get("max_model_len")
            for one in listed[:MAX_MODELS]
            if isinstance(one.get("id"), str) and 0 < len(one["id"]) <= MAX_NAME
        }
        self._contexts = {
            name: length if type(length) is int and 0 < length <= MAX_CONTEXT else None
            for name, length in lengths.items()
        }
        return list(self._contexts)

    async def status(self) -> Status:
        """The status, with the chosen model or else the server's first."""
        names = await self._names()
        if self._model not in names:
            self._model = names[0] if names else None
        if self._model is None:
            return Status(state="empty", backend=f"{BACKEND} · {self._host}")
        return Status(
            state="ready", model=self._model, backend=f"{BACKEND} · {self._host}", context=self._contexts[self._model]
        )

    async def models(self) -> Sequence[ModelEntry]:
        """The server's models; only their names are known."""
        return [
            ModelEntry(
                name=name,
                bits=0,
                bits_per_weight=0,
                disk_bytes=0,
                gpu_bytes=0,
                residual_bytes=0,
                parameters=0,
                family="",
                context=self._contexts[name] or 0,
                loaded=name == self._model,
            )
            for name in await self._names()
        ]

    async def load(self, request: LoadRequest) -> AsyncGenerator[Progress, None]:
        """Use one of the server's models from now on."""
        names = await self._names()
        if request.model not in names:
            has = _("it has {names}", names=", ".join(names)) if names else _("it has none")
            raise ClientError(_("{host} has no model {model}: {has}", host=self._host, model=request.model, has=has))
        self._model = request.model
        return
        yield  # type: ignore[unreachable]  # makes a generator

    async def tune(self, request: TuneRequest) -> AsyncGenerator[Progress, None]:  # noqa: ARG002  the protocol has it
        """Do nothing; a remote server can't be tuned."""
        return
        yield  # type: ignore[unreachable]

    async def device(self) -> DeviceReport:
        raise self._refused(_("device reports"))

    async def quantize(self, request: QuantizeRequest) -> AsyncGenerator[Progress, None]:
        raise self._refused(_("quantizing {source}", source=request.source))
        yield  # type: ignore[unreachable]

    async def pull(self, request: PullRequest) -> AsyncGenerator[Progress, None]:
        raise self._refused(_("downloading {name}", name=request.name))
        yield  # type: ignore[unreachable]

    async def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        raise self._refused(_("inspecting {model}", model=request.model))
        yield  # type: ignore[unreachable]

    async def prospects(self) -> Sequence[Prospect]:
        """No models; a remote server downloads none for us."""
        return ()

    async def remove(self, name: str) -> None:
        raise self._refused(_("deleting {name}", name=name))

    async def caches(self) -> Caches:
        """No caches; nothing is known about them."""
        return Caches(files=0, bytes=0, kinds={})

    async def forget(self, chat: str | None = None) -> Holding:
        """Do nothing; the server never sees a chat's name."""
        del chat
        return Holding()

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], options: ChatOptions
    ) -> AsyncGenerator[ChatDelta, None]:
        """Generate an answer. Only options that servers understand and that have an effect are sent."""
        plain = replace(
            options,
            chat=None,
            tools=_inert(options.tools),
            top_k=options.top_k or None,
            min_p=options.min_p or None,
            repetition_penalty=None if options.repetition_penalty == 1 else options.repetition_penalty,
        )
        try:
            async with aclosing(super().chat([*map(_inert_message, messages)], plain)) as deltas:
                async for delta in deltas:
                    yield delta
        except ClientError as error:
            raise self._rephrased(error) from error

    def _refused(self, what: str) -> ClientError:
        return ClientError(_("the server at {host} does not support {what}", host=self._host, what=what))

    def _rephrased(self, error: ClientError) -> ClientError:
        """The error, rephrased for a remote server."""
        if isinstance(error, AccessError):
            return ClientError(_("{host} rejected the token; set the right one (^P, Endpoint)", host=self._host))
        if isinstance(error, NotFoundError):
            return ClientError(
                _(
                    "{host} is not OpenAI-compatible at this address, or lacks the model: {error}",
                    host=self._host,
                    error=error,
                )
            )
        if isinstance(error, RequestRefusedError) and any(words in str(error) for words in TOO_LONG):
            return ContextLengthError(str(error), status=error.status, param=error.param, code=error.code)
        return error


class RemoteSupervisor:
    """Implements `app.tui.runtime.SupervisorLike`: connects, but starts and stops nothing."""

    remedy = _("try again when it is back")

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._client: RemoteClient | None = None

    async def ensure(self) -> RemoteClient:
        """A client.

        Raises:
            ClientError: the address is invalid or unsafe for the token, or nothing responds there.
        """
        if (problem := endpoint_problem(self._url, self._token)) is not None:
            raise ClientError(problem)
        if self._client is None:
            self._client = RemoteClient(self._url, self._token)
        await self._client.status()
        return self._client

    async def restart(self) -> RemoteClient:
        await self.close()
        return await self.ensure()

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def crash_report(self) -> str | None:
        """Why it does not respond."""
        return _("the server at {url} does not respond", url=host_of(self._url))
