"""Tokens of a small model against the reference decoder's, over the borders of pages, by the kind of cache.

Both are given the reference's tokens. Half precision rounds other sums, so a token may differ where the reference
itself hardly prefers one; that is counted apart.
"""

from __future__ import annotations

import numpy as np
import torch

from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.backends.triton.decoder import TritonDecoder
from runtime.kv.kinds import KVKind
from tests.bench.first_light.sizes import Amount
from tests.bench.gpu.matrices import RandomModel
from tests.bench.gpu.report import Part, Row

LARGEST = 0.25
"""A logit's difference that is an error, in standard deviations of the logits: a wrong mask or page is off by one."""


def measure(part: Part, amount: Amount, device: torch.device) -> None:
    """A row for each kind of cache."""
    model = RandomModel.of(amount.spec, 4)
    for kv in amount.kinds:
        if part.late():
            part.add({"what": "left out for want of time", "kv": kv})
            continue
        part.begin({"kv": kv})
        part.add({"kv": kv} | compared(model, kv, amount, device))


def compared(model: RandomModel, kv: KVKind, amount: Amount, device: torch.device) -> Row:
    """Decode with both; equal tokens, near ties, and the largest difference of a logit in standard deviations."""
    context = amount.prompt + amount.decoded + 1
    # The static selector: a dynamic one may take another of two channels that are equal but for the last bit.
    chosen = {"qkv": 64, "o": 64, "gate_up": 64, "down": 64}
    options = DecoderOptions(
        context=context,
        kv=kv,
        max_rows=min(128, context),
        k_chunk=chosen,
        select="static",
        n_tb=dict.fromkeys(chosen, 8),
    )
    ours, theirs = TritonDecoder(model, options, device), ReferenceDecoder(model, options)
    tokens = [(7 * i + 3) % model.spec.vocab_size for i in range(amount.prompt)]
    equal = ties = 0
    largest = 0.0
    at = 0
    for step in range(amount.decoded):
        while at < len(tokens):
            rows = tokens[at : at + options.max_rows]
            made = _step(rows, at, prefill=step == 0)
            found, wanted = np.array(ours.forward(made))[0], np.array(theirs.forward(made))[0]
            at += len(rows)
        spread = float(wanted.std())
        largest = max(largest, float(np.abs(found - wanted).max()) / spread)
        best = int(wanted.argmax())
        equal += int(found.argmax()) == best
        ties += int(found.argmax()) != best and wanted[best] - wanted[int(found.argmax())] < 2 * LARGEST * spread
        tokens.append(best)
    ours.close()
    row: Row = {"tokens": amount.decoded, "equal": equal, "near_ties": ties, "largest_error": round(largest, 4)}
    return row | {"correct": equal + ties == amount.decoded and largest < LARGEST}


def _step(tokens: list[int], start: int, *, prefill: bool) -> Step:
    return Step.of(tokens, start, [len(tokens) - 1], prefill=prefill)
