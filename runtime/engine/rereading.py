"""Operations of an engine on existing text: embedding and inspection. No text is generated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from models.progress import ProgressCallback, ignore_progress, never_cancelled
from runtime.backends.decoder import Decoder, Float32Array
from runtime.engine.embedding import embed
from runtime.engine.inspection import MAX_TOKENS, compensates, inspect
from runtime.errors import RequestError
from runtime.text.tokenizer import Tokenizer
from runtime.wire.inspection import Inspection


class LendsDecoder(Protocol):
    """The parts of an engine used here."""

    name: str
    tokenizer: Tokenizer

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer together."""

    @property
    def speculates(self) -> bool:
        """Whether the model drafts for itself."""

    def borrow(self, tokens: int = ...) -> AbstractContextManager[Decoder]:
        """Borrow the decoder; see `Engine.borrow`."""

    def _checked(self, prompt: Sequence[int]) -> list[int]: ...


class Rereading:
    """The part of the engine that reads existing text."""

    def embed(
        self: LendsDecoder, tokens: Sequence[int], cancelled: Callable[[], bool] = never_cancelled
    ) -> Float32Array:
        """See `runtime.engine.embedding.embed`.

        Waits until all requests have ended; tokens are checked as `submit` does.
        """
        checked = self._checked(tokens)
        with self.borrow(len(checked)) as decoder, decoder.session():
            return embed(decoder, checked, cancelled)

    def inspect(
        self: LendsDecoder,
        prompt: Sequence[int],
        answer: str,
        progress: ProgressCallback = ignore_progress,
        cancelled: Callable[[], bool] = never_cancelled,
    ) -> Inspection:
        """Inspect the tokens of an answer, or of its beginning; see `runtime.engine.inspection.inspect`.

        Waits until all requests have ended.

        Raises:
            RequestError, ContextOverflowError: as `submit`, of both together.
        """
        spoken = self.tokenizer.encode(answer, special=False, most=self.context)[:MAX_TOKENS]
        if not spoken:
            raise RequestError("the answer is empty: there is no token to look at")
        read = self._checked([*prompt, *spoken[:-1]])
        with self.borrow(len(read)) as decoder, decoder.session():
            told = inspect(
                decoder, self.tokenizer, prompt, spoken, drafts=self.speculates, progress=progress, cancelled=cancelled
            )
            return Inspection(
                tokens=told, model=self.name, compensated=compensates(decoder), complete=len(spoken) < MAX_TOKENS
            )
