"""`/runtime/*`: what the UI asks of the runtime beside chatting. Every request needs the lock file's token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from models.progress import Progress
from models.recipe import DEFAULT_METHOD, LARGEST_BITS, SMALLEST_BITS, Method
from runtime.kv.kinds import KVKind
from runtime.server.answer import json_answer
from runtime.server.errors import unknown_model
from runtime.server.records import LoadRequest, ModelEntry, QuantizeRequest, TuneRequest
from runtime.server.requests import parse, refused
from runtime.server.service import Service
from runtime.server.streaming import Events, sse

Name = Annotated[str, Field(min_length=1, max_length=300)]
LayerType = Annotated[str, Field(pattern=r"^(qkv|o|gate_up|down|head)$")]
Chunk = Annotated[int, Field(ge=0, le=1024)]
Budget = Annotated[float, Field(ge=0, le=100)]


class _Body(BaseModel):
    """The program itself is the only client here, so an unknown field is a mistake."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class LoadBody(_Body):
    """Body of POST /runtime/load."""

    model: Name
    kv: KVKind | None = None
    k_chunk: Chunk | dict[LayerType, Chunk] | None = None
    budget: Budget | None = None
    context: Annotated[int, Field(ge=1)] | None = None
    backend: Annotated[str, Field(max_length=40)] | None = None


class TuneBody(_Body):
    """Body of POST /runtime/tune."""

    budget: Budget | None = None
    force: bool = False
    k_chunk: Chunk | dict[LayerType, Chunk] | None = None


class QuantizeBody(_Body):
    """Body of POST /runtime/quantize."""

    source: Annotated[str, Field(min_length=1, max_length=4096)]
    bits: Annotated[float, Field(ge=SMALLEST_BITS, le=LARGEST_BITS)] = 4
    method: Method = DEFAULT_METHOD
    group_size: int = 128
    residual_bits: int = 4
    smooth_attention: bool = False
    name: Name | None = None
    force: bool = False


class PullBody(_Body):
    """Body of POST /runtime/pull."""

    name: Name
    revision: Annotated[str, Field(min_length=1, max_length=200)] | None = None


class RemoveBody(_Body):
    """Body of POST /runtime/remove."""

    name: Name


class ForgetBody(_Body):
    """Body of POST /runtime/forget."""

    chat: Annotated[str, Field(min_length=1, max_length=200)] | None = None


