"""A server elsewhere that speaks OpenAI's protocol, vLLM, SGLang, llama.cpp or another one, as the runtime of the UI.

It answers chats with the models that it has. What only our own runtime does (load, quantize, tune, measure, inspect) it
does not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from app.client import CONNECT_S, TURN_S, RuntimeClient
from app.errors import AccessError, ClientError, ContextLengthError, NotFoundError, RequestRefusedError
from app.protocol import ChatDelta, ChatOptions, read_items
from runtime.wire.answers import Caches, Holding, ModelEntry, Status

if TYPE_CHECKING:
    import httpx

    from models.progress import Progress
    from runtime.wire.device import DeviceReport
    from runtime.wire.inspection import Inspection, InspectRequest
    from runtime.wire.prospects import Prospect
    from runtime.wire.requests import LoadRequest, PullRequest, QuantizeRequest, TuneRequest

BACKEND = "remote"
"""What a status calls a server elsewhere."""
TOO_LONG = ("context length", "context size")
"""Words in which servers refuse what does not fit: vLLM and SGLang, and llama.cpp. None of them sends OpenAI's code."""


def endpoint_problem(url: str) -> str | None:
    """Why an address is none of a server, in words; None if it may be one."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        return f"{url} is not an address: {error}"
    if parts.scheme not in ("http", "https") or not parts.hostname:
        return f"{url} is not an address: it begins with http:// or https:// and names a host"
    if parts.username or parts.password:
        return "the address must not hold a password; the token has a setting of its own"
    return None


def host_of(url: str) -> str:
    """What a server is called: its host, with the port if one is given."""
    return urlsplit(url).netloc


def _base(url: str) -> str:
    return url.rstrip("/").removesuffix("/v1")


class RemoteClient(RuntimeClient):
    """A connection to a server elsewhere."""

    def __init__(self, url: str, token: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        """Prepare a connection; nothing is sent yet.

        Args:
            url: The server's address, with or without `/v1`.
            token: Bearer token; empty: none.
            transport: Takes the place of the network in tests.
        """
        import httpx

        self.base_url = _base(url)
        self._model: str | None = None
        self._contexts: Mapping[str, int | None] = {}
        self._host = host_of(url)
        self.who = f"the server at {self._host}"
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=httpx.Timeout(TURN_S, connect=CONNECT_S),
            transport=transport,
        )
        self.silence_s = TURN_S  # few servers send a sign of life while they read a long prompt

    async def _names(self) -> Sequence[str]:
        """The server's models; remembers how much fits each, where it says so."""
        try:
            listed = read_items((await self._json("GET", "/v1/models")).get("data"))
        except ClientError as error:
            raise self._told(error) from error
        names = [one["id"] for one in listed if isinstance(one.get("id"), str)]
        lengths = {one.get("id"): one.get("max_model_len") for one in listed}
        self._contexts = {
            name: length if isinstance(length := lengths[name], int) and length > 0 else None for name in names
        }
        return names

    async def status(self) -> Status:
        """The model that answers: the one that was chosen, else the server's first."""
        names = await self._names()
        if self._model not in names:
            self._model = names[0] if names else None
        if self._model is None:
            return Status(state="empty", backend=f"{BACKEND} · {self._host}")
        return Status(
            state="ready", model=self._model, backend=f"{BACKEND} · {self._host}", context=self._contexts[self._model]
        )

    async def models(self) -> Sequence[ModelEntry]:
        """The server's models, of which no more than their names is known."""
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
        """Let one of the server's models answer from now on."""
        names = await self._names()
        if request.model not in names:
            has = f"it has {', '.join(names)}" if names else "it has none"
            raise ClientError(f"{self._host} has no model {request.model}: {has}")
        self._model = request.model
        return
        yield  # type: ignore[unreachable]  # makes a generator

    async def tune(self, request: TuneRequest) -> AsyncGenerator[Progress, None]:  # noqa: ARG002  the protocol has it
        """There is nothing to tune."""
        return
        yield  # type: ignore[unreachable]

    async def device(self) -> DeviceReport:
        """Refused."""
        raise self._refused("the device")

    async def quantize(self, request: QuantizeRequest) -> AsyncGenerator[Progress, None]:
        """Refused."""
        raise self._refused(f"quantizing {request.source}")
        yield  # type: ignore[unreachable]

    async def pull(self, request: PullRequest) -> AsyncGenerator[Progress, None]:
        """Refused."""
        raise self._refused(f"getting {request.name}")
        yield  # type: ignore[unreachable]

    async def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """Refused."""
        raise self._refused(f"looking into {request.model}")
        yield  # type: ignore[unreachable]

    async def prospects(self) -> Sequence[Prospect]:
        """Nothing is fetched there from here."""
        return ()

    async def remove(self, name: str) -> None:
        """Refused."""
        raise self._refused(f"deleting {name}")

    async def caches(self) -> Caches:
        """Nothing is known of them."""
        return Caches(files=0, bytes=0, kinds={})

    async def forget(self, chat: str | None = None) -> Holding:
        """Nothing is kept under a chat's name: it is never sent."""
        del chat
        return Holding()

    async def chat(
        self, messages: Sequence[Mapping[str, str]], options: ChatOptions
    ) -> AsyncGenerator[ChatDelta, None]:
        """Have a conversation answered. Only what servers understand is sent, and nothing that means nothing."""
        plain = replace(
            options,
            chat=None,
            top_k=options.top_k or None,
            min_p=options.min_p or None,
            repetition_penalty=None if options.repetition_penalty == 1 else options.repetition_penalty,
        )
        try:
            async with aclosing(super().chat(messages, plain)) as deltas:
                async for delta in deltas:
                    yield delta
        except ClientError as error:
            raise self._told(error) from error

    def _refused(self, what: str) -> ClientError:
        return ClientError(f"{what} is up to the server at {self._host}")

    def _told(self, error: ClientError) -> ClientError:
        """The same error, in words about the server."""
        if isinstance(error, AccessError):
            return ClientError(f"{self._host} refuses the token: give it the right one (^P, Endpoint)")
        if isinstance(error, NotFoundError):
            return ClientError(f"{self._host} does not speak OpenAI's protocol there, or lacks the model: {error}")
        if isinstance(error, RequestRefusedError) and any(words in str(error) for words in TOO_LONG):
            return ContextLengthError(str(error), status=error.status, param=error.param, code=error.code)
        return error


class RemoteSupervisor:
    """Fulfils `app.tui.runtime.SupervisorLike`: connects, starts nothing, ends nothing."""

    remedy = "ask again once it is there"

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._client: RemoteClient | None = None

    async def ensure(self) -> RemoteClient:
        """A connection.

        Raises:
            ClientError: the address is none, or nothing answers there.
        """
        if (problem := endpoint_problem(self._url)) is not None:
            raise ClientError(problem)
        if self._client is None:
            self._client = RemoteClient(self._url, self._token)
        await self._client.status()
        return self._client

    async def restart(self) -> RemoteClient:
        """A new connection."""
        await self.close()
        return await self.ensure()

    async def close(self) -> None:
        """Hang up."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def crash_report(self) -> str | None:
        """Why it does not answer."""
        return f"the server at {host_of(self._url)} does not answer"
