"""Ollama's interface `/api/*`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from models.catalogue import KNOWN, source_of
from models.errors import MAKING, check_needed
from models.progress import Progress
from models.store import StoredModelInfo
from runtime.engine.engine import Engine
from runtime.load.loading import Accepted
from runtime.server.bodies import Events, Reader, json_answer, ndjson, refused, unless_disconnected
from runtime.server.errors import ApiError, fields_named, ollama_form, unknown_model
from runtime.server.ollama.requests import ModelRequest, OllamaChat, OllamaEmbeddings, OllamaGenerate, seconds
from runtime.server.ollama.responses import AnswerWriter, empty_answer, listed, report, running, shown
from runtime.server.openai.answering import Answering, Writer, call_reader, generation
from runtime.server.openai.forms import LeftOut
from runtime.server.openai.responses import PartReader
from runtime.server.records import Embedded, GenerationRequest, Keep
from runtime.server.service import Service
from runtime.server.worker import Stream
from runtime.wire.requests import QuantizeRequest

VERSION = "0.12.0"
"""The version of Ollama whose interface this is."""
HUB = ("hf.co/", "huggingface.co/")
LATEST = ":latest"
CHANGES = ("POST", "DELETE")
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OllamaInterface:
    """The handlers of `/api/*`."""

    service: Service
    reader: Reader

    def routes(self) -> list[Route]:
        return [
            Route("/", self.root, methods=["GET"]),
            Route("/api/chat", self.chat, methods=["POST"]),
            Route("/api/generate", self.generate, methods=["POST"]),
            Route("/api/embed", self.embed, methods=["POST"]),
            Route("/api/embeddings", self.embeddings, methods=["POST"]),
            Route("/api/tags", self.tags, methods=["GET"]),
            Route("/api/show", self.show, methods=["POST"]),
            Route("/api/ps", self.ps, methods=["GET"]),
            Route("/api/pull", self.pull, methods=["POST"]),
            Route("/api/version", self.version, methods=["GET"]),
            *(Route(f"/api/{name}", self.elsewhere, methods=CHANGES) for name in ("create", "copy", "delete", "push")),
        ]

    async def root(self, _request: Request) -> Response:
        """GET /: programs ask whether there is a server."""
        return PlainTextResponse("lowbit-chat is running")

    async def version(self, _request: Request) -> Response:
        return json_answer({"version": VERSION})

    async def elsewhere(self, request: Request) -> Response:
        """Requests that would change stored models.

        Raises:
            ApiError: always.
        """
        message = f"{request.url.path} is not supported: `lowbit-chat quantize`, `list` and `rm` manage the models"
        raise ApiError(501, message, code="unsupported")

    async def chat(self, request: Request) -> Response:
        asked, messages, left_out = await self.reader.read(request, _chat)
        return await self._answered(request, asked, messages, left_out)

    async def generate(self, request: Request) -> Response:
        asked, messages, left_out = await self.reader.read(request, _generate)
        return await self._answered(request, asked, messages, left_out)

    async def _answered(
        self, request: Request, asked: OllamaChat, messages: list[dict[str, Any]], left_out: LeftOut
    ) -> Response:
        began, chat, stream = time.perf_counter(), not isinstance(asked, OllamaGenerate), asked.stream is not False
        info, keep = await self._info(asked.model), asked.keep
        keep = replace(keep, context=min(keep.context, info.summary.context))
        if not messages:
            await unless_disconnected(request, lambda: self.service.hold(info.name, keep))
            return json_answer(empty_answer(asked.model, "unload" if keep.seconds == 0 else "load", chat=chat))
        options = await asyncio.to_thread(asked.sampling)
        resume = chat and asked.resumes
        wanted = generation(asked, messages, options, "messages" if chat else "prompt", resume=resume)
        if isinstance(asked, OllamaGenerate) and asked.raw:
            wanted = _continued(wanted, asked.prompt or "")

        def begin(accepted: Accepted) -> Writer:
            parts = PartReader(accepted.opening, call_reader(wanted.options.calls, whole=True))
            return AnswerWriter(parts, model=asked.model, chat=chat, began=began)

        answering = Answering(self.service, partial(ndjson, form=ollama_form))
        wanted = replace(wanted, model=info.name, keep=keep)
        return await answering.respond(request, wanted, begin, stream=stream, left_out=left_out)

    async def embed(self, request: Request) -> Response:
        began = time.perf_counter()
        asked = await self.reader.read(request, OllamaEmbeddings.read)
        vectors = await self._vectors(request, asked)
        spent = round((time.perf_counter() - began) * 1e9)
        return json_answer(
            {
                "model": asked.model,
                "embeddings": [one.vector.tolist() for one in vectors],
                "total_duration": spent,
                "load_duration": 0,
                "prompt_eval_count": sum(one.tokens for one in vectors),
            }
        )

    async def embeddings(self, request: Request) -> Response:
        asked = await self.reader.read(request, OllamaEmbeddings.read)
        if len(asked.texts) > 1:
            raise refused("prompt", f"prompt holds {len(asked.texts)} texts: send one, or all of them to /api/embed")
        with fields_named({"input": "prompt"}):
            (one,) = await self._vectors(request, asked)
        return json_answer({"embedding": one.vector.tolist()})

    async def _vectors(self, request: Request, asked: OllamaEmbeddings) -> list[Embedded]:
        info, keep = await self._info(asked.model), Keep(seconds=seconds(asked.keep_alive))

        async def work() -> list[Embedded]:
            texts = self.service.embed(info.name, asked.texts, keep, cut=asked.truncate is not False)
            async with aclosing(texts) as vectors:
                return [one async for one in vectors]

        return await unless_disconnected(request, work)

    async def tags(self, _request: Request) -> Response:
        entries = await asyncio.to_thread(self.service.catalogue.entries)
        return json_answer({"models": [listed(entry) for entry in entries]})

    async def ps(self, _request: Request) -> Response:
        after_s, find = self.service.unloads_after_s, self.service.catalogue.find
        there = [(await asyncio.to_thread(find, loaded.name), loaded) for loaded in self.service.all_loaded]
        return json_answer(
            {"models": [running(entry, loaded, after_s) for entry, loaded in there if entry is not None]}
        )

    async def show(self, request: Request) -> Response:
        catalogue, asked = self.service.catalogue, await self.reader.read(request, ModelRequest.read)
        info = await self._info(asked.model)
        entry = await asyncio.to_thread(catalogue.find, info.name)
        if entry is None:
            raise unknown_model(asked.model)
        return json_answer(shown(entry, await asyncio.to_thread(catalogue.chat_template, info.name)))

    async def pull(self, request: Request) -> Response:
        """POST /api/pull: download a model of the catalogue or the hub, and make it, unless it is stored."""
        asked = await self.reader.read(request, ModelRequest.read)
        source = source_of(_plain(asked.model))
        if await asyncio.to_thread(self._found, asked.model) is None:
            from models.hub import is_hub_name

            if source not in KNOWN and not is_hub_name(source):
                raise refused("model", f"{source!r} is neither in the catalogue nor a name on the hub, owner/name")
            logger.warning("downloads %s: a program asked for it (POST /api/pull)", source)
            events = self._pulling(source)
        else:
            events = _success()
        if asked.stream is not False:
            return await ndjson(events, form=ollama_form)

        async def work() -> dict[str, Any]:
            async with aclosing(events) as reports:
                return [item async for item in reports][-1]

        return json_answer(await unless_disconnected(request, work))

    async def _pulling(self, source: str) -> Events:
        builder = self.service.builder

        def work(stream: Stream[Progress]) -> None:
            check_needed(MAKING)  # before anything is downloaded
            path = builder.pull(source, None, stream.put, stream.cancelled)
            asked = QuantizeRequest(source=path, name=_stored(source))
            builder.quantize(asked, stream.put, stream.cancelled)

        yield {"status": f"pulling {source}"}
        async with aclosing(self.service.make(work)) as reports:
            async for progress in reports:
                yield report(progress)
        yield {"status": "success"}

    async def _info(self, name: str) -> StoredModelInfo:
        """The model that a request names.

        Raises:
            ApiError: there is none.
        """
        info = await asyncio.to_thread(self._found, name)
        if info is None:
            raise unknown_model(name)
        return info

    def _found(self, name: str) -> StoredModelInfo | None:
        plain = _plain(name)
        found = (self.service.catalogue.info(one) for one in dict.fromkeys((name, plain, _stored(plain))))
        return next((info for info in found if info is not None), None)


def _plain(name: str) -> str:
    """A model's name without what Ollama's names may have around it."""
    for hub in HUB:
        name = name.removeprefix(hub)
    return name.removesuffix(LATEST)


def _stored(source: str) -> str:
    """The name of the model made from a source: the store allows no colons."""
    return source.replace(":", "-")


async def _success() -> Events:
    yield {"status": "success"}


def _continued(wanted: GenerationRequest, text: str) -> GenerationRequest:
    """A request to continue a text as it is."""

    def prompt(engine: Engine) -> Sequence[int]:
        return engine.text_prompt(text)

    return replace(wanted, prompt=prompt, trim=False, messages=())


def _chat(body: bytes) -> tuple[OllamaChat, list[dict[str, Any]], LeftOut]:
    return _checked(OllamaChat.read(body))


def _generate(body: bytes) -> tuple[OllamaChat, list[dict[str, Any]], LeftOut]:
    return _checked(OllamaGenerate.read(body))


def _checked(asked: OllamaChat) -> tuple[OllamaChat, list[dict[str, Any]], LeftOut]:
    assert asked.tool_use is not None, "it raises for tools that can't be used"
    assert asked.keep is not None, "it raises for what is no duration"
    return asked, *asked.conversation
