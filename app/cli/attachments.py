"""Documents given to `run`: short ones go into the prompt, long ones and folders are searched for every question."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.cli.output import Output
from app.conversation import Passage
from app.documents.citation import cited
from app.documents.prompt import (
    BYTES_PER_TOKEN,
    PASSAGE_SHARE,
    WHOLE_SHARE,
    attached,
    passage_room,
    shortened,
    with_passages,
)
from app.errors import DocumentError
from app.printable import printable_name

if TYPE_CHECKING:
    from app.documents.index import Index
    from app.documents.reader import Reader
    from runtime.engine.engine import Engine

_CHAT = "run"


class Attachments:
    """The documents of one run. Nothing of them is stored."""

    def __init__(self, engine: Engine, output: Output) -> None:
        """Begin without any.

        Args:
            engine: Counts tokens, and has the context.
            output: Says what became of each.
        """
        self._engine, self._output = engine, output
        self._reader: Reader | None = None
        self._index: Index | None = None
        self._whole: list[str] = []
        self._sources: list[Path] = []
        self._questions: list[str] = []

    def close(self) -> None:
        """End the reader, and forget everything."""
        if self._reader is not None:
            self._reader.close()
        if self._index is not None:
            self._index.close()

    def add(self, path: Path) -> None:
        """Attach a file or folder.

        Raises:
            DocumentError: it can't be read.
        """
        from app.documents.reader import Reader

        where = path.expanduser().absolute()
        reader = self._reader = self._reader or Reader()
        if where.is_dir() or not self._send_whole(reader, where):
            self._search(reader, where)

    def _send_whole(self, reader: Reader, path: Path) -> bool:
        """Keep a file for the next prompt; returns whether it is short enough."""
        text, problem = reader.text(path)
        tokens = self._tokens(text)
        if tokens is None or tokens > WHOLE_SHARE * self._engine.context:
            return False
        name = printable_name(path.name)
        self._whole.append(attached(name, text))
        self._output.note(f"{name}: {tokens:,} tokens")
        if problem:
            self._output.note(problem)
        return True

    def _tokens(self, text: str) -> int | None:
        """Tokens of a text; None if they are certainly more than the context holds."""
        from runtime.errors import ContextOverflowError

        try:
            return len(self._engine.tokenizer.encode(text, special=False, most=self._engine.context))
        except ContextOverflowError:
            return None

    def _search(self, reader: Reader, path: Path) -> None:
        from app.documents.index import Index

        self._index = self._index or Index(None, reader)
        state = self._index.update(_CHAT, path)
        if not state.passages:
            raise DocumentError(state.problems[0] if state.problems else f"{state.name} has no text to search")
        self._sources.append(path)
        for problem in state.problems:
            self._output.note(problem)
        files = "" if state.files == 1 else f"{state.files:,} files, "
        size = f"{files}about {state.tokens:,} tokens"
        self._output.note(f"{state.name} ({size}) is too long to be sent: it is searched for each question")

    def prompt(self, question: str) -> tuple[str, Sequence[Passage] | None]:
        """What the model reads for a question, and the passages in it; None if nothing is searched."""
        given, self._whole = self._whole, []
        passages = None
        told = question
        if self._index is not None and self._sources:
            room = passage_room(self._engine.context, 1 / BYTES_PER_TOKEN)
            self._questions.append(question)
            passages = self._index.search(self._sources, self._questions, room)
            while passages and not self._fits("".join(one.text for one in passages)):
                *passages, last = passages
                if not passages:
                    passages = [shortened(last, len(last.text) // 2)]
            told = with_passages(question, passages)
        return "\n\n".join([*given, told]), passages

    def _fits(self, text: str) -> bool:
        """Whether passages take no more of the context than they may; a model's tokens may be short."""
        tokens = self._tokens(text)
        return tokens is not None and tokens <= PASSAGE_SHARE * self._engine.context

    def tell(self, passages: Sequence[Passage] | None) -> None:
        """Say which passages an answer was given."""
        if passages is not None:
            self._output.note(cited(passages))
