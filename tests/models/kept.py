"""Kept models on the CPU backend beside the reference."""

from __future__ import annotations

import numpy as np

from models.store import StoredModel
from runtime.backends.decoder import DecoderOptions, Step
from runtime.load.plan import open_decoder


def check_logits(stored: StoredModel) -> None:
    """Those on the processor are those of the reference, but for activations of 8 bits."""
    found = []
    for backend in ("reference", "cpu"):
        options = DecoderOptions(context=64, max_rows=16, kv="fp16", threads=1)
        decoder, _ = open_decoder(stored, options, backend)
        found += [
            np.concatenate([decoder.forward(Step.of(np.arange(3, 15))).copy(), decoder.forward(Step.of([5], 12))])
        ]
        decoder.close()
    apart = np.sqrt(np.mean((found[1] - found[0]) ** 2, axis=1))
    assert np.median(apart) < 0.06 * found[0].std(), "some rows may go to another expert"
