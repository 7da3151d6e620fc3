"""Service: runs all work on the loaded model in one thread, in the order of the requests.

Loading, unloading and generating share that thread, so they cannot disturb each other. Requests for the loaded model
join the running ones between two steps. Any other job waits until these have ended, and later requests wait for it. The
service is independent of HTTP; its coroutines may be called from any event loop.
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
"""Most waiting requests; further ones are rejected with 503."""
REFINE_AFTER_S = 4.0
"""Seconds without a request after which the loaded model's tuning is refined, if it is not yet."""
STOPPED = "the server is shutting down, or the request was cancelled"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """A prompt and how to answer it."""

    model: str
    """The model that must answer; loaded first if necessary."""
    prompt: Callable[[EngineLike], Sequence[int]]
    """Produces the prompt's tokens; called in the engine's thread."""
    options: SamplingOptions
    """Sampling and stopping options."""
    chat: bool = False
    """Whether to add the model's own chat stops."""
    name: str | None = None
    """The client's name of the conversation, for `Service.forget`."""
    trim: bool = False
    """Whether to strip leading white space from the answer."""
    field: str = "messages"
    """The request's name for its prompt, for errors."""
    messages: Sequence[Mapping[str, Any]] = ()
    """The conversation, if the prompt is one: a call that does not fit its schema is asked for again."""
    variables: Mapping[str, Any] | None = None
    """Further variables of the chat template."""


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
    """Name of the backend."""
    prompt_tokens: int
    """Tokens of the prompt."""
    opening: str = ""
    """The answer's beginning that the prompt already has: the tag of the model's reasoning."""
    k_chunk: Mapping[str, int] = field(default_factory=dict)
    """Compensated channels per 1024, by layer type."""
    slowdown_percent: float | None = None
    """Measured slowdown of decoding by that."""
    prompt_slowdown_percent: float | None = None
    """Slowdown of prompts by their compensation, if they are compensated."""


