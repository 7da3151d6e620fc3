"""Score the bundled model in every form and print a table: `python -m tests.bench.demo_table`.

The low-bit forms answer through the program's own engine, greedily, with and without error compensation. They are made
anew from the checkpoint, by round-to-nearest as the bundled form is.
"""

from __future__ import annotations

import argparse
import json
import sys
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
from runtime.load.open import open_engine
from runtime.text.sampling import SamplingOptions


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
    """Command line: a Markdown table on standard output, the wrong answers in a file."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.demo_table", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=demo_checkpoint_path(), help="Hugging Face folder")
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    parser.add_argument("--k-chunk", type=int, default=64, help="compensated channels of 1024")
    parser.add_argument("--wrong", type=Path, help="file for the wrong answers")
    given = parser.parse_args(arguments)
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
                sys.stderr.write(f"{name}\n")
                with LowBit(folder, k_chunk) as low:
                    columns[name], wrong[name] = score(low, asked)
    rows = ["| kind | " + " | ".join(columns) + " |", "|---" + "|---:" * len(columns) + "|"]
    for kind in KINDS:
        cells = (f"{sum(right[kind])} / {len(right[kind])}" for right in columns.values())
        rows.append(f"| {kind} | " + " | ".join(cells) + " |")
    sys.stdout.write("\n".join(rows) + "\n")
    if given.wrong:
        given.wrong.write_text(json.dumps(wrong, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
