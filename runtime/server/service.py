"""Service: the loaded models, and one thread that does all work on them, in the order of the requests.

Loading, unloading and generating share that thread, so they cannot disturb each other. Requests join the running ones
between two steps; models that answer at the same time take turns step by step. A job that needs a model for itself, or
memory that models take which are answering, waits until these answers have ended, and later requests wait for it.
Models stay loaded as long as there is memory for the next; the one that was asked last is the loaded model, the others
are `runtime.server.parked`. The service is independent of HTTP; its coroutines may be called from any event loop.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from models.errors import CancelledError
from models.progress import Progress, ProgressCallback, ignore_progress
from models.store import Store
from runtime import program_version
from runtime.budget.tuning import PROFILES
from runtime.engine.generation import Piece
from runtime.errors import Cancelled, ContextOverflowError, OutOfMemoryError, RequestError
from runtime.kv.kinds import DEFAULT_KV, KVKind, usual_cache
from runtime.load.catalogue import Bundle, Catalogue, ModelBuilder
from runtime.load.loading import Accepted, LoadedModel, Loader
from runtime.load.plan import LoadOptions
from runtime.load.prospects import MachineInspector
from runtime.server import MAX_MODELS
from runtime.server.errors import ApiError, api_error, conflict, unavailable, unknown_model
from runtime.server.parked import Parked
from runtime.server.records import KEPT, Embedded, GenerationRequest, Keep, Scored
from runtime.server.worker import Later, Stream, Worker
from runtime.text.reasoning import TAGS
from runtime.text.sampling import SamplingOptions
from runtime.wire.answers import CacheFacts, ErrorRecord, Holding, State, Status
from runtime.wire.codec import to_json
from runtime.wire.device import DeviceReport
from runtime.wire.requests import Inspection, InspectRequest, LoadRequest, TuneRequest

MAX_WAITING = 64
"""Most waiting requests; further ones are rejected with 503."""
REFINE_AFTER_S = 4.0
"""Seconds without a request after which the loaded model's tuning is refined, if it is not yet."""
STOPPED = "the server is shutting down, or the request was cancelled"
T = TypeVar("T")
logger = logging.getLogger(__name__)


