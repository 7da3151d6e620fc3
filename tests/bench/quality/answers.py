"""Five questions answered greedily by full precision, by 3 bits without and by 3 bits with compensation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from models.checkpoint import Checkpoint
from models.oracle import Oracle
from models.recipe import DEFAULT_METHOD
from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions
from runtime.load.open import open_engine
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from tests.bench.quality.measure import Laboratory, oracle_code, point_code, running_code
from tests.bench.quality.points import REFERENCE_K, Point, chat
from tests.bench.reporting.markdown import table
from tests.bench.reporting.results import Entry, digest

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "Write a haiku about the sea.",
    "Name three animals that can fly.",
    "Explain in one sentence what a computer program is.",
)
SHORT = (QUESTIONS[1], QUESTIONS[3])
"""Those of the README: one where compensation helps, one where the model is wrong in any precision."""
TOKENS = 60
"""Longest answer."""
BITS = 3
"""Of the low-bit model."""
_CONTEXT = 512
"""Tokens that a question with its template and an answer take at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What the models said to one question."""

    question: str
    """The question."""
    full: str
    """In full precision."""
    plain: str
    """With 3 bits."""
    compensated: str
    """With 3 bits and compensation of answers and prompts."""


def measure(laboratory: Laboratory) -> Entry:
    """Ask what was not asked yet.

    Args:
        laboratory: The real model.
    """
    case = laboratory.case
    point = Point(model=case.name, method=DEFAULT_METHOD, bits=BITS, group_size=case.group_size)
    model = laboratory.open(point)
    code = digest([point_code(laboratory.stored(point)["weights"], running_code()), oracle_code()])
    return laboratory.known("answers", [QUESTIONS, TOKENS], code, lambda: _asked(laboratory, model, point))


def _asked(laboratory: Laboratory, model: StoredModel, point: Point) -> dict[str, Any]:
    laboratory.tell(f"{point.model}: {len(QUESTIONS)} questions")
    full = full_precision(laboratory.checkpoint, laboratory.case.folder)
    plain, compensated = (low_bit(model, own) for own in (point, chat(replace(point, k_chunk=REFERENCE_K))))
    answers = [
        asdict(Answer(question=question, full=full[question], plain=plain[question], compensated=compensated[question]))
        for question in QUESTIONS
    ]
    about = {"method": point.method, "bits": point.bits, "group_size": point.group_size, "k_chunk": REFERENCE_K}
    return {**about, "answers": answers}


def full_precision(checkpoint: Checkpoint, folder: Path, questions: Sequence[str] = QUESTIONS) -> dict[str, str]:
    """Answers of a checkpoint, by question.

    Args:
        checkpoint: The model.
        folder: Holds its tokenizer.
        questions: What is asked, each in a chat of its own.
    """
    tokenizer, oracle = Tokenizer(folder), Oracle(checkpoint)
    found = {}
    for question in questions:
        tokens, cache, answer = tokenizer.chat(_chat(question)), oracle.cache(1, _CONTEXT), list[int]()
        while len(answer) < TOKENS:
            logits = oracle.logits(torch.tensor([tokens]), cache, rows=[-1])
            tokens = [int(logits[0, -1].argmax())]
            if tokens[0] in checkpoint.spec.eos_token_ids:
                break
            answer += tokens
        found[question] = tokenizer.decode(answer).strip()
    return found


def low_bit(model: StoredModel, point: Point, questions: Sequence[str] = QUESTIONS) -> dict[str, str]:
    """Answers of a stored model, by question.

    Args:
        model: The model.
        point: How it is run.
        questions: What is asked, each in a chat of its own.
    """
    options = DecoderOptions(context=_CONTEXT, k_chunk=point.k_chunk, prompt_k_chunk=point.prompt_k_chunk)
    engine = open_engine(model, options, "cpu")
    sampling = SamplingOptions(temperature=0, max_tokens=TOKENS, stop=engine.chat_stops)
    try:
        return {
            question: "".join(
                piece.text for piece in engine.generate(engine.chat_prompt(_chat(question)), sampling)
            ).strip()
            for question in questions
        }
    finally:
        engine.close()


def _chat(question: str) -> list[Mapping[str, str]]:
    return [{"role": "user", "content": question}]


def as_table(entry: Entry, questions: Sequence[str] = QUESTIONS) -> str:
    """The answers side by side, in Markdown.

    Args:
        entry: Result of `measure`.
        questions: Those that are shown.
    """
    low = f"{entry['bits']:g} bits"
    head = ("question", "full precision", f"{low}, not compensated", f"{low}, k_chunk {entry['k_chunk']}")
    rows = [
        tuple(_cell(answer[name]) for name in ("question", "full", "plain", "compensated"))
        for answer in entry["answers"]
        if answer["question"] in questions
    ]
    return table(head, rows)


def _cell(text: str) -> str:
    """A text within one cell of a table."""
    return text.replace("|", "\\|").replace("\n\n", "\n").replace("\n", "<br>")
