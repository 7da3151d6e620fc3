"""Scheduler: admits requests by free slots and pages, and interleaves prefill, drafts and decoding step by step.

Each call of `step` does the following for all running requests:

1. End cancelled requests. Admit the one that has waited longest if no prompt is being read, a slot is free, and pages
   for its prompt and answer are free or can be evicted from idle conversations even if all running requests grow to
   their limits.
2. Draft for all requests that speculate, in batches of one row each.
3. Run one decoding round of all answers in a batch: a token each, or the rows that verify a draft.
4. Prefill a chunk of the prompt that is being read: `CHUNK` rows if other requests run, otherwise a full step.

So a request waits at most for one round of the others and one chunk between its own rounds, however long the prompt is,
and a prompt advances by one chunk for every token of the others, however many there are. Prompts are read one at a
time, in the order of arrival, so that each finds in the cache what it has in common with those before it.

Prompt rows, draft rows and decode rows run in separate steps. Every backend compensates prompt rows together in a
program of their own, so a mixed step would read the weights twice anyway; drafts read less of the cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from runtime.backends.decoder import Decoder
from runtime.engine.conversations.conversations import Conversations
from runtime.engine.rows import RowKind, compute
from runtime.engine.scheduling.request import Request
from runtime.errors import OutOfMemoryError

ROUND: tuple[RowKind, ...] = ("drawn", "decode", "prompt")
"""Tasks to run after the drafts, each at most once a step."""
CHUNK = 64
"""Prompt rows per step while other requests decode."""
REMAINDER = 16
"""A chunk grows by up to this many rows rather than leave them as a remainder: a few rows are compensated, and split by
attention, differently from many, and an answer must not depend on concurrent requests."""


class Scheduler:
    """The requests of one decoder. Not thread-safe.

    Args:
        decoder: The model.
        conversations: The contents of its slots.
    """

    def __init__(self, decoder: Decoder, conversations: Conversations) -> None:
        self._decoder, self._conversations = decoder, conversations
        self.waiting: deque[Request] = deque()
        """Requests that have not started, in order of arrival."""
        self.running: list[Request] = []
        """Requests that have a slot."""
        self.most = decoder.options.slots
        """Most requests running at the same time."""
        self._full = False  # whether the first waiting request must wait until a running one ends
        self._spent = self._began = 0.0

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""
        return bool(self.running or self.waiting)

    def clock(self) -> float:
        """Time in seconds, on a clock that stops between steps; call it within a step."""
        return self._spent + time.perf_counter() - self._began

    def concurrent(self) -> int:
        """Number of running requests."""
        return len(self.running)

    def add(self, request: Request) -> None:
        """Queue a request."""
        self.waiting.append(request)

    def step(self) -> None:
        """Run one round of all requests; see the module's docstring."""
        self._began = time.perf_counter()
        self.end_cancelled()
        self._admit()
        while drafts := self._wanting("draft"):
            self._forward(drafts)
        for kind in ROUND:
            if requests := self._wanting(kind):
                self._forward(requests)
        self._spent = self.clock()

    def cancel(self, request: Request) -> None:
        """End a request now, in whatever state it is."""
        if request in self.waiting:
            self.waiting.remove(request)
            self._full = False
        elif request in self.running:
            self._retire(request)
        request.answer.end("cancelled")

    def end_all(self, error: Exception | None = None) -> None:
        """End all requests, as cancelled or with an error."""
        for request in [*self.running, *self.waiting]:
            if error is not None:
                request.answer.fail(error)
            self.cancel(request)

    def forget(self, chat: str | None) -> None:
        """Drop the cached tokens of a chat, or of all; those of running requests when they end."""
        self._conversations.forget(chat)
        for request in self.waiting:
            request.forgotten = request.forgotten or chat is None or request.run.chat == chat

    def end_cancelled(self) -> None:
        """End cancelled requests."""
        for request in [*self.running, *self.waiting]:
            if request.cancelled():
                self.cancel(request)

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
        return CHUNK if self.concurrent() > 1 and full > CHUNK + REMAINDER else full

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
                self._conversations.make_room(rows.slot, rows.start + len(rows.tokens))
            found = compute(self._decoder, parts)
        except Exception as error:  # noqa: BLE001 -- the request gets the error, and the others continue
            if len(requests) == 1:
                requests[0].answer.fail(error)
                self._retire(requests[0])
                return
            for request in requests:
                self._forward_part([request])
            return
        for request, own in zip(requests, found, strict=True):
            self._go_on(request, own)

    def _go_on(self, request: Request, found: Any) -> None:
        """Pass a request its results."""
        try:
            request.go_on(found)
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
