"""Steps whose rows belong to several slots, and those of a prompt and a token after it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from models.packed import Weights
from runtime.backends.decoder import DecoderOptions, Step
from runtime.load.plan import open_decoder


def rows(
    tokens: Sequence[int],
    slots: Sequence[int],
    positions: Sequence[int],
    wanted: Sequence[int] | None = None,
    **how: bool,
) -> Step:
    """A step; the logits of all rows unless some are wanted."""
    numbers = (tokens, slots, positions, range(len(tokens)) if wanted is None else wanted)
    names = ("tokens", "slots", "positions", "logit_rows")
    return Step(**{name: np.array(list(own), np.int32) for name, own in zip(names, numbers, strict=True)}, **how)


_PROMPT = (1, 5, 9, 30, 12, 40, 7, 8, 20, 33, 11, 50, 3, 4, 6, 10, 19, 21)


def beyond_half(model: Any) -> Any:
    """A model whose norms are a million times as large: what its layers read and keep leaves half precision."""
    for name in model.vectors:
        model.vectors[name] *= 1e6 if name.startswith("layers") and name.endswith(("norm", "gain")) else 1
    return model


def prompt_and_token(model: Weights, backend: str, options: DecoderOptions) -> npt.NDArray[np.float32]:
    """Logits float32 [19, V] of a prompt of 18 tokens and of one that is decoded behind it."""
    decoder, _ = open_decoder(model, options, backend)
    with decoder.session():
        found = [
            decoder.forward(Step.of(tokens, start, prefill=start == 0)).copy()
            for tokens, start in ((_PROMPT, 0), ((17,), 18))
        ]
    decoder.close()
    return np.concatenate(found)
