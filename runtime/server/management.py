"""Management interface `/runtime/*`, for the UI. Every request needs the lock file's token."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from models.catalogue import CATALOGUE
from models.progress import Progress
from runtime.errors import RequestError
from runtime.server.bodies import INVALID, MISSING, Events, Reader, json_answer, read_object, refused, sse
from runtime.server.errors import unknown_model
from runtime.server.service import Service
from runtime.wire.answers import Caches, Loaded, ModelEntry, ModelList, Pulled, Quantized
from runtime.wire.codec import WireError, from_json, to_json
from runtime.wire.device import Prospect, ProspectList
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

R = TypeVar("R")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ManagementInterface:
    service: Service
    ping_s: float
    reader: Reader
    shutdown: Callable[[], None]
    """Stops the server after the response."""

    def routes(self) -> list[Route]:
        return [
            Route("/runtime/status", self.status, methods=["GET"]),
            Route("/runtime/models", self.models, methods=["GET"]),
            Route("/runtime/device", self.device, methods=["GET"]),
            Route("/runtime/prospects", self.prospects, methods=["GET"]),
            Route("/runtime/load", self.load, methods=["POST"]),
            Route("/runtime/tune", self.tune, methods=["POST"]),
            Route("/runtime/unload", self.unload, methods=["POST"]),
            Route("/runtime/quantize", self.quantize, methods=["POST"]),
            Route("/runtime/pull", self.pull, methods=["POST"]),
            Route("/runtime/remove", self.remove, methods=["POST"]),
            Route("/runtime/caches", self.caches, methods=["GET"]),
            Route("/runtime/forget", self.forget, methods=["POST"]),
            Route("/runtime/inspect", self.inspect, methods=["POST"]),
            Route("/runtime/shutdown", self.stop, methods=["POST"]),
        ]

    async def status(self, _request: Request) -> Response:
        return json_answer(to_json(self.service.status()))

    async def models(self, _request: Request) -> Response:
        entries = await asyncio.to_thread(self.service.catalogue.entries)
        return json_answer(to_json(ModelList(models=[self._entry(entry) for entry in entries])))

    async def load(self, request: Request) -> Response:
        wanted = await self._read(request, LoadRequest)
        _check(wanted)
        if await asyncio.to_thread(self.service.catalogue.find, wanted.model) is None:
            raise unknown_model(wanted.model)
        return await self._stream(self._done(self.service.load(wanted)))

    async def tune(self, request: Request) -> Response:
        wanted = await self._read(request, TuneRequest)
        _check(wanted)
        return await self._stream(self._done(self.service.tune(wanted)))

    async def device(self, _request: Request) -> Response:
        return json_answer(to_json(await asyncio.to_thread(self.service.device)))

    async def prospects(self, _request: Request) -> Response:
        return json_answer(to_json(ProspectList(prospects=await asyncio.to_thread(self._prospects))))

    def _prospects(self) -> Sequence[Prospect]:
        from runtime.load.prospects import prospects, room_of

        return prospects(CATALOGUE, room_of(self.service.device(), self.service.status()))

    async def unload(self, _request: Request) -> Response:
        await self.service.unload()
        return json_answer({"status": to_json(self.service.status())})

    async def quantize(self, request: Request) -> Response:
        return await self._stream(self._quantizing(await self._read(request, QuantizeRequest)))

    async def pull(self, request: Request) -> Response:
        return await self._stream(self._pulling(await self._read(request, PullRequest)))

    async def remove(self, request: Request) -> Response:
        name = (await self._read(request, RemoveRequest)).name
        if self.service.holds(name):
            await self.service.unload()
        await asyncio.to_thread(self.service.catalogue.remove, name)
        return json_answer({"removed": name})

    async def caches(self, _request: Request) -> Response:
        """GET /runtime/caches: saved caches on disk, and sizes of each kind for the loaded model."""
        held = await asyncio.to_thread(self.service.held)
        kinds, usual = self.service.caches
        return json_answer(to_json(Caches(files=held.files, bytes=held.bytes, kinds=kinds, usual=usual)))

    async def forget(self, request: Request) -> Response:
        """POST /runtime/forget: delete the cached data of the conversation `chat`, or of all."""
        return json_answer(to_json(await self.service.forget((await self._read(request, ForgetRequest)).chat)))

    async def inspect(self, request: Request) -> Response:
        """POST /runtime/inspect: candidates at each token of an answer."""
        return await self._stream(_reported(self.service.inspect(await self._read(request, InspectRequest))))

    async def stop(self, _request: Request) -> Response:
        logger.warning("ends: a program asked for it (POST /runtime/shutdown)")
        asyncio.get_running_loop().call_later(0.05, self.shutdown)
        return json_answer({"stopping": True})

    async def _read(self, request: Request, kind: type[R]) -> R:
        """Parse a request's body. The only client is this program itself, so an unknown field is a mistake.

        Raises:
            ApiError: it is no JSON object, or a field is missing, unknown, of a wrong type or out of range.
        """

        def record(body: bytes) -> R:
            try:
                return from_json(kind, read_object(body), strict=True)
            except WireError as error:
                raise refused(error.field, str(error), code=MISSING if error.missing else INVALID) from error

        return await self.reader.read(request, record)

    async def _stream(self, events: Events) -> Response:
        return await sse(events, ping_s=self.ping_s)

    async def _done(self, work: AsyncGenerator[Progress, None]) -> Events:
        async with aclosing(_reported(work)) as reports:
            async for report in reports:
                yield report
        yield to_json(Loaded(status=self.service.status()))

    async def _quantizing(self, wanted: QuantizeRequest) -> Events:
        builder = self.service.builder
        made: list[ModelEntry] = []
        work = self.service.make(lambda stream: made.append(builder.quantize(wanted, stream.put, stream.cancelled)))
        async for event in _reported(work):
            yield event
        yield to_json(Quantized(model=self._entry(made[0])))

    async def _pulling(self, wanted: PullRequest) -> Events:
        builder = self.service.builder
        folders: list[str] = []
        work = self.service.make(
            lambda stream: folders.append(builder.pull(wanted.name, wanted.revision, stream.put, stream.cancelled))
        )
        async for event in _reported(work):
            yield event
        yield to_json(Pulled(name=wanted.name, path=folders[0]))

    def _entry(self, entry: ModelEntry) -> ModelEntry:
        return replace(entry, loaded=self.service.holds(entry.name))


def _check(wanted: LoadRequest | TuneRequest) -> None:
    """Raise ApiError if what is asked for of the compensation excludes each other."""
    try:
        _ = wanted.compensation
    except RequestError as error:
        raise refused("k_chunk", str(error)) from error


async def _reported(work: AsyncGenerator[Progress, None] | AsyncGenerator[Progress | Inspection, None]) -> Events:
    async with aclosing(work) as reports:
        async for progress in reports:
            yield to_json(progress)