class Service:
    """The loaded model, its queue, and the server's other operations."""

    def __init__(
        self,
        loader: Loader,
        catalogue: Catalogue,
        workshop: Workshop,
        *,
        inspector: Inspector = lambda _idle: DeviceReport(machine={}),
        idle_unload_s: float | None = None,
        max_waiting: int = MAX_WAITING,
        refine_after_s: float = REFINE_AFTER_S,
    ) -> None:
        """Start the thread; no model is loaded.

        Args:
            loader: Loads and tunes models.
            catalogue: The models that can be loaded.
            workshop: Makes models.
            inspector: Inspects the device.
            idle_unload_s: Seconds without a request after which the model is unloaded, until the next request; None:
                never.
            max_waiting: Most waiting requests.
            refine_after_s: Seconds without a request after which the model's tuning is refined.
        """
        self.catalogue = catalogue
        self.workshop = workshop
        self._inspector = inspector
        self._max_waiting = max_waiting
        self._loader = loader
        self._slot = ModelSlot(loader, catalogue)
        self._lock = threading.Lock()
        self._streams: set[Stream[Any]] = set()  # of all running and waiting requests; guarded by the lock
        self._making = False
        self._worker = Worker("engine", self._slot.step)
        self._worker.when_idle(refine_after_s, lambda: self._slot.refine(lambda: self._worker.waiting > 0))
        if idle_unload_s is not None:
            self._worker.when_idle(idle_unload_s, self._slot.rest)

    def status(self) -> Status:
        """The runtime's state."""
        return self._slot.status(self._worker.waiting)

    @property
    def caches(self) -> Mapping[str, CacheFacts]:
        """Sizes of every kind of cache for the loaded model; empty if none is loaded."""
        loaded = self._slot.loaded
        return {} if loaded is None else loaded.caches

    def device(self) -> DeviceReport:
        """The device and the loaded model's tuning.

        Reads files and may measure: call it in a worker thread.
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
            experts=loaded.experts(),
            problems=(*report.problems, *loaded.problems),
        )

    def holds(self, name: str) -> bool:
        """Whether a model is loaded, or being loaded."""
        return self._slot.holds(name)

    async def load(self, request: LoadRequest) -> AsyncGenerator[Progress, None]:
        """Load a model, after the requests already queued; the previous model is unloaded first.

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
        """Change the compensation of the loaded model, after the requests already queued.

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
        """Unload the model, after the requests already queued.

        Raises:
            ApiError: the server is shutting down.
        """
        stream: Stream[None] = Stream()
        async with aclosing(self._queued(stream, self._job(stream, self._slot.unload))) as nothing:
            async for _ in nothing:
                pass

    async def forget(self, chat: str | None) -> Holding:
        """Delete the cached data of a conversation, after the requests already queued.

        Data of an answer in progress is deleted when it ends.

        Args:
            chat: The client's name of the conversation; None: all.

        Returns:
            The deleted files.

        Raises:
            ApiError: the server is shutting down, or the system refuses to delete a file.
        """
        stream: Stream[Holding] = Stream()
        job = self._job(stream, lambda: stream.put(self._slot.forget(chat)))
        async with aclosing(self._queued(stream, job, alone=lambda: False)) as found:
            return [held async for held in found][-1]

    def held(self) -> Holding:
        """Saved caches on disk. Reads a folder: call it in a worker thread."""
        return self._loader.held()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | Piece, None]:
        """Answer a prompt: yields `Accepted`, then pieces. Closing the iterator cancels the work.

        Raises:
            ApiError: the model or the request is invalid, or the work failed.
        """
        stream: Stream[Accepted | Piece] = Stream()
        job = self._submission(request, stream)
        alone = lambda: not (stream.cancelled() or self._slot.is_ready(request.model))  # noqa: E731
        async with aclosing(self._queued(stream, job, alone)) as items:
            async for item in items:
                yield item

    async def embed(self, model: str, texts: Sequence[str | Sequence[int]]) -> AsyncGenerator[Embedded, None]:
        """Embeddings of texts (or token lists), in order. Closing the iterator cancels the work.

        Raises:
            ApiError: the model or a text is invalid, or the work failed.
        """
        stream: Stream[Embedded] = Stream()
        job = self._job(stream, lambda: self._embed(model, texts, stream))
        async with aclosing(self._queued(stream, job)) as items:
            async for item in items:
                yield item

    async def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """Re-read an answer token by token: yields reports, then the result. Closing the iterator cancels the work.

        Raises:
            ApiError: the model or the answer is invalid, or the work failed.
        """
        stream: Stream[Progress | Inspection] = Stream()
        job = self._job(stream, lambda: self._inspect(request, stream))
        async with aclosing(self._queued(stream, job)) as items:
            async for item in items:
                yield item

    async def make(self, work: Callable[[Stream[Progress]], object]) -> AsyncGenerator[Progress, None]:
        """Run long work on stored models in a separate thread, one at a time.

        Args:
            work: Puts its reports into the stream, and polls it for cancellation.

        Raises:
            ApiError: other such work is running (409), or this work failed.
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
        """Reject new requests, and cancel running and waiting ones."""
        self._worker.close(self._slot.unload)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop everything, unload, end the thread. Returns whether that finished in time. Safe to call twice."""
        self.cancel_all()
        return self._worker.join(timeout_s)

    # In the event loop

    async def _queued(
        self, stream: Stream[T], job: Callable[[], None], alone: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[T, None]:
        """Queue a job in the engine's thread, and read its stream. `alone` is evaluated at the job's turn."""
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
        """Context manager: `cancel_all` cancels the stream."""
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
        """Work that never raises: it ends its stream with any error, after `release`."""

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
        """The job that submits a request. The stream ends with the answer's last piece, or with an error."""

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
                opening=loaded.engine.reasoning_opened(prompt) if request.trim and not options.formed else "",
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
                answer = request.answer.removeprefix(loaded.engine.reasoning_opened(prompt))
                stream.put(loaded.engine.inspect(prompt, answer, stream.put, stream.cancelled))
            except (RequestError, ContextOverflowError) as error:
                raise api_error(error, prompt="answer") from error