@dataclass(frozen=True, slots=True)
class ManagementInterface:
    """The handlers of `/runtime/*`."""

    service: Service
    ping_s: float
    shutdown: Callable[[], None]
    """Ends the server, once the answer is sent."""

    def routes(self) -> list[Route]:
        """All routes."""
        return [
            Route("/runtime/status", self.status, methods=["GET"]),
            Route("/runtime/models", self.models, methods=["GET"]),
            Route("/runtime/device", self.device, methods=["GET"]),
            Route("/runtime/load", self.load, methods=["POST"]),
            Route("/runtime/tune", self.tune, methods=["POST"]),
            Route("/runtime/unload", self.unload, methods=["POST"]),
            Route("/runtime/quantize", self.quantize, methods=["POST"]),
            Route("/runtime/pull", self.pull, methods=["POST"]),
            Route("/runtime/remove", self.remove, methods=["POST"]),
            Route("/runtime/caches", self.caches, methods=["GET"]),
            Route("/runtime/forget", self.forget, methods=["POST"]),
            Route("/runtime/shutdown", self.stop, methods=["POST"]),
        ]

    async def status(self, _request: Request) -> Response:
        """GET /runtime/status."""
        return json_answer(self.service.status().to_json())

    async def models(self, _request: Request) -> Response:
        """GET /runtime/models."""
        entries = await asyncio.to_thread(self.service.catalogue.entries)
        return json_answer({"models": [self._entry(entry) for entry in entries]})

    async def load(self, request: Request) -> Response:
        """POST /runtime/load."""
        body = parse(await request.body(), LoadBody)
        if await asyncio.to_thread(self.service.catalogue.find, body.model) is None:
            raise unknown_model(body.model)
        wanted = LoadRequest(
            model=body.model,
            kv=body.kv,
            k_chunk=body.k_chunk,
            budget=body.budget,
            context=body.context,
            backend=body.backend or "auto",
        )
        return await self._stream(self._done(self.service.load(wanted)))

    async def tune(self, request: Request) -> Response:
        """POST /runtime/tune."""
        body = parse(await request.body(), TuneBody)
        if body.budget is not None and body.k_chunk is not None:
            raise refused("k_chunk", "a k_chunk and a budget exclude each other: leave out one of them")
        wanted = TuneRequest(budget=body.budget, k_chunk=body.k_chunk, force=body.force)
        return await self._stream(self._done(self.service.tune(wanted)))

    async def device(self, _request: Request) -> Response:
        """GET /runtime/device."""
        facts = await asyncio.to_thread(self.service.device)
        status, tuning = self.service.status(), self.service.tuning
        return json_answer(
            {
                "machine": {**facts.machine, "backend": status.backend, "reason": status.reason},
                "bandwidth_gb_s": facts.bandwidth_gb_s,
                "tuning": None if tuning is None else tuning.to_json(),
                "problems": [problem.to_json() for problem in facts.problems],
            }
        )

    async def unload(self, _request: Request) -> Response:
        """POST /runtime/unload."""
        await self.service.unload()
        return json_answer({"status": self.service.status().to_json()})

    async def quantize(self, request: Request) -> Response:
        """POST /runtime/quantize."""
        body = parse(await request.body(), QuantizeBody)
        wanted = QuantizeRequest(
            source=body.source,
            bits=body.bits,
            method=body.method,
            group_size=body.group_size,
            residual_bits=body.residual_bits,
            smooth_attention=body.smooth_attention,
            name=body.name,
            force=body.force,
        )
        return await self._stream(self._quantizing(wanted))

    async def pull(self, request: Request) -> Response:
        """POST /runtime/pull."""
        body = parse(await request.body(), PullBody)
        return await self._stream(self._pulling(body))

    async def remove(self, request: Request) -> Response:
        """POST /runtime/remove."""
        name = parse(await request.body(), RemoveBody).name
        if self.service.holds(name):
            await self.service.unload()
        await asyncio.to_thread(self.service.catalogue.remove, name)
        return json_answer({"removed": name})

    async def caches(self, _request: Request) -> Response:
        """GET /runtime/caches: what they take on disk, and what each kind means for the loaded model."""
        held = await asyncio.to_thread(self.service.held)
        kinds = {name: asdict(cache) for name, cache in self.service.caches.items()}
        return json_answer({"files": held.files, "bytes": held.size, "kinds": kinds})

    async def forget(self, request: Request) -> Response:
        """POST /runtime/forget: delete what caches hold of the conversation `chat`, or of all."""
        gone = await self.service.forget(parse(await request.body(), ForgetBody).chat)
        return json_answer({"files": gone.files, "bytes": gone.size})

    async def stop(self, _request: Request) -> Response:
        """POST /runtime/shutdown."""
        asyncio.get_running_loop().call_later(0.05, self.shutdown)
        return json_answer({"stopping": True})

    async def _stream(self, events: Events) -> Response:
        return await sse(events, ping_s=self.ping_s, done=False)

    async def _done(self, work: AsyncGenerator[Progress, None]) -> Events:
        async with aclosing(_reported(work)) as reports:
            async for report in reports:
                yield report
        yield {"phase": "done", "status": self.service.status().to_json()}

    async def _quantizing(self, wanted: QuantizeRequest) -> Events:
        workshop = self.service.workshop
        made: list[ModelEntry] = []
        work = self.service.make(lambda stream: made.append(workshop.quantize(wanted, stream.put, stream.cancelled)))
        async for event in _reported(work):
            yield event
        yield {"phase": "done", "model": self._entry(made[0])}

    async def _pulling(self, body: PullBody) -> Events:
        workshop = self.service.workshop
        folders: list[str] = []
        work = self.service.make(
            lambda stream: folders.append(workshop.pull(body.name, body.revision, stream.put, stream.cancelled))
        )
        async for event in _reported(work):
            yield event
        yield {"phase": "done", "name": body.name, "path": folders[0]}

    def _entry(self, entry: ModelEntry) -> dict[str, Any]:
        return entry.to_json(loaded=self.service.holds(entry.name))


async def _reported(work: AsyncGenerator[Progress, None]) -> Events:
    async with aclosing(work) as reports:
        async for progress in reports:
            yield asdict(progress)
