"""Who gets what of each step: requests are admitted, read, decoded and retired step by step.

One call of `step` does, for all requests that run:

1. End those that were cancelled. Admit the one that has waited for longest, if no prompt is being read, a slot is free,
   and the pages for prompt and answer are free or can be taken from idle conversations whatever the others grow to.
2. Drafts of all requests that speculate, together, one row of each at a time.
3. One round of all that decode, together: a token, or the rows that verify a draft.
4. A chunk of the prompt that is being read: `CHUNK` rows while others run, a full step where nobody does.

So between two rounds of a request stand one round of the others and a chunk at most, however long a prompt is; and a
prompt gets on by a chunk with every token of the others, however many they are. Prompts are read one after the other,
in the order in which they came: whoever begins finds in the cache what the ones before have in common with him.

Rows of prompts, drafts and tokens make steps of their own. Those of prompts are compensated together, by a program of
their own on every backend, so that a common step would read the weights twice anyway; drafts read less of the cache.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from runtime.backends.decoder import Decoder
from runtime.engine.conversations.conversations import Conversations
from runtime.engine.generation import Piece
from runtime.engine.rows import RowKind, compute
from runtime.engine.scheduling.request import Request
from runtime.engine.speculation.rounds import Place
from runtime.errors import OutOfMemoryError

ROUND: tuple[RowKind, ...] = ("drawn", "decode", "prompt")
"""What is run after the drafts, each at most once a step."""
CHUNK = 64
"""Rows of a prompt between two tokens of requests that decode."""
REMAINDER = 16
"""A chunk takes so many rows more rather than leaving them: few rows are compensated, and cut into pieces by attention,
in another way than many, and an answer must not hang on who is beside it."""


class Scheduler:
    """The requests of one decoder, which has a session as long as there are any. Not thread-safe.

    Args:
        decoder: Computes.
        conversations: What its slots hold.
    """

    def __init__(self, decoder: Decoder, conversations: Conversations) -> None:
        self._decoder, self._conversations = decoder, conversations
        self.waiting: deque[Request] = deque()
        """Requests that have not begun, in the order in which they came."""
        self.running: list[Request] = []
        """Requests that have a slot."""
        self.most = decoder.options.slots
        """Requests that may run at the same time."""
        self.closed = False
        """Whether requests end at once."""
        self._session = ExitStack()
        self._in_session = self._stepping = False
        self._full = False  # whether the first that waits has to wait until somebody ends
        self._spent = self._began = 0.0

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.running or self.waiting)

    def _clock(self) -> float:
        """Seconds, on a clock that stands still between steps; to be asked within one."""
        return self._spent + time.perf_counter() - self._began

    def place(self, slot: int) -> Place:
        """Where the rounds of a slot take place."""
        return Place(
            decoder=self._decoder,
            conversations=self._conversations,
            slot=slot,
            company=self._company,
            clock=self._clock,
        )

    def _company(self) -> int:
        """How many requests run."""
        return len(self.running)

    def add(self, request: Request) -> None:
        """Take a request."""
        self.waiting.append(request)
        if self.closed:
            self._end_all()

    def step(self) -> bool:
        """Do one round of everybody; see above. Returns whether there is more to do."""
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
        """Take a request, and run steps until it ends. To be closed.

        Args:
            request: The request.
            items: What its receiver fills.
        """
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
            if not request.answer.ended:  # nobody wants the rest
                request.cancelled = lambda: True
                self._rest()

    def _rest(self) -> bool:
        """End what was cancelled, and the session where nobody is left. Returns whether somebody is."""
        if self._stepping:  # a generator that nobody holds any longer was found in the middle of a step
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
        self._admit()
        while drafts := self._wanting("draft"):
            self._forward(drafts)
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
        """Drop what is cached of a chat, or everything; of requests that have not ended, when they end."""
        self._conversations.forget(chat)
        for request in self.waiting:
            request.forgotten = request.forgotten or chat is None or request.run.chat == chat

    def _end_cancelled(self) -> None:
        """End the requests that nobody wants any longer."""
        for request in [*self.running, *self.waiting]:
            if request.cancelled():
                self._cancel(request)

    def _admit(self) -> None:
        """Let the first that waits begin, if it can."""
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
        except Exception as error:  # noqa: BLE001 -- it is this request's alone
            request.answer.fail(error)
            return
        if request.forgotten:
            self._conversations.forget_slot(slot)
        self.running.append(request)
        request.begin(slot, cached, self._conversations.tokens(slot), self._chunk)

    def _chunk(self, done: int, left: int) -> int:
        """Rows of a prompt to be run next: to where a step would end if nobody else were there, or a part of that."""
        most = self._decoder.options.max_rows
        full = min(left, most - done % most)
        return CHUNK if self._company() > 1 and full > CHUNK + REMAINDER else full

    def _wanting(self, kind: RowKind) -> list[Request]:
        """The requests that need rows of a kind next."""
        return [request for request in self.running if request.rows is not None and request.rows.kind == kind]

    def _forward(self, requests: Sequence[Request]) -> None:
        """Run the rows of some requests, of one kind, in as few steps as they fit."""
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
        """Run a step. Where it fails, each request runs by itself, so that an error is that of whose rows it is."""
        parts = [request.rows for request in requests if request.rows is not None]
        try:
            for rows in parts:
                self._conversations.make_room(rows.slot, rows.start + len(rows.tokens))
            found = compute(self._decoder, parts)
        except Exception as error:  # noqa: BLE001 -- whoever asked gets it, and the others go on
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
        """Let a request draw from its logits."""
        try:
            request.go_on(found)
        except Exception as error:  # noqa: BLE001 -- as above
            request.answer.fail(error)
            request.rows = None
        if request.rows is None:
            self._retire(request)

    def _retire(self, request: Request) -> None:
        """Let a request's slot be somebody else's. What it holds stays for whoever goes on from there."""
        self.running.remove(request)
        self._conversations.release(request.run.slot)
        self._full = False
