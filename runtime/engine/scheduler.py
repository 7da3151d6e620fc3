"""Scheduler: admits requests by free slots and pages, and interleaves prefill, drafts and decoding step by step.

Each call of `step` does the following for all running requests:

1. End cancelled requests. Draft for all requests that speculate, in batches of one row each.
2. Admit the request that has waited longest if no prompt is being read, a slot is free, and pages for its prompt and
   answer are free or can be evicted from idle conversations even if all running requests grow to their limits.
3. Run one decoding round of all answers in a batch: a token each, or the rows that verify a draft.
4. Prefill a chunk of the prompt that is being read: `CHUNK` rows if other requests run, here or of another model,
   otherwise a full step.

So a request waits at most for one round of the others and one chunk between its own rounds, however long the prompt is,
and a prompt advances by one chunk for every token of the others, however many there are. Prompts are read one at a
time, in the order of arrival, so that each finds in the cache what it has in common with those before it.

Prompt rows, draft rows and decode rows run in separate steps. Every backend compensates prompt rows together in a
program of their own, so a mixed step would read the weights twice anyway; drafts read less of the cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import accumulate
from typing import Any, TypeVar, cast

import numpy as np

from runtime.backends.decoder import Decoder, DrawsTokens, PredictsFurther, Step
from runtime.engine.conversations import Conversations
from runtime.engine.decoding import DecodeContext, Rounds
from runtime.engine.generation import Answer, Piece
from runtime.engine.work import RowKind, Rows, Work
from runtime.errors import OutOfMemoryError

T = TypeVar("T")


def step_of(parts: Sequence[Rows]) -> Step:
    """Build one step from the rows of several sequences, all of one kind."""
    kind = parts[0].kind
    tokens: list[int] = []
    slots: list[int] = []
    positions: list[int] = []
    wanted: list[int] = []
    for rows in parts:
        count = len(rows.tokens)
        tokens += rows.tokens
        slots += [rows.slot] * count
        positions += range(rows.start, rows.start + count)
        wanted += range(len(tokens) - rows.wanted, len(tokens))
    return Step(
        tokens=np.array(tokens, np.int32),
        slots=np.array(slots, np.int32),
        positions=np.array(positions, np.int32),
        logit_rows=np.array(wanted, np.int32),
        prefill=kind == "prompt",
        draft=kind in DRAFTS,
        stream=np.concatenate([rows.stream for rows in parts if rows.stream is not None]) if kind == "mtp" else None,
    )


def compute(decoder: Decoder, parts: Sequence[Rows]) -> Sequence[Any]:
    """Run one step for the rows of several sequences, all of one kind. Returns the value to send to each generator."""
    if parts[0].kind == "mtp":
        decoder = cast("Decoder", cast("PredictsFurther", decoder).mtp)
    step = step_of(parts)
    draws = [rows.draw for rows in parts if rows.draw is not None]
    if draws:
        return cast("DrawsTokens", decoder).draw(step, draws)
    logits = decoder.forward(step)
    ends = accumulate(rows.wanted for rows in parts)
    found = [logits[end - rows.wanted : end] for rows, end in zip(parts, ends, strict=True)]
    if not any(rows.left for rows in parts):
        return found
    left, ends = cast("PredictsFurther", decoder).left(), accumulate(len(rows.tokens) for rows in parts)
    return [
        (own, left[end - len(rows.tokens) : end]) if rows.left else own
        for own, rows, end in zip(found, parts, ends, strict=True)
    ]


def run_alone(decoder: Decoder, work: Work[T]) -> T:
    """Run one generator to its end without other sequences. Returns its result."""
    try:
        rows = next(work)
        while True:
            rows = work.send(compute(decoder, [rows])[0])
    except StopIteration as end:
        result: T = end.value
        return result


class Request:
    """A generation, and the rows that it needs next; `cancelled` is polled between steps, from any thread."""

    def __init__(self, answer: Answer, cancelled: Callable[[], bool], rounds: Callable[[int], Rounds]) -> None:
        self.answer, self.run, self.cancelled = answer, answer.run, cancelled
        self._rounds = rounds
        self._work: Work[None] | None = None
        self.rows: Rows | None = None
        """The rows it needs next; None before it begins and after it ends."""
        self.forgotten = False
        """Whether to drop its cache entries at the end."""

    @property
    def end(self) -> int:
        """Most tokens of prompt and answer together."""
        return len(self.run.prompt) + self.answer.limit

    def begin(self, slot: int, cached: int, held: list[int], chunk: Callable[[int, int], int]) -> None:
        """Start in a slot.

        Args:
            slot: The slot; it holds the first `cached` tokens of the prompt.
            cached: Number of prompt tokens in the slot.
            held: The slot's tokens; tokens that enter the cache are appended.
            chunk: Returns how many rows of the prompt to run next, given how many were run and how many are left.
        """
        self.run.slot, self.run.cached = slot, cached
        self._work = self._steps(held, chunk)
        self.rows = next(self._work)

    def go_on(self, result: Any) -> None:
        """Continue with the results of the requested rows; see `runtime.engine.decoding.Work`."""
        assert self._work is not None
        try:
            self.rows = self._work.send(result)
        except StopIteration:
            self.rows = None

    def _steps(self, held: list[int], chunk: Callable[[int, int], int]) -> Work[None]:
        """Run the uncached part of the prompt, then rounds of decoding (of one token each without speculation)."""
        run, answer, began, start = self.run, self.answer, time.perf_counter(), self.run.cached
        rounds = self._rounds(run.slot)
        mtp = rounds.mtp
        if mtp is not None:
            mtp.begin(run.slot, held)
        while start < len(run.prompt):
            tokens = run.prompt[start : start + chunk(start - run.cached, len(run.prompt) - start)]
            last = start + len(tokens) == len(run.prompt)
            if mtp is None:
                logits = yield Rows(slot=run.slot, start=start, tokens=tokens, wanted=int(last), kind="prompt")
            else:
                yield from mtp.catch_up(run.slot)
                rows = Rows(slot=run.slot, start=start, tokens=tokens, wanted=int(last), kind="prompt", left=True)
                logits, left = yield rows
                mtp.follow(run.slot, start, tokens, left)
            held += tokens
            start += len(tokens)
        run.prefill_s = time.perf_counter() - began
        yield from rounds.decode(logits[0], answer.take, lambda: answer.remaining)


DRAFTS: tuple[RowKind, ...] = ("mtp", "draft")
"""Tasks to run before the round of all, as often as there are any."""
ROUND: tuple[RowKind, ...] = ("drawn", "decode", "prompt")
"""Tasks to run after the drafts, each at most once a step."""
CHUNK = 64
"""Prompt rows per step while other requests run."""
REMAINDER = 16
"""A chunk grows by up to this many rows rather than leave them as a remainder: a few rows are compensated, and split by
attention, differently from many, and an answer must not depend on concurrent requests."""


class Scheduler:
    """The requests of one decoder, which has a session as long as there are any. Not thread-safe."""

    def __init__(self, decoder: Decoder, conversations: Conversations) -> None:
        self._decoder, self._conversations = decoder, conversations
        self.waiting: deque[Request] = deque()
        """Requests that have not started, in order of arrival."""
        self.running: list[Request] = []
        """Requests that have a slot."""
        self.most = decoder.options.slots
        """Requests that may run at the same time."""
        self.beside = False
        """Whether other models answer, too, which take turns with this one."""
        self.closed = False
        """Whether requests end at once."""
        self._session = ExitStack()
        self._in_session = self._stepping = False
        self._full = False  # whether the first that waits has to wait until somebody ends
        self._spent = self._began = 0.0

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running or self.waiting)

    def _clock(self) -> float:
        """Time in seconds, on a clock that stops between steps; call it within a step."""
        return self._spent + time.perf_counter() - self._began

    def context(self, slot: int) -> DecodeContext:
        """The context of decoding in a slot."""
        return DecodeContext(
            decoder=self._decoder,
            conversations=self._conversations,
            slot=slot,
            concurrent=self._concurrent,
            clock=self._clock,
        )

    def _concurrent(self) -> int:
        return len(self.running)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        if self.closed:
            self._end_all()

    def step(self) -> bool:
        """Run one round of all requests; see the module's docstring. Returns whether work remains."""
        if self.busy:
            if not self._in_session:
                self._session.enter_context(self._decoder.session())
                self._in_session = True
            self._stepping = True
            try:
                self._round()
            finally:
                self._stepping = False
        return self._rest()

    def pieces(self, request: Request, items: deque[Piece | Exception]) -> Iterator[Piece]:
        """Queue a request and run steps until it ends; its receiver fills `items`. Close the generator."""
        try:
            self.add(request)
            while items or not request.answer.ended:
                if not items:
                    self.step()
                while items:
                    item = items.popleft()
                    if isinstance(item, Exception):
                        raise item
                    yield item
        finally:
            if not request.answer.ended:  # the rest is not wanted
                request.cancelled = lambda: True
                self._rest()

    def _rest(self) -> bool:
        """End cancelled requests, and the session if none is left. Returns whether any is left."""
        if self._stepping:  # an abandoned generator was collected in the middle of a step
            return True
        self._end_cancelled()
        if self.busy:
            return True
        self._in_session = False
        self._session.close()
        return False

    def end(self, error: Exception | None = None) -> None:
        """End all requests, as cancelled or by an error."""
        self._end_all(error)
        self._rest()

    def _round(self) -> None:
        self._began = time.perf_counter()
        self._end_cancelled()
        for kind in DRAFTS:
            while drafts := self._wanting(kind):
                self._forward(drafts)
        self._admit()
        for kind in ROUND:
            if requests := self._wanting(kind):
                self._forward(requests)
        self._spent = self._clock()

    def _cancel(self, request: Request) -> None:
        """End a request now, wherever it stands."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._full = False
        elif request in self.running:
            self._retire(request)
        request.answer.end("cancelled")

    def _end_all(self, error: Exception | None = None) -> None:
        for request in [*self.running, *self.waiting]:
            if error is not None:
                request.answer.fail(error)
            self._cancel(request)

    def forget(self, chat: str | None) -> None:
        """Drop the cached tokens of a chat, or of all; those of running requests when they end."""
        self._conversations.forget(chat)
        for request in self.waiting:
            request.forgotten = request.forgotten or chat is None or request.run.chat == chat

    def _end_cancelled(self) -> None:
        """End the requests that nobody wants any longer."""
        for request in [*self.running, *self.waiting]:
            if request.cancelled():
                self._cancel(request)

    def _admit(self) -> None:
        """Start the first waiting request if possible."""
        if self._full or not self.waiting or len(self.running) >= self.most or self._wanting("prompt"):
            return
        request = self.waiting[0]
        prompt = request.run.prompt
        if not self._conversations.has_room_for(prompt, request.end):
            self._full = bool(self.running)
            if not self.running:
                self.waiting.popleft()
                request.answer.fail(
                    OutOfMemoryError(
                        f"the KV cache has no room for {request.end} tokens, prompt and answer: ask for a shorter "
                        "answer, or load the model with a longer context"
                    )
                )
            return
        self.waiting.popleft()
        try:
            slot, cached = self._conversations.begin(prompt, request.run.chat, end=request.end)
        except Exception as error:  # noqa: BLE001 -- the error concerns this request only
            request.answer.fail(error)
            return
        if request.forgotten:
            self._conversations.forget_slot(slot)
        self.running.append(request)
        request.begin(slot, cached, self._conversations.tokens(slot), self._chunk)

    def _chunk(self, done: int, left: int) -> int:
        """Prompt rows to run next: up to the end of the step that an idle scheduler would run, or part of that."""
        most = self._decoder.options.max_rows
        full = min(left, most - done % most)
        alone = self._concurrent() == 1 and not self.beside
        return full if alone or full <= CHUNK + REMAINDER else CHUNK

    def _wanting(self, kind: RowKind) -> list[Request]:
        """The requests whose next rows are of a kind."""
        return [request for request in self.running if request.rows is not None and request.rows.kind == kind]

    def _forward(self, requests: Sequence[Request]) -> None:
        """Run the rows of some requests, all of one kind, in as few steps as possible."""
        most, count, part = self._decoder.options.max_rows, 0, list[Request]()
        for request in requests:
            assert request.rows is not None
            count += len(request.rows.tokens)
            if part and count > most:
                self._forward_part(part)
                count, part = len(request.rows.tokens), []
            part.append(request)
        self._forward_part(part)

    def _forward_part(self, requests: Sequence[Request]) -> None:
        """Run a step. If it fails, run each request by itself, so that only the faulty request gets the error."""
        parts = [request.rows for request in requests if request.rows is not None]
        try:
            for rows in parts:
                if rows.kind != "mtp":
                    self._conversations.make_room(rows.slot, rows.start + len(rows.tokens))
            results = compute(self._decoder, parts)
        except Exception as error:  # noqa: BLE001 -- the request gets the error, and the others continue
            if len(requests) == 1:
                requests[0].answer.fail(error)
                self._retire(requests[0])
                return
            for request in requests:
                self._forward_part([request])
            return
        for request, result in zip(requests, results, strict=True):
            self._go_on(request, result)

    def _go_on(self, request: Request, result: Any) -> None:
        """Pass a request its results."""
        try:
            request.go_on(result)
        except Exception as error:  # noqa: BLE001 -- as above
            request.answer.fail(error)
            request.rows = None
        if request.rows is None:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Free a request's slot. Its contents stay cached for later prompts."""
        self.running.remove(request)
        self._conversations.release(request.run.slot)
        self._full = False
