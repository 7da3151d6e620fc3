"""`Service`: everything that is done with the one loaded model, in one thread and in the order of the requests.

Loading, unloading and generating share that thread, so none can disturb another. Requests for the model that is loaded
join those that are being answered, between two steps; whatever else is asked for waits until these have ended, and what
comes behind it waits for it.
Nothing here knows HTTP. The coroutines may be called from any event loop.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from models.progress import Progress
from runtime.engine.generation import Piece
from runtime.errors import Cancelled, ContextOverflowError, RequestError
from runtime.server.errors import ApiError, api_error, conflict, unavailable
from runtime.server.service.bridge import Stream, Worker
from runtime.server.service.interfaces import Catalogue, EngineLike, Inspector, Loader, Workshop
from runtime.server.service.slot import ModelSlot
from runtime.text.sampling import Float32Array, SamplingOptions
from runtime.wire.answers import CacheFacts, Holding, Status
from runtime.wire.codec import to_json
from runtime.wire.device import DeviceReport
from runtime.wire.inspection import Inspection, InspectRequest
from runtime.wire.requests import LoadRequest, TuneRequest

MAX_WAITING = 64
"""Requests that may wait for their turn; more are refused with 503."""
STOPPED = "the server is shutting down, or the request was cancelled"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt, and how it is to be answered."""

    model: str
    """The model that must answer; loaded first if it is another one."""
    prompt: Callable[[EngineLike], Sequence[int]]
    """Makes the prompt's tokens; called in the engine's thread."""
    options: SamplingOptions
    """How to draw and when to end."""
    chat: bool = False
    """Whether the model's own chat stops apply."""
    name: str | None = None
    """What the client calls the conversation, for `Service.forget`."""
    trim: bool = False
    """Whether white space in front of the answer is dropped."""
    field: str = "messages"
    """What the request calls its prompt; named in errors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedded:
    """The embedding of one text."""

    model: str
    """The model that made it."""
    tokens: int
    """Tokens of the text."""
    vector: Float32Array
    """[C], of length 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The first item of a generation: the model is loaded and the prompt fits."""

    model: str
    """The model that answers."""
    backend: str
    """What runs it."""
    prompt_tokens: int
    """Tokens of the prompt."""
    k_chunk: Mapping[str, int] = field(default_factory=dict)
    """Compensated channels per 1024, by layer type."""
    slowdown_percent: float | None = None
    """Slowdown of decoding by that, where it was measured."""
    prompt_slowdown_percent: float | None = None
    """How much longer a prompt takes by its compensation, where prompts are compensated."""


class Service:
    """The loaded model, its queue, and what else the server can be asked for."""

    def __init__(
        self,
        loader: Loader,
        catalogue: Catalogue,
        workshop: Workshop,
        *,
        inspector: Inspector = lambda _idle: DeviceReport(machine={}),
        idle_unload_s: float | None = None,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        """Start the thread; nothing is loaded.

        Args:
            loader: Loads and tunes models.
            catalogue: The models that can be loaded.
            workshop: Makes models.
            inspector: Looks at the device.
            idle_unload_s: Unload after so many seconds without a request, to be loaded again by the next; None: never.
            max_waiting: Requests that may wait for their turn.
        """
        self.catalogue = catalogue
        self.workshop = workshop
        self._inspector = inspector
        self._max_waiting = max_waiting
        self._loader = loader
        self._slot = ModelSlot(loader, catalogue)
        self._lock = threading.Lock()
        self._streams: set[Stream[Any]] = set()  # of all requests that run or wait; guarded by the lock
        self._making = False
        self._worker = Worker("engine", self._slot.step)
        if idle_unload_s is not None:
            self._worker.when_idle(idle_unload_s, self._slot.rest)

    def status(self) -> Status:
        """What the runtime is doing and with what."""
        return self._slot.status(self._worker.waiting)

    @property
    def caches(self) -> Mapping[str, CacheFacts]:
        """What every kind of cache would mean for the loaded model; empty where none is loaded."""
        loaded = self._slot.loaded
        return {} if loaded is None else loaded.caches

    def device(self) -> DeviceReport:
        """What is known of the device and of what runs on it.

        Reads files and may measure, so call it from a worker thread.
        """
        busy = self._slot.tuning or self.status().state in ("loading", "generating")
        report = self._inspector(not busy)
        loaded = self._slot.loaded
        if loaded is None:
            return replace(report, machine={**report.machine, "backend": None, "reason": None})
        return replace(
            report,
            machine={**report.machine, "backend": loaded.backend, "reason": loaded.reason},
            tuning=loaded.tuning,
            prompts=loaded.prompts,
            problems=(*report.problems, *loaded.problems),
        )

    def holds(self, name: str) -> bool:
        """Whether a model is loaded, or being loaded."""
        return self._slot.holds(name)

    async def load(self, request: LoadRequest) -> AsyncGenerator[Progress, None]:
        """Load a model, after the requests that already wait; the model loaded before is unloaded first.

        Closing the iterator stops the load and leaves no model loaded.

        Raises:
            ApiError: there is no such model, or it cannot be loaded.
        """
        stream: Stream[Progress] = Stream()
        job = self._job(stream, lambda: self._slot.load(request, stream.put, stream.cancelled))
        async with aclosing(self._queued(stream, job)) as reports:
            async for progress in reports:
                yield progress

    async def tune(self, request: TuneRequest) -> AsyncGenerator[Progress, None]:
        """Change the compensation of the loaded model, after the requests that already wait.

        Closing the iterator stops it and leaves everything as it was.

        Raises:
            ApiError: no model is loaded, or it cannot be done.
        """
        stream: Stream[Progress] = Stream()
        job = self._job(stream, lambda: self._slot.tune(request, stream.put, stream.cancelled))
        async with aclosing(self._queued(stream, job)) as reports:
            async for progress in reports:
                yield progress

    async def unload(self) -> None:
        """Unload the model, after the requests that already wait.

        Raises:
            ApiError: the server is shutting down.
        """
        stream: Stream[None] = Stream()
        async with aclosing(self._queued(stream, self._job(stream, self._slot.unload))) as nothing:
            async for _ in nothing:
                pass

    async def forget(self, chat: str | None) -> Holding:
        """Delete what the caches hold of a conversation, after the requests that already wait.

        What is held of an answer in the making goes when it ends.

        Args:
            chat: The name that its client gave it; None: all conversations.

        Returns:
            The files that were deleted.

        Raises:
            ApiError: the server is shutting down, or the system refuses to delete a file.
        """
        stream: Stream[Holding] = Stream()
        job = self._job(stream, lambda: stream.put(self._slot.forget(chat)))
        async with aclosing(self._queued(stream, job, alone=lambda: False)) as found:
            return [held async for held in found][-1]

    def held(self) -> Holding:
        """What saved caches take on disk; reads a folder, so call it from a worker thread."""
        return self._loader.held()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | Piece, None]:
        """Answer a prompt: `Accepted`, then pieces. Closing the iterator stops the work.

        Raises:
            ApiError: the model or the request is not acceptable, or the work failed.
        """
        stream: Stream[Accepted | Piece] = Stream()
        job = self._submission(request, stream)
        alone = lambda: not (stream.cancelled() or self._slot.is_ready(request.model))  # noqa: E731
        async with aclosing(self._queued(stream, job, alone)) as items:
            async for item in items:
                yield item

    async def embed(self, model: str, texts: Sequence[str | Sequence[int]]) -> AsyncGenerator[Embedded, None]:
        """The embeddings of texts, or of their tokens, in their order. Closing the iterator stops the work.

        Raises:
            ApiError: the model or a text is not acceptable, or the work failed.
        """
        stream: Stream[Embedded] = Stream()
        job = self._job(stream, lambda: self._embed(model, texts, stream))
        async with aclosing(self._queued(stream, job)) as items:
            async for item in items:
                yield item

    async def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """Read an answer again, token by token: reports, then what was found. Closing the iterator stops the work.

        Raises:
            ApiError: the model or the answer is not acceptable, or the work failed.
        """
        stream: Stream[Progress | Inspection] = Stream()
        job = self._job(stream, lambda: self._inspect(request, stream))
        async with aclosing(self._queued(stream, job)) as items:
            async for item in items:
                yield item

    async def make(self, work: Callable[[Stream[Progress]], object]) -> AsyncGenerator[Progress, None]:
        """Do a long piece of work on stored models in a thread of its own, one at a time.

        Args:
            work: Puts into the stream what is to be reported, and asks it whether to stop.

        Raises:
            ApiError: other work of that kind is running (409), or this work failed.
        """
        stream: Stream[Progress] = Stream()
        with self._lock:
            if self._making:
                raise conflict(
                    "a model is being made or downloaded already: wait until that is done, or stop it", "busy"
                )
            self._making = True
        job = self._job(stream, lambda: work(stream), self._made)
        with self._listed(stream):
            threading.Thread(target=job, name="workshop", daemon=True).start()
            async with aclosing(stream.read()) as items:
                async for item in items:
                    yield item

    def cancel_all(self) -> None:
        """Take no more requests, and ask what runs and waits to stop."""
        self._worker.close(self._slot.unload)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop everything, unload, end the thread. Returns whether that was done in time. Safe to call twice."""
        self.cancel_all()
        return self._worker.join(timeout_s)

    # In the event loop

    async def _queued(
        self, stream: Stream[T], job: Callable[[], None], alone: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[T, None]:
        """Queue a job of the engine's thread, and read its stream. Whether it has to be alone is asked at its turn."""
        loaded = self._slot.loaded
        if self._worker.waiting + (0 if loaded is None else loaded.engine.waiting) >= self._max_waiting:
            raise unavailable(f"{self._max_waiting} requests are waiting already: try again later", "overloaded")
        with self._listed(stream):
            try:
                self._worker.submit(job, alone)
            except Cancelled as error:
                raise api_error(error) from error
            async with aclosing(stream.read()) as items:
                async for item in items:
                    yield item

    @contextmanager
    def _listed(self, stream: Stream[Any]) -> Iterator[None]:
        """While entered, `cancel_all` reaches the stream."""
        with self._lock:
            self._streams.add(stream)
        try:
            yield
        finally:
            with self._lock:
                self._streams.discard(stream)

    # In a worker thread

    def _job(
        self, stream: Stream[Any], work: Callable[[], object], release: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Work that never raises: its stream ends however it ends, after `release`."""

        def job() -> None:
            error: ApiError | None = None
            try:
                if stream.cancelled():
                    raise Cancelled(STOPPED)
                work()
            except BaseException as failure:  # noqa: BLE001 -- the reader gets it, and the thread must live on
                error = api_error(failure)
            release()
            stream.end(error)

        return job

    def _made(self) -> None:
        with self._lock:
            self._making = False

    def _submission(self, request: GenerationRequest, stream: Stream[Accepted | Piece]) -> Callable[[], None]:
        """The job that submits a request. The stream ends with the answer's last piece, or with what went wrong."""

        def receive(item: Piece | Exception) -> None:
            if isinstance(item, Exception):
                stream.end(api_error(item))
            elif item.finish_reason == "cancelled":
                stream.end(api_error(Cancelled(STOPPED)))
            else:
                stream.put(item)
                if item.finish_reason is not None:
                    stream.end()

        def job() -> None:
            try:
                if stream.cancelled():
                    raise Cancelled(STOPPED)
                self._submit(request, stream, receive)
            except BaseException as failure:  # noqa: BLE001 -- the reader gets it, and the thread must live on
                stream.end(api_error(failure))

        return job

    def _submit(
        self,
        request: GenerationRequest,
        stream: Stream[Accepted | Piece],
        receive: Callable[[Piece | Exception], None],
    ) -> None:
        loaded = self._slot.ensure(request.model, stream.cancelled)
        options = request.options
        if request.chat:
            options = replace(options, stop=(*options.stop, *loaded.engine.chat_stops))
        try:
            prompt = request.prompt(loaded.engine)
            loaded.engine.submit(prompt, options, receive, stream.cancelled, trim=request.trim, chat=request.name)
        except (RequestError, ContextOverflowError) as error:
            raise api_error(error, prompt=request.field) from error
        stream.put(
            Accepted(
                model=loaded.name,
                backend=loaded.backend,
                prompt_tokens=len(prompt),
                k_chunk=loaded.k_chunk,
                slowdown_percent=loaded.tuning.measured_slowdown_percent if loaded.tuning else None,
                prompt_slowdown_percent=loaded.prompts.measured_slowdown_percent
                if loaded.prompts and loaded.prompts.k_chunk
                else None,
            )
        )

    def _embed(self, model: str, texts: Sequence[str | Sequence[int]], stream: Stream[Embedded]) -> None:
        loaded = self._slot.ensure(model, stream.cancelled)
        with self._slot.generating():
            for index, text in enumerate(texts):
                try:
                    tokens = loaded.engine.text_prompt(text) if isinstance(text, str) else text
                    vector = loaded.engine.embed(tokens, stream.cancelled)
                except (RequestError, ContextOverflowError) as error:
                    raise api_error(error, prompt=f"input[{index}]" if len(texts) > 1 else "input") from error
                stream.put(Embedded(model=loaded.name, tokens=len(tokens), vector=vector))

    def _inspect(self, request: InspectRequest, stream: Stream[Progress | Inspection]) -> None:
        loaded = self._slot.ensure(request.model, stream.cancelled)
        with self._slot.generating():
            try:
                prompt = loaded.engine.chat_prompt([to_json(message) for message in request.messages])
                stream.put(loaded.engine.inspect(prompt, request.answer, stream.put, stream.cancelled))
            except (RequestError, ContextOverflowError) as error:
                raise api_error(error, prompt="answer") from error
