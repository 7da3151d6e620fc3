"""Ask the bundled model held-out questions and count right answers: `python -m assets.demo_model.score`.

Greedy answers of the full-precision checkpoint, or of a stored low-bit model without compensation (`--stored`).
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from assets import demo_checkpoint_path
from assets.demo_model import corpus, topics, vocabulary
from assets.demo_model.batches import batch
from assets.demo_model.corpus import Writer
from assets.demo_model.exchange import Exchange, normalised

if TYPE_CHECKING:
    from torch import Tensor

    from models.oracle import Weights
    from models.store import StoredModel

ARITHMETIC = ("add", "subtract", "multiply")
LONGEST_ANSWER = 160
"""Tokens after which an answer is cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A conversation up to a question, and what a right answer is."""

    kind: str
    """`talk`, `program`, `facts`, `arithmetic`, `numbers`, `unknown`, `follow_up`, `name` or `story`."""
    messages: tuple[dict[str, str], ...]
    """Chat messages, the question last."""
    expected: tuple[str, ...]
    """Texts of which the answer must be one; for a story, words that must occur in it."""

    def right(self, answer: str) -> bool:
        """Whether an answer counts."""
        said = normalised(answer)
        if self.kind == "story":
            sentences = answer.count(".") == 5 and answer.rstrip().endswith(".")
            return sentences and all(normalised(words) in said for words in self.expected)
        return said in {normalised(text) for text in self.expected}


def questions(count: int, seed: int = 1) -> list[Question]:
    """Held-out questions of every kind, drawn with a seed.

    Args:
        count: Largest number of a kind.
        seed: Decides which.

    Returns:
        The questions, kind after kind.
    """
    made: list[Question] = []
    for kind, source in _sources().items():
        rng = random.Random(f"{seed} {kind}")  # noqa: S311  reproducible, not secret
        made += rng.sample(source, min(count, len(source)))
    return made


def _sources() -> dict[str, list[Question]]:
    found: dict[str, list[Question]] = {}
    declined = tuple(part["answer"][0] for part in topics.content("unknown").values())
    for exchange in corpus.exchanges("held_out"):
        kind = exchange.group
        if kind == "numbers" and exchange.topic in ARITHMETIC:
            kind = "arithmetic"
        if exchange.group in {"name", "repeat"}:
            continue
        expected = declined if kind == "unknown" else (exchange.answer,)
        found.setdefault(kind, []).append(_after(kind, (), exchange.ask, expected))
    found["follow_up"] = list(_follow_ups())
    found["name"] = list(_names())
    found["story"] = [
        _after("story", (), request.ask, (request.who, request.place or ""))
        for request in corpus.story_requests("held_out")
        if request.who
    ]
    return found


def _follow_ups() -> Iterator[Question]:
    """Questions that need the exchange before them."""
    opening = {exchange.topic: exchange for exchange in corpus.exchanges("held_out")}
    for name, follows in topics.follow_ups().items():
        for exchange in (follow.exchange for follow in follows):
            if exchange.split == "held_out" and name in opening:
                yield _after("follow_up", (opening[name],), exchange.ask, (exchange.answer,))


def _names() -> Iterator[Question]:
    """What is my name, asked after the name was told and something else was said."""
    between = [exchange for exchange in corpus.exchanges("held_out") if exchange.group == "talk"]
    for i, name in enumerate(topics.words("names")):
        for frame in topics.words("name_tell"):
            welcome = f"Nice to meet you, {name}! What would you like to know?"
            told = Exchange(group="name", topic="name_told", ask=frame.format(name=name), answer=welcome)
            if told.split == "held_out":
                asked = topics.words("name_ask")[i % len(topics.words("name_ask"))]
                yield _after("name", (told, between[i % len(between)]), asked, (f"Your name is {name}.",))


def _after(kind: str, before: Sequence[Exchange], ask: str, expected: tuple[str, ...]) -> Question:
    messages: list[dict[str, str]] = []
    for turn in before:
        messages += [{"role": "user", "content": turn.ask}, {"role": "assistant", "content": turn.answer}]
    return Question(kind=kind, messages=(*messages, {"role": "user", "content": ask}), expected=expected)


class Answerer:
    """Greedy answers in full precision from a checkpoint, or from anything that gives the oracle its weights."""

    def __init__(self, weights: Weights, tokenizer_folder: Path) -> None:
        from models.oracle import Oracle

        self.oracle = Oracle(weights)
        self.tokenizer = vocabulary.load(tokenizer_folder)

    @classmethod
    def of_checkpoint(cls, folder: Path) -> Answerer:
        """Answerer of a Hugging Face checkpoint folder."""
        from models.checkpoint import Checkpoint

        return cls(Checkpoint.open(folder), folder)

    @classmethod
    def of_stored(cls, folder: Path) -> Answerer:
        """Answerer of a stored low-bit model, its weights as they are without compensation."""
        from models.store import StoredModel

        model = StoredModel.open_folder(folder)
        return cls(_Dequantized(model), model.tokenizer_path)

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

    def held_out_loss(self, batches: int = 8) -> float:
        """Mean cross entropy in nats of the answers' tokens in held-out conversations."""
        import torch

        writer, total, count = Writer("held_out", 1), 0.0, 0
        for step in range(batches):
            rows = batch(writer, self.tokenizer, step, rows=16, length=256, long=False)
            tokens = torch.from_numpy(rows.tokens)
            logits = self.oracle.logits(tokens)[:, :-1]
            losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")
            answers = torch.from_numpy(rows.weights)[:, 1:] == 1
            total, count = total + float(losses[answers].sum()), count + int(answers.sum())
        return total / count


class _Dequantized:
    """A stored model as the oracle wants its weights."""

    def __init__(self, model: StoredModel) -> None:
        self.spec = model.spec
        self._model = model

    def vector(self, name: str) -> Tensor:
        import torch

        return torch.from_numpy(self._model.vector(name).copy())

    def linear(self, name: str) -> tuple[Tensor, Tensor | None]:
        import torch

        from models.quantizers.dequantize import dequantize

        linear = self._model.linear(name)
        bias = None if linear.bias is None else torch.from_numpy(linear.bias.copy())
        return torch.from_numpy(dequantize(linear)), bias

    def embedding(self) -> Tensor:
        import torch

        return torch.from_numpy(self._model.embedding().copy())


def main(arguments: list[str] | None = None) -> None:
    """Command line of the measurement; prints one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m assets.demo_model.score", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--checkpoint", type=Path, default=demo_checkpoint_path(), help="Hugging Face folder")
    which.add_argument("--stored", type=Path, help="folder of a stored low-bit model")
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    parser.add_argument("--wrong", action="store_true", help="also list the wrong answers")
    given = parser.parse_args(arguments)
    answerer = Answerer.of_stored(given.stored) if given.stored else Answerer.of_checkpoint(given.checkpoint)
    asked: dict[str, int] = {}
    right: dict[str, int] = {}
    wrong: list[dict[str, str]] = []
    for question in questions(given.count):
        answer = answerer.answer(question.messages)
        asked[question.kind] = asked.get(question.kind, 0) + 1
        right.setdefault(question.kind, 0)
        if question.right(answer):
            right[question.kind] += 1
        else:
            wrong.append({"kind": question.kind, "asked": question.messages[-1]["content"], "said": answer})
    loss = answerer.held_out_loss()
    result = {"held_out_loss": round(loss, 4), "perplexity": round(math.exp(loss), 4), "right": right, "asked": asked}
    print(json.dumps(result | ({"wrong": wrong} if given.wrong else {}), indent=1))  # noqa: T201  the command's output


if __name__ == "__main__":
    main()
