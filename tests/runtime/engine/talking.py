"""Small models whose layers have states, latents or each other's caches, and random histories of conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from models.spec import DeltaSpec, ModelSpec
from runtime.backends.decoder import DecoderOptions, Step
from runtime.engine.conversations import Conversations
from runtime.kv.kinds import KVKind
from runtime.kv.states import SMALL_STEP
from tests.runtime.conftest import LATENTS, SHARED, STREAMS, make_spec

Tokens = list[int]
CONTEXT, ROWS, SLOTS = 256, 40, 3
DELTA = DeltaSpec(key_heads=2, value_heads=4, key_dim=16, value_dim=24)
HYBRIDS: dict[str, dict[str, Any]] = {
    "convolution": {
        "mixers": ("convolution", "attention", "convolution"),
        "conv_bias": True,
        "gated": True,
        "head_gates": True,
    },
    "delta": {
        "mixers": ("delta", "attention", "delta"),
        "delta": DELTA,
        "gated": True,
    },
    "mamba": {"mixers": ("delta", "attention", "delta"), "delta": replace(DELTA, mamba=True), "conv_bias": True},
    "beside": {"mixers": ("both", "attention", "both"), "delta": replace(DELTA, mamba=True, normed=False)},
}


def hybrid(mixer: str = "convolution") -> ModelSpec:
    if mixer not in HYBRIDS:
        others = {"shared": SHARED, "latents": LATENTS, "streams": STREAMS}
        return make_spec(max_context=CONTEXT, **others[mixer])
    return make_spec(num_layers=3, conv_kernel_size=4, qk_norm=True, max_context=CONTEXT, **HYBRIDS[mixer])


def decaying(model: Any) -> Any:
    """A model whose delta rules forget, as real ones do."""
    for name in model.vectors:
        model.vectors[name] *= -0.3 if name.endswith("decay") else 1
    return model


class Talk:
    """Conversations in the slots of a decoder, of which each answer is compared with a fresh decoder's.

    Args:
        make: Makes the decoder.
        model: Its model.
        seed: Of what happens.
        error: Largest mean error of a logit, of the spread of logits. A wrong state is off by the spread.
        fresh: Makes the decoder to compare with; None: as the first.
        longest: Most tokens of a chat's first prompt; of others less than half.
        kv: The kind of cache.
        context: Tokens of a slot.
        checked: Most rows that check a draft.
    """

    def __init__(
        self,
        make: Callable[..., Any],
        model: Any,
        seed: int,
        error: float,
        *,
        fresh: Callable[..., Any] | None = None,
        longest: int = 90,
        kv: KVKind = "fp16",
        context: int = CONTEXT,
        checked: int = SMALL_STEP,
    ) -> None:
        options = DecoderOptions(kv=kv, context=context, slots=SLOTS, max_rows=ROWS, threads=1)
        self.decoder, self.longest, self.context, self.checked = make(model, options), longest, context, checked
        self.rows = context if kv == "fp16" else ROWS  # other kinds read a prompt's first parts from pages
        self.fresh = (fresh or make)(model, replace(options, slots=1, max_rows=self.rows))
        self.conversations = Conversations(self.decoder.cache, slots=SLOTS, context=context)
        self.random, self.error = np.random.default_rng(seed), error
        self.said: list[Tokens] = []
        self.reused = 0

    def words(self, most: int) -> Tokens:
        return self.random.integers(3, self.decoder.spec.vocab_size, self.random.integers(1, most)).tolist()

    def forward(self, slot: int, tokens: Tokens, start: int, **how: bool) -> Any:
        return self.decoder.forward(Step.of(tokens, start, slot=slot, **how)).copy()

    def check(self, logits: Any, tokens: Tokens) -> None:
        self.fresh.cache.clear(0)
        for start in range(0, len(tokens), self.rows):
            part = tokens[start : start + self.rows]
            expected = self.fresh.forward(Step.of(part, start, [len(part) - 1], prefill=True))[0]
        assert np.abs(logits - expected).mean() <= self.error * expected.std(), len(tokens)

    def prompt(self) -> Tokens:
        """A new chat, the next message, the last one again, an edited message, or a branch in an answer."""
        if not self.said or self.random.random() < 0.15:
            return self.words(self.longest)
        said = self.said[self.random.integers(len(self.said))]
        kept = len(said) if self.random.random() < 0.5 else int(self.random.integers(1, len(said) + 1))
        return [*said[:kept], *self.words(4 * self.longest // 9)][: self.context - 60]

    def exchange(self) -> None:
        """A prompt, read in parts, and an answer that is stopped somewhere."""
        prompt = self.prompt()
        slot, cached = self.conversations.begin(prompt)
        held = self.conversations.tokens(slot)
        assert self.decoder.cache.length(slot) == cached == len(held)
        self.reused += cached
        while len(held) < len(prompt):
            part = prompt[len(held) : len(held) + int(self.random.integers(1, ROWS + 1))]
            logits = self.forward(slot, part, len(held), prefill=True)
            held.extend(part)
        self.check(logits[-1], held)
        for _ in range(self.random.integers(0, 5)):
            self.round(slot, held)
        self.said.append(list(held))
        self.conversations.release(slot)

    def round(self, slot: int, held: Tokens) -> None:
        """A token of the answer, or several that verify a draft, of which some are rejected."""
        token, draft = self.words(2)[0], self.words(self.checked) if self.random.random() < 0.7 else []
        start = len(held)
        if draft and self.random.random() < 0.5:  # by the model itself, a token at a time
            for at, each in enumerate([token, *draft][:-1]):
                self.forward(slot, [each], start + at, draft=True)
        logits = self.forward(slot, [token, *draft], start)
        accepted = int(self.random.integers(0, len(draft) + 1))
        held.extend([token, *draft[:accepted]])
        self.conversations.cut(slot, len(held))
        self.check(logits[accepted], held)

    def save_and_load(self) -> None:
        """A conversation goes to a file and back, into another slot."""
        slot = max(range(SLOTS), key=lambda slot: len(self.conversations.tokens(slot)))
        cache, tokens = self.decoder.cache, list(self.conversations.tokens(slot))
        pieces = [{name: np.array(x) for name, x in piece.items()} for piece in cache.export(slot)]
        paged, other = cache.paged_length(slot), (slot + 1) % SLOTS
        self.conversations.clear(other)
        self.conversations.clear(slot)
        cache.load(other, len(tokens), paged, pieces)
        self.conversations.tokens(other).extend(tokens)

    def run(self, exchanges: int) -> None:
        """Some of them, between which a conversation may be saved and loaded."""
        for _ in range(exchanges):
            self.exchange()
            if self.random.random() < 0.2:
                self.save_and_load()
