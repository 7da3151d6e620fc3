"""A score of the bundled model, from held-out questions: `python -m assets.demo_model.score`.

Greedy answers of the full-precision checkpoint. `tests/lab/demo_table.py` asks the low-bit forms the same.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from assets import demo_checkpoint_path
from assets.demo_model import vocabulary
from assets.demo_model.batches import batches
from assets.demo_model.corpus import Writer
from assets.demo_model.questions import KINDS, Question, questions

if TYPE_CHECKING:
    from models.oracle import Weights

LONGEST_ANSWER = 200
"""Tokens after which an answer is cut."""


class Answerer(Protocol):
    """Whatever answers a conversation."""

    def answer(self, messages: Sequence[dict[str, str]]) -> str:
        """The likeliest answer, token by token, without special tokens."""
        ...


class FullPrecision:
    """Greedy answers of a Hugging Face checkpoint in fp32."""

    def __init__(self, folder: Path) -> None:
        from models.checkpoint import Checkpoint
        from models.oracle import Oracle

        weights: Weights = Checkpoint.open(folder)
        self.oracle = Oracle(weights)
        self.tokenizer = vocabulary.load(folder)

    def answer(self, messages: Sequence[dict[str, str]]) -> str:
        """The likeliest answer, token by token, without special tokens."""
        import torch

        end = vocabulary.token_id(self.tokenizer, vocabulary.END)
        prompt, _ = vocabulary.chat_tokens(self.tokenizer, list(messages))
        prompt.append(vocabulary.token_id(self.tokenizer, vocabulary.ROLES["assistant"]))
        cache = self.oracle.cache(1, len(prompt) + LONGEST_ANSWER)
        said: list[int] = []
        tokens = torch.tensor([prompt])
        while len(said) < LONGEST_ANSWER:
            best = int(self.oracle.logits(tokens, cache, rows=[-1])[0, -1].argmax())
            if best == end:
                break
            said.append(best)
            tokens = torch.tensor([[best]])
        return str(self.tokenizer.decode(said))

    def held_out_loss(self, tokens: int = 16384) -> float:
        """Mean cross entropy in nats of the answers' tokens in held-out conversations."""
        import torch

        total, count = 0.0, 0
        for part in batches(Writer("held_out", 1), self.tokenizer, 0, tokens=tokens, part=4096, context=1024):
            ids = torch.from_numpy(part.tokens)
            logits = self.oracle.logits(ids)[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
            answers = torch.from_numpy(part.weights)[:, 1:] == 1
            total, count = total + float(losses[answers].sum()), count + int(answers.sum())
        return total / count


def score(answerer: Answerer, asked: Sequence[Question]) -> tuple[dict[str, list[bool]], list[dict[str, str]]]:
    """Ask every question.

    Returns:
        For each kind whether the answers were right, and the wrong answers with their questions.
    """
    right: dict[str, list[bool]] = {}
    wrong: list[dict[str, str]] = []
    for question in asked:
        said = answerer.answer(question.messages)
        right.setdefault(question.kind, []).append(question.right(said))
        if not right[question.kind][-1]:
            about = " | ".join(message["content"] for message in question.messages)
            wrong.append({"kind": question.kind, "asked": about, "said": said, "expected": question.expected})
    return right, wrong


def main(arguments: list[str] | None = None) -> None:
    """Command line of the measurement; prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m assets.demo_model.score", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, default=demo_checkpoint_path(), help="Hugging Face folder")
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    parser.add_argument("--kind", action="append", choices=KINDS, help="only this kind; may be repeated")
    parser.add_argument("--wrong", action="store_true", help="also list the wrong answers")
    given = parser.parse_args(arguments)
    asked = questions(given.count, kinds=given.kind or KINDS)
    full = FullPrecision(given.checkpoint)
    right, wrong = score(full, asked)
    loss = full.held_out_loss()
    result: dict[str, object] = {"held_out_loss": round(loss, 4), "perplexity": round(math.exp(loss), 4)}
    result |= {"right": {kind: f"{sum(found)} / {len(found)}" for kind, found in right.items()}}
    print(json.dumps(result | ({"wrong": wrong} if given.wrong else {}), indent=1))  # noqa: T201  the command's output


if __name__ == "__main__":
    main()