class Service:
    """The loaded model, its queue, and the server's other operations."""

    def __init__(
        self,
        loader: Loader,
        catalogue: Catalogue,
        builder: ModelBuilder,
        *,
        inspector: Callable[[bool], DeviceReport] = lambda _idle: DeviceReport(machine={}),
        idle_unload_s: float | None = None,
        max_waiting: int = MAX_WAITING,
        max_models: int = MAX_MODELS,
        refine_after_s: float = REFINE_AFTER_S,
    ) -> None:
        """Start the thread; no model is loaded.

        Args:
            loader: Loads and tunes models.
            catalogue: The models that can be loaded.
            builder: Makes models.
            inspector: Inspects the device in a worker thread; its argument: whether the device is idle.
            idle_unload_s: Seconds without a request after which the model is unloaded, until the next request; None:
                never.
            max_waiting: Most waiting requests.
            max_models: Most models that are loaded at the same time.
            refine_after_s: Seconds without a request after which the model's tuning is refined.
        """
        self.catalogue = catalogue
        self.builder = builder
        self._loader, self._inspector, self._max_waiting = loader, inspector, max_waiting
        self._idle_unload_s = math.inf if idle_unload_s is None else idle_unload_s
        self._lock = threading.Lock()  # guards the fields below while they are read or changed
        self._state: State = "empty"
        self._loaded: LoadedModel | None = None
        self._parked, self._max_models = Parked(), max_models
        self._target: LoadRequest | None = None  # the model that is loaded, being loaded, or unloaded when idle
        self._error: ErrorRecord | None = None
        self._streams: set[Stream[Any]] = set()  # of all running and waiting requests
        self._building = False
        self._tuning = False  # whether the device is being measured
        self._answered = False  # whether the loaded model has answered anything
        self._refines = True  # until refining fails
        self._worker = Worker("engine", self._step)
        self._worker.when_idle(refine_after_s, self._refine)
        self.unloads_after_s = math.inf
        """Seconds without a request after which the loaded model is unloaded."""
        self._keep(KEPT)

    # Thread-safe

    def status(self) -> Status:
        import psutil

        with self._lock:
            state, loaded, target, error = self._state, self._loaded, self._target, self._error
        status = Status(
            state=state,
            model=target.model if target is not None and state == "loading" else None,
            also_loaded=[own.name for own in self._parked],
            memory_bytes=int(psutil.Process().memory_info().rss),
            running=sum(own.engine.running for own in self.all_loaded),
            waiting=self._waiting,
            pid=os.getpid(),
            version=program_version(),
            error=error,
        )
        if loaded is None:
            return status
        tuning, prompts = loaded.tuning, loaded.prompts
        return replace(
            status,
            state="generating" if status.running and state == "ready" else state,
            slots=loaded.slots,
            model=loaded.name,
            backend=loaded.backend,
            reason=loaded.reason,
            bits=loaded.bits,
            base=not loaded.engine.tokenizer.has_chat_template,
            kv=loaded.kv,
            k_chunk=dict(loaded.k_chunk),
            budget_percent=tuning.budget_percent if tuning else None,
            exact=loaded.exact,
            slowdown_percent=tuning.measured_slowdown_percent if tuning else None,
            prompt_k_chunk=prompts.k_chunk if prompts else 0,
            prompt_slowdown_percent=prompts.measured_slowdown_percent if prompts else None,
            n_tb=dict(tuning.n_tb) if tuning and tuning.n_tb_max is not None else None,
            speculates=bool(loaded.speculation),
            drafts_by_head=loaded.drafts_by_head,
            context=loaded.context,
            weight_bytes=loaded.weight_bytes,
            kv_bytes=loaded.kv_bytes,
            sampling=dict(loaded.sampling),
        )

    @property
    def loaded(self) -> LoadedModel | None:
        with self._lock:
            return self._loaded

    @property
    def _waiting(self) -> int:
        """Requests that wait for the thread, or for their model."""
        return self._worker.waiting + sum(loaded.engine.waiting for loaded in self.all_loaded)

    @property
    def all_loaded(self) -> list[LoadedModel]:
        """All models that are loaded, that which was asked last first."""
        loaded = self.loaded
        return [*([] if loaded is None else [loaded]), *self._parked]

    @property
    def caches(self) -> tuple[Mapping[str, CacheFacts], KVKind]:
        """Sizes of every kind of cache for the loaded model, empty if none is loaded, and its default kind."""
        loaded = self.loaded
        return ({}, DEFAULT_KV) if loaded is None else (loaded.caches, usual_cache(loaded.certificate.kv))

    def device(self) -> DeviceReport:
        """The device and the loaded model's tuning.

        Reads files and may measure: call it in a worker thread.
        """
        busy = self._tuning or self.status().state in ("loading", "generating")
        report = self._inspector(not busy)
        loaded = self.loaded
        if loaded is None:
            return replace(report, machine={**report.machine, "backend": None, "reason": None})
        words = loaded.certificate.cache_words  # which name the default
        return replace(
            report,
            machine={**report.machine, "backend": loaded.backend, "reason": loaded.reason},
            tuning=loaded.tuning,
            prompts=loaded.prompts,
            experts=loaded.experts(),
            blocks=loaded.blocks,
            lost_percent=loaded.certificate.lost(loaded.tuning.budget_percent) if loaded.tuning else None,
            cache=words if loaded.kv == loaded.certificate.kv else f"{loaded.kv} · {words}",
            problems=(*report.problems, *loaded.problems),
        )

    def holds(self, name: str) -> bool:
        """Whether a model is loaded, or being loaded."""
        with self._lock:
            held = self._state not in ("empty", "failed") and self._target is not None and self._target.model == name
        return held or self._parked.get(name) is not None

    def held(self) -> Holding:
        """Saved caches on disk. Reads a folder: call it in a worker thread."""
        return self._loader.held()

    def cancel_all(self) -> None:
        """Reject new requests, and cancel running and waiting ones."""
        self._worker.close(self._unload)
        with self._lock:
            streams = list(self._streams)
        for stream in streams:
            stream.cancel()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop everything, unload, end the thread. Returns whether that finished in time. Safe to call twice."""
        self.cancel_all()
        return self._worker.join(timeout_s)

    # In the event loop. Closing an iterator cancels the work behind it.

    def load(self, request: LoadRequest) -> AsyncGenerator[Progress, None]:
        """Load a model, after the requests already queued; the previous model is unloaded first.

        Closing the iterator stops the load and leaves no model loaded.

        Raises:
            ApiError: there is no such model, or it cannot be loaded.
        """

        def work(stream: Stream[Progress]) -> None:
            self._keep(KEPT)
            self._load(request, stream.put, stream.cancelled)

        return self._queued(work)

    def tune(self, request: TuneRequest) -> AsyncGenerator[Progress, None]:
        """Change the compensation of the loaded model, after the requests already queued.

        Closing the iterator stops it and leaves everything as it was.

        Raises:
            ApiError: no model is loaded, or it cannot be done.
        """
        return self._queued(lambda stream: self._tune(request, stream))

    async def unload(self) -> None:
        """Unload the model, after the requests already queued.

        Raises:
            ApiError: the server is shutting down.
        """
        nothing: AsyncGenerator[None, None] = self._queued(lambda _: self._unload())
        async with aclosing(nothing):
            async for _ in nothing:
                pass

    async def forget(self, chat: str | None) -> Holding:
        """Delete the cached data of a conversation, after the requests already queued.

        Data of an answer in progress is deleted when it ends.

        Returns:
            The deleted files.

        Raises:
            ApiError: the server is shutting down, or the system refuses to delete a file.
        """

        def work(stream: Stream[Holding]) -> None:
            for loaded in self.all_loaded:
                loaded.engine.forget(chat)
            stream.put(self._loader.forget(chat))

        async with aclosing(self._queued(work, alone=lambda _: False)) as deleted:
            return [holding async for holding in deleted][-1]

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Accepted | Piece, None]:
        """Answer a prompt: yields `Accepted`, then pieces.

        Raises:
            ApiError: the model or the request is invalid, or the work failed.
        """
        return self._queued(
            lambda stream: self._submit(request, stream),
            alone=lambda stream: not stream.cancelled() and self._is_in_use(request.model, request.keep),
            ends=False,
        )

    async def hold(self, model: str, keep: Keep) -> None:
        """Load a model ahead of its requests; one that is not to be kept at all is unloaded.

        Raises:
            ApiError: there is no such model, or it cannot be loaded.
        """

        def work(stream: Stream[None]) -> None:
            if keep.seconds != 0:
                self._ensure(model, stream.cancelled, keep)
            elif self.loaded is not None and self.loaded.name == model:
                self._rest()
            else:
                self._parked.drop(model)

        wanted = keep if keep.seconds != 0 else None
        async with aclosing(self._queued(work, lambda _: self._is_in_use(model, wanted))) as nothing:
            async for _ in nothing:
                pass

    async def count(self, request: GenerationRequest) -> int:
        """Tokens of a prompt.

        Raises:
            ApiError: the model or the prompt is invalid.
        """

        def work(stream: Stream[int]) -> None:
            stream.put(len(_prompt(self._ensure(request.model, stream.cancelled, request.keep), request)))

        counting = self._queued(work, alone=lambda _: self._is_in_use(request.model, request.keep))
        async with aclosing(counting) as counted:
            return [tokens async for tokens in counted][-1]

    def embed(
        self, model: str, texts: Sequence[str | Sequence[int]], keep: Keep = KEPT, *, cut: bool = False
    ) -> AsyncGenerator[Embedded, None]:
        """Embeddings of texts (or token lists), in order. With `cut`, the end of what exceeds the context is left out.

        Raises:
            ApiError: the model or a text is invalid, or the work failed.
        """
        return self._queued(
            lambda stream: self._embed(model, texts, keep, stream, cut=cut), lambda _: self._is_in_use(model)
        )

    def score(
        self, model: str, prompts: Sequence[str | Sequence[int]], options: SamplingOptions, *, more: bool
    ) -> AsyncGenerator[Scored, None]:
        """Log-probabilities of prompts (texts or token lists), in order; arguments as of `Engine.score`.

        Raises:
            ApiError: the model or a prompt is invalid, or the work failed.
        """
        return self._queued(
            lambda stream: self._score(model, prompts, options, more, stream), lambda _: self._is_in_use(model)
        )

    def inspect(self, request: InspectRequest) -> AsyncGenerator[Progress | Inspection, None]:
        """Re-read an answer token by token: yields reports, then the result.

        Raises:
            ApiError: the model or the answer is invalid, or the work failed.
        """
        return self._queued(lambda stream: self._inspect(request, stream), lambda _: self._is_in_use(request.model))

    async def make(self, work: Callable[[Stream[Progress]], object]) -> AsyncGenerator[Progress, None]:
        """Run long work on stored models in a separate thread, one at a time.

        Args:
            work: Puts its reports into the stream, and polls it for cancellation.

        Raises:
            ApiError: other such work is running (409), or this work failed.
        """
        stream: Stream[Progress] = Stream()
        with self._lock:
            if self._building:
                raise conflict(
                    "a model is being made or downloaded already: wait until that is done, or stop it", "busy"
                )
            self._building = True
        with self._listed(stream):
            threading.Thread(
                target=_job, args=(stream, work), kwargs={"release": self._built}, name="builder", daemon=True
            ).start()
            async with aclosing(stream.read()) as items:
                async for item in items:
                    yield item

    def _built(self) -> None:
        with self._lock:
            self._building = False

    async def _queued(
        self,
        work: Callable[[Stream[T]], object],
        alone: Callable[[Stream[T]], bool] = lambda _: True,
        *,
        ends: bool = True,
    ) -> AsyncGenerator[T, None]:
        """Queue work in the engine's thread, and read its stream.

        Args:
            work: The work.
            alone: Called at the work's turn; returns whether ongoing answers must end first.
            ends: Whether the stream ends with the work; else later steps end it.
        """
        stream = Stream[T]()
        if self._waiting >= self._max_waiting:
            raise unavailable(f"{self._max_waiting} requests are waiting already: try again later", "overloaded")
        with self._listed(stream):
            try:
                self._worker.submit(lambda: _job(stream, work, ends=ends), lambda: alone(stream))
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

    # In the engine's thread: answers

    def _step(self) -> bool:
        """Run one step of every loaded model's requests. Returns whether work remains. Never raises."""
        remains, busy = False, [loaded for loaded in self.all_loaded if loaded.busy]
        for loaded in busy:
            try:
                self._answered |= loaded.engine.running > 0
                remains |= loaded.engine.step(beside=len(busy) > 1)
            except BaseException as failure:
                logger.exception("a step failed")
                loaded.engine.fail_all(api_error(failure))
        return remains

    def _submit(self, request: GenerationRequest, stream: Stream[Accepted | Piece]) -> None:
        """Submit a request to the engine. The stream ends with the answer's last piece, or with an error."""

        def receive(item: Piece | Exception) -> None:
            if isinstance(item, Exception):
                stream.end(api_error(item))
            elif item.finish_reason == "cancelled":
                stream.end(api_error(Cancelled(STOPPED)))
            else:
                stream.put(item)
                if item.finish_reason is not None:
                    stream.end()

        loaded = self._ensure(request.model, stream.cancelled, request.keep)
        advised = {name: value for name, value in loaded.sampling.items() if name in request.left_open}
        options = replace(request.options, **advised)  # type: ignore[arg-type]  # top_k is an int
        prompt = _prompt(loaded, request)
        with _refusing(request.field):
            loaded.engine.submit(prompt, options, receive, stream.cancelled, trim=request.trim, chat=request.name)
        opening = TAGS[0] if options.thought else ""
        if request.trim and not options.formed:
            opening = loaded.engine.reasoning_opened(prompt)
        stream.put(loaded.accepted(prompt, opening))

    def _embed(
        self, model: str, texts: Sequence[str | Sequence[int]], keep: Keep, stream: Stream[Embedded], *, cut: bool
    ) -> None:
        loaded = self._ensure(model, stream.cancelled, keep)
        with self._generating():
            for index, text in enumerate(texts):
                with _refusing(f"input[{index}]" if len(texts) > 1 else "input"):
                    tokens = loaded.engine.text_prompt(text) if isinstance(text, str) else text
                    tokens = tokens[: loaded.engine.context - 1] if cut else tokens
                    vector = loaded.engine.embed(tokens, stream.cancelled)
                stream.put(Embedded(model=loaded.name, tokens=len(tokens), vector=vector))
                self._step()

    def _score(
        self,
        model: str,
        prompts: Sequence[str | Sequence[int]],
        options: SamplingOptions,
        more: bool,
        stream: Stream[Scored],
    ) -> None:
        loaded = self._ensure(model, stream.cancelled)
        with self._generating():
            for index, prompt in enumerate(prompts):
                engine = loaded.engine
                with _refusing(f"prompt[{index}]" if len(prompts) > 1 else "prompt"):
                    tokens = engine.text_prompt(prompt) if isinstance(prompt, str) else prompt
                    found = engine.score(tokens, options, more=more, cancelled=stream.cancelled)
                before = prompt if isinstance(prompt, str) else engine.tokenizer.decode(tokens)
                text = before + "".join(one.text for one in found[len(tokens) :])
                stream.put(Scored(model=loaded.name, prompt_tokens=len(tokens), tokens=found, text=text))
                self._step()

    def _inspect(self, request: InspectRequest, stream: Stream[Progress | Inspection]) -> None:
        loaded = self._ensure(request.model, stream.cancelled)
        with self._generating(), _refusing("answer"):
            prompt = loaded.engine.chat_prompt([to_json(message) for message in request.messages])
            answer = request.answer.removeprefix(loaded.engine.reasoning_opened(prompt))
            stream.put(loaded.engine.inspect(prompt, answer, stream.put, stream.cancelled))

    @contextmanager
    def _generating(self) -> Iterator[None]:
        """Context manager: the state is "generating", for work that is not an engine request."""
        with self._lock:
            self._state = "generating"
        try:
            yield
        finally:
            with self._lock:
                self._state = "ready"

    # In the engine's thread: the loaded model

    def _load(self, request: LoadRequest, progress: ProgressCallback, cancelled: Callable[[], bool]) -> LoadedModel:
        """Unload the current model, then load. An unknown model leaves the current one loaded.

        Of the others, those that are in its way are unloaded, the least recently used first.

        Raises:
            Later: models that are answering are in its way.
            ApiError: there is no such model.
            RuntimeFailure, ModelError: it cannot be loaded; no model is loaded then.
        """
        if self.catalogue.info(request.model) is None:
            raise unknown_model(request.model)
        if cancelled():
            raise Cancelled("the load was stopped")
        self._close_loaded()
        self._set("loading", target=request)
        try:
            progress(Progress(phase="load", done=0, total=None, unit="", message=f"loading {request.model}"))
            if (same := self._parked.take(request.model)) is not None:
                same[1].engine.close()
                del same
            loaded = self._load_beside(request, progress, cancelled)
        except Later:
            self._set("empty", target=request)
            raise
        except (Cancelled, CancelledError):
            self._set("empty")
            raise
        except BaseException as error:
            self._set("failed", target=request, error=api_error(error).record)
            raise
        self._answered, self._refines = False, True
        self._set("ready", target=request, loaded=loaded)
        return loaded

    def _load_beside(
        self, request: LoadRequest, progress: ProgressCallback, cancelled: Callable[[], bool]
    ) -> LoadedModel:
        """Load a model as if it were alone, beside as many others as leave room for that; these go on answering.

        Raises:
            Later: those that are answering leave none.
        """

        def report(step: Progress) -> None:
            self._step()
            progress(step)

        while self._parked:
            if len(self._parked) < self._max_models:
                try:
                    return self._loader.load(request, report, cancelled, beside=True)
                except OutOfMemoryError as error:
                    logger.info("there is no room for %s beside other models: %s", request.model, error)
            if not self._parked.drop_idle():
                raise Later(lambda: not cancelled())
        return self._loader.load(request, progress, cancelled)

    def _switch(self, name: str) -> None:
        """Make another model the loaded one: the current one is parked, and a parked one comes back.

        Raises:
            ApiError: there is no such model.
        """
        if self.catalogue.info(name) is None:
            raise unknown_model(name)
        with self._lock:
            loaded, target = self._loaded, self._target
            self._loaded = None
        found = self._parked.take(name)
        if loaded is not None and target is not None:
            self._parked.put(target, loaded)
        if found is not None:
            self._answered, self._refines = False, True
            self._set("ready", target=found[0], loaded=found[1])
        elif target is not None:
            self._set("empty", target=replace(target, model=name, context=None, or_usual=True))

    def _ensure(self, name: str, cancelled: Callable[[], bool], keep: Keep = KEPT) -> LoadedModel:
        """The model of that name, loaded if it is not there, or again if its context is too small.

        The kind of cache, the compensation or its budget, and the backend stay as last requested. So does the context
        if a larger one does not fit.

        Raises:
            ApiError, RuntimeFailure, ModelError: as `_load`.
        """
        self._keep(keep)
        with self._lock:
            other = self._target is None or self._target.model != name
        if other:
            self._switch(name)
        with self._lock:
            loaded, target = self._loaded, self._target or LoadRequest(model=name)
        if loaded is None:
            loaded = self._load(target, ignore_progress, cancelled)
        if loaded.context >= keep.context:
            return loaded
        return self._reload(replace(target, context=keep.context), target, ignore_progress, cancelled)

    def _is_in_use(self, name: str, keep: Keep | None = None) -> bool:
        """Whether a model answers, so that what needs it for itself, or with more context than it has, must wait.

        Args:
            name: The model.
            keep: How it is needed, beside what it answers; None: for itself.
        """
        loaded = next((own for own in self.all_loaded if own.name == name), None)
        return loaded is not None and loaded.busy and (keep is None or loaded.context < keep.context)

    def _keep(self, keep: Keep) -> None:
        """Unload the model after as many idle seconds as a request wants."""
        seconds = self._idle_unload_s if keep.seconds is None else keep.seconds
        if seconds != self.unloads_after_s:
            self.unloads_after_s = seconds
            self._worker.when_idle(seconds, self._unload_idle)

    def _tune(self, request: TuneRequest, stream: Stream[Progress]) -> None:
        """Change the compensation of the loaded model. A model that was unloaded when idle is loaded first.

        Raises:
            ApiError: no model is loaded.
            RuntimeFailure, ModelError: it was stopped, or cannot be done; everything stays as it was.
        """
        self._keep(KEPT)
        with self._lock:
            loaded, target = self._loaded, self._target
        if target is None:
            raise conflict("no model is loaded, so there is nothing to tune: load one first", "no_model")
        compensation = request.compensation
        wanted = replace(
            target,
            k_chunk=compensation.k_chunk,
            budget=compensation.budget,
            prompt_budget=compensation.prompt_budget_percent,
        )
        if loaded is None or loaded.exact != compensation.exact:
            if compensation.exact:
                self._loader.check_source(target.model)  # while the model is still there
            loaded = self._reload(wanted, target, stream.put, stream.cancelled)
            if not request.force or compensation.exact:
                return
        self._tuning = True
        try:
            tuned = self._loader.tune(loaded, request, stream.put, stream.cancelled)
        finally:
            self._tuning = False
        with self._lock:
            self._loaded, self._target = tuned, wanted

    def _reload(
        self,
        wanted: LoadRequest,
        before: LoadRequest,
        progress: ProgressCallback,
        cancelled: Callable[[], bool],
    ) -> LoadedModel:
        """Load a model in another way. If that fails, the next request loads it as before.

        Raises:
            ApiError, RuntimeFailure, ModelError: as `_load`.
        """
        try:
            return self._load(wanted, progress, cancelled)
        except BaseException:
            self._set("empty", target=before)
            raise

    def _refine(self) -> None:
        """Improve the tuning of the loaded model step by step, once it has answered something. Never raises."""
        loaded = self.loaded
        if loaded is None or not (self._answered and self._refines) or self._is_waited_for():
            return
        self._tuning = True
        try:
            while (better := self._loader.refine(loaded, self._is_waited_for)) is not loaded:
                loaded = better
                with self._lock:
                    self._loaded = better
        except Exception:
            self._refines = False
            logger.exception("refining the slowdown budget failed")
        finally:
            self._tuning = False

    def _is_waited_for(self) -> bool:
        """Whether a job waits for the thread."""
        return self._worker.waiting > 0

    def _unload(self) -> None:
        """Unload all models and forget how they were loaded."""
        self._parked.close()
        self._close_loaded()
        self._set("empty")

    def _unload_idle(self) -> None:
        """Unload all models when idle."""
        self._parked.close()
        self._rest()

    def _rest(self) -> None:
        """Unload the loaded model, and reload it in the same way on the next request."""
        with self._lock:
            target, loaded = self._target, self._loaded
        if loaded is not None:
            self._close_loaded()
            self._set("empty", target=target)

    def _close_loaded(self) -> None:
        with self._lock:
            loaded, self._loaded = self._loaded, None
            self._state = "empty" if loaded is not None else self._state
        if loaded is not None:
            loaded.engine.close()
            del loaded
            gc.collect()  # the memory is needed now, for the next model or other programs

    def _set(
        self,
        state: State,
        *,
        target: LoadRequest | None = None,
        loaded: LoadedModel | None = None,
        error: ErrorRecord | None = None,
    ) -> None:
        with self._lock:
            self._state, self._target, self._loaded, self._error = state, target, loaded, error


