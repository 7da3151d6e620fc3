"""Score the bundled model in every form and print a table: `python -m tests.lab.demo_table`.

The low-bit forms answer through the program's own engine, greedily, with and without error compensation. They are made
anew from the checkpoint, by round-to-nearest as the bundled form is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from assets import demo_checkpoint_path
from assets.demo_model.pack import pack
from assets.demo_model.questions import KINDS, questions
from assets.demo_model.score import LONGEST_ANSWER, FullPrecision, score
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.engine.engine import Engine
from runtime.load.plan import open_engine
from runtime.text.sampling import SamplingOptions
from tests.lab.store import parser, table, write


class LowBit:
    """Greedy answers of a stored model through the program's own engine.

    Args:
        folder: The stored model.
        k_chunk: Compensated channels of 1024; 0 for none.
        backend: As for `lowbit-chat run`.
    """

    def __init__(self, folder: Path, k_chunk: int, *, backend: str = "cpu") -> None:
        model = StoredModel.open_folder(folder, "demo")
        options = DecoderOptions(context=model.spec.max_context, k_chunk=k_chunk)
        self.engine: Engine = open_engine(model, options, backend)

    def __enter__(self) -> Self:
        """The answerer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the model."""
        self.engine.close()

    def answer(self, messages: Sequence[dict[str, str]]) -> str:
        """The likeliest answer, token by token, without special tokens."""
        options = SamplingOptions(temperature=0.0, max_tokens=LONGEST_ANSWER)
        return "".join(piece.text for piece in self.engine.generate(self.engine.chat_prompt(messages), options))


def main(arguments: list[str] | None = None) -> None:
    """Score, print, and keep the wrong answers where asked."""
    options = parser(__doc__)
    options.add_argument("--checkpoint", type=Path, default=demo_checkpoint_path(), help="Hugging Face folder")
    options.add_argument("--count", type=int, default=100, help="questions of each kind")
    options.add_argument("--k-chunk", type=int, default=64, help="compensated channels of 1024")
    given = options.parse_args(arguments)
    asked = questions(given.count)
    columns: dict[str, dict[str, list[bool]]] = {}
    wrong: dict[str, list[dict[str, str]]] = {}
    columns["full precision"], wrong["full precision"] = score(FullPrecision(given.checkpoint), asked)
    with tempfile.TemporaryDirectory() as scratch:
        for bits in (4, 3):
            folder = Path(scratch) / str(bits)
            pack(given.checkpoint, folder, bits=bits)
            for k_chunk in (0, given.k_chunk):
                name = f"{bits} bits, k_chunk {k_chunk}"
                with LowBit(folder, k_chunk) as low:
                    columns[name], wrong[name] = score(low, asked)
    cells = ([kind, *(f"{sum(own[kind])} / {len(own[kind])}" for own in columns.values())] for kind in KINDS)
    print(table(("kind", *columns), cells))
    write(given.out, wrong)


if __name__ == "__main__":
    main()
