"""What we take for the reason where a promise of the caches does not hold, by the text of the claim."""

from __future__ import annotations

WHY: dict[str, str] = {
    "Power iteration is within 5 % of the SVD's error": (
        "heads of 8 channels leave rank 4 half of the spectrum, which is flat, so single pages of the smallest model "
        "need more than the 12 rounds that are made; on average over pages every model is within half a percent."
    ),
    "int4 is within 2 % of fp16": (
        "one scale spans all channels of a token's key, and uneven channels share its 16 levels (see the table of "
        "channels below). `kcvt4`, with as many bits but a scale for each key channel, shows what that is worth. On "
        "heads of 8 channels the error of keys is the smallest of all models, and yet the cost is by far the largest: "
        "so few channels need large keys for a sharp attention, and the same share of error moves its logits further. "
        "int4 also compresses the latest tokens, which get most of the attention; windowed kinds keep them."
    ),
}
"""By the text of a claim in `tests.bench.caches.judge`."""
