"""Documents: time and memory of reading and searching them, and whether embeddings find what words do not.

    python -m tests.bench.documents [--embeddings FOLDER] [--out FILE]

- `folder`: Python files with 100,000 lines, from the standard library: read, read again unchanged, searched.
- `pdf`: a PDF file of 300 pages, made here: read and searched for one sentence, and for something that is not in it.
- `found`: questions about two books, and about what is in neither (`tests.bench.document_questions`): how often the
  answer's passage is the first, or among the first five; how many questions about nothing get nothing.
- with `--embeddings` and a stored model, only this: the same by the model's embeddings of question and passages, and by
  both ranks together (reciprocal rank fusion), with the time that the passages take.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from app.conversation import Passage
from app.documents.index import Index
from app.documents.reader import Reader
from app.documents.sections import MOST, chunks
from tests.app.documents.making import pdf
from tests.bench.document_questions import ALICE, MOBY, NOWHERE
from tests.bench.reporting.cases import DATA
from tests.bench.reporting.origin import ROOMS
from tests.bench.reporting.run import about_run, write_report

OUT = Path(__file__).parent / "results" / "documents.json"
LINES = 100_000
PAGES, LINES_OF_PAGE = 300, 40
ROUNDS = 15
ROOM = 7500
"""Characters of passages: five of them, about."""
CHAT = "bench"
_FUSED = 60
"""Constant of reciprocal rank fusion, as its authors chose it (Cormack et al. 2009)."""
SENTENCE = "The custodian of the observatory is Marguerite Vance."


@contextmanager
def opened(home: Path) -> Iterator[tuple[Index, Reader]]:
    """An index in a file, and its reader."""
    with closing(Reader()) as reader, closing(Index(home / "history.db", reader)) as index:
        yield index, reader


class Peak(dict[str, float]):
    """Memory of this process and its children beyond what it had, in MB, looked at between files."""

    def __init__(self) -> None:
        super().__init__(own=0.0, child=0.0)
        self._process = psutil.Process()
        self._before = self._process.memory_info().rss

    def look(self, *_: object) -> None:
        """Look now."""
        self["own"] = max(self["own"], (self._process.memory_info().rss - self._before) / 1e6)
        held = [child.memory_info().rss for child in self._process.children()]
        self["child"] = max(self["child"], max(held, default=0) / 1e6)


def timed(act: Callable[[], object]) -> float:
    """Seconds that an act takes."""
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def searched(index: Index, source: Path, questions: Mapping[str, str]) -> dict[str, float]:
    """Median milliseconds of searches, by their names."""
    return {
        name: round(
            1e3 * statistics.median(timed(lambda q=q: index.search([source], [q], ROOM)) for _ in range(ROUNDS)), 1
        )
        for name, q in questions.items()
    }


def folder(home: Path) -> dict[str, Any]:
    """A folder of 100,000 lines of Python."""
    place = home / "code"
    place.mkdir()
    lines = files = 0
    for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
        if lines >= LINES:
            break
        if "site-packages" not in file.parts and "test" not in file.parts:
            text = file.read_bytes()
            lines += text.count(b"\n")
            files += 1
            shutil.copy(file, place / f"{files:04}_{file.name}")
    with opened(home) as (index, _):
        peak = Peak()
        first = timed(lambda: index.update(CHAT, place, peak.look))
        again = statistics.median(timed(lambda: index.update(CHAT, place)) for _ in range(ROUNDS))
        state = index.update(CHAT, place)
        times = searched(
            index,
            place,
            {
                "three words": "Where is the quopri encoding of a header decoded?",
                "common words": "self return none import def class",
                "nothing": "Zanzibar photosynthesis",
            },
        )
    size = sum(file.stat().st_size for file in home.glob("history.db*")) / 1e6
    return {
        "lines": lines, "files": files, "passages": state.passages, "read_s": round(first, 2),
        "unchanged_s": round(again, 3), "search_ms": times, "database_mb": round(size, 1), "peak_mb": rounded(peak),
    }  # fmt: skip


def pages(home: Path) -> dict[str, Any]:
    """A PDF file of 300 pages."""
    words = "The committee discussed the budget, the weather and the state of the bridge at great length again."
    texts = ["\n".join(f"{page}.{line} {words}" for line in range(LINES_OF_PAGE)) for page in range(PAGES)]
    texts[216] += f"\n{SENTENCE}"
    file = home / "minutes.pdf"
    file.write_bytes(pdf(texts))
    with opened(home) as (index, reader):
        peak = Peak()

        def looked() -> Iterator[Any]:
            for section in reader.read(file):
                peak.look()
                yield section

        sections = list(looked())
        first = timed(lambda: index.update(CHAT, file, peak.look))
        found = index.search([file], ["Who is the custodian of the observatory?"], ROOM)
        absent = index.search([file], ["How do I reset the router password?"], ROOM)
        times = searched(
            index, file, {"there": "Who is the custodian of the observatory?", "absent": "router password?"}
        )
    return {
        "pages": len(sections), "bytes": file.stat().st_size, "read_s": round(first, 2), "peak_mb": rounded(peak),
        "found_on_page": next((one.first for one in found if SENTENCE in one.text), None),
        "found_where_it_is_not": len(absent), "search_ms": times,
    }  # fmt: skip


def rounded(peak: Peak) -> dict[str, float]:
    """To a tenth of a megabyte."""
    return {name: round(value, 1) for name, value in peak.items()}


Rank = Callable[[str], Sequence[str]]
"""Texts of passages for a question, best first."""


def quality(rank: Rank, questions: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """How often the answer's passage is found."""
    places = []
    for question, answer in questions:
        found = [at for at, text in enumerate(rank(question)) if answer in text]
        places.append(found[0] if found else None)
    ranks = [0.0 if at is None else 1 / (at + 1) for at in places]
    return {
        "first": sum(at == 0 for at in places),
        "among_five": sum(at is not None and at < 5 for at in places),
        "questions": len(places),
        "mean_reciprocal_rank": round(statistics.mean(ranks), 3),
    }


