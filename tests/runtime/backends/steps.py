"""Steps whose rows belong to several slots."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from runtime.backends.decoder import Step


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