def _prompt(loaded: LoadedModel, request: GenerationRequest) -> Sequence[int]:
    """The prompt's tokens.

    Raises:
        ApiError: it is invalid, or does not fit.
    """
    with _refusing(request.field):
        return request.prompt(loaded.engine)


@contextmanager
def _refusing(field: str) -> Iterator[None]:
    """Context manager: a text that the engine refuses is refused by the request's name for it.

    Raises:
        ApiError: it is invalid, or does not fit.
    """
    try:
        yield
    except (RequestError, ContextOverflowError) as error:
        raise api_error(error, prompt=field) from error


def _job(
    stream: Stream[T],
    work: Callable[[Stream[T]], object],
    *,
    ends: bool = True,
    release: Callable[[], None] = lambda: None,
) -> None:
    """Do work for a stream. Raises nothing but `Later`: an error ends the stream, after `release`."""
    error: ApiError | None = None
    try:
        if stream.cancelled():
            raise Cancelled(STOPPED)
        work(stream)
    except Later:
        raise
    except BaseException as failure:  # noqa: BLE001 -- the reader gets it, and the thread must live on
        error = api_error(failure)
    release()
    if ends or error is not None:
        stream.end(error)


def open_service(
    home: Path,
    bundle: Bundle,
    *,
    defaults: LoadOptions | None = None,
    idle_unload_s: float | None = None,
    chats: Path | None = None,
    max_models: int = MAX_MODELS,
) -> Service:
    """Create the service of the models under a home folder.

    Args:
        home: The program's folder; the store is `<home>/models`, tuning profiles are in `<home>/profiles`.
        bundle: Files bundled with the program.
        defaults: Defaults of load requests.
        idle_unload_s: Seconds without a request after which a model is unloaded; None: never.
        chats: Folder for saving the caches of long conversations while their model is not loaded; None: nothing of a
            conversation is written to disk.
        max_models: Most models that are loaded at the same time.
    """
    store = Store(home / "models")
    catalogue = Catalogue(store, bundle.models, chats)
    return Service(
        Loader(catalogue, home / PROFILES, defaults, chats=chats, evaluation=bundle.evaluation),
        catalogue,
        ModelBuilder(store, bundle, chats),
        inspector=MachineInspector(home / PROFILES),
        idle_unload_s=idle_unload_s,
        max_models=max_models,
    )