BOOKS = {"alice.md": ALICE, "moby-dick.md": MOBY}


def found_by_words(home: Path) -> dict[str, Any]:
    """Questions about the books by their words."""
    rows: dict[str, Any] = {}
    for name, questions in BOOKS.items():
        place = home / name.partition(".")[0]
        place.mkdir()
        with opened(place) as (index, _):
            index.update(CHAT, DATA / "text" / name)
            refused = sum(not index.search([DATA / "text" / name], [question], ROOM) for question in NOWHERE)
            rows[name] = {
                **quality(
                    lambda question, index=index, name=name: texts(
                        index.search([DATA / "text" / name], [question], ROOM)
                    ),
                    questions,
                ),
                "about_nothing": len(NOWHERE),
                "nothing_found": refused,
            }
    return rows


def texts(passages: Sequence[Passage]) -> list[str]:
    """Their texts."""
    return [passage.text for passage in passages]


def found_by_embeddings(home: Path, model: Path) -> dict[str, Any]:
    """The same by a model's embeddings, alone and fused with words."""
    from models.store import StoredModel
    from runtime.backends.decoder import DecoderOptions
    from runtime.load.open import open_engine

    engine = open_engine(StoredModel.open_folder(model, model.name), DecoderOptions(context=1024), "cpu")
    rows: dict[str, Any] = {"model": model.name}

    def vector(text: str) -> Any:
        return engine.embed(engine.tokenizer.encode(text)[:1000])

    try:
        for name, questions in BOOKS.items():
            with opened(home) as (index, reader):
                cut = [one.text for one in chunks(reader.read(DATA / "text" / name))]
                index.update(name, DATA / "text" / name)
                begun = time.perf_counter()
                vectors = np.stack([vector(text) for text in cut])
                seconds = time.perf_counter() - begun
                centre = vectors.mean(axis=0)
                turned = vectors - centre
                turned /= np.linalg.norm(turned, axis=1, keepdims=True)

                def by_vector(question: str, centre: Any = centre, turned: Any = turned, cut: Any = cut) -> list[str]:
                    asked = vector(question) - centre
                    return [cut[at] for at in np.argsort(-(turned @ asked))[:40]]

                def by_words(question: str, name: str = name, index: Index = index) -> list[str]:
                    return texts(index.search([DATA / "text" / name], [question], 40 * MOST))

                def fused(question: str, words: Rank = by_words, vectors: Rank = by_vector) -> list[str]:
                    score: dict[str, float] = {}
                    for ranked in (vectors(question), words(question)):
                        for at, text in enumerate(ranked):
                            score[text] = score.get(text, 0.0) + 1 / (_FUSED + at)
                    return sorted(score, key=lambda text: -score[text])

                ranks: dict[str, Rank] = {"words": by_words, "embeddings": by_vector, "both": fused}
                found = {way: quality(rank, questions) for way, rank in ranks.items()}
                rows[name] = {"passages": len(cut), "seconds": round(seconds, 1), **found}
    finally:
        engine.close()
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--embeddings", type=Path, help="folder of a stored model")
    parser.add_argument("--out", type=Path, default=OUT, help="the JSON file")
    asked = parser.parse_args()
    report: dict[str, Any] = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.is_file() else {}
    about = about_run("python -m tests.bench.documents", ("app", *ROOMS))
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {"folder": folder, "pdf": pages, "found": found_by_words}
    if asked.embeddings is not None:
        parts = {"embeddings": lambda home: found_by_embeddings(home, asked.embeddings)}
    for name, measure in parts.items():
        with tempfile.TemporaryDirectory() as place:
            report[name] = {"about": about, **measure(Path(place))}
        print(name, report[name], flush=True)
    write_report(asked.out, report)


if __name__ == "__main__":
    main()
