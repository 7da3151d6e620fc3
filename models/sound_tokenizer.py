"""Sanity checks of a tokenizer before it sees any text of the user: bounded growth of texts, and no crashes.

The `tokenizers` package follows its file blindly. A file may replace each character by a thousand others, and those
again; the package would then exhaust the memory, which aborts the process in a Rust library.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from models.foreign import panics_raised

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MAX_GROWTH = 1000
"""Maximum growth factor of a text; known tokenizers reach 20 at most."""
_GROWTH = {"NFD": 4, "NFKD": 18, "NFKC": 18, "NFC": 3, "Lowercase": 3, "ByteLevel": 2, "BertNormalizer": 12}
_TEXTS = ("The 2 quick foxes,\n\n\tjumped.", "naïve ﬁ É ½ 日本語 🙂👩‍👧 \u0301\u200b")


def check_sound(tokenizer: Tokenizer) -> None:
    """Check that a tokenizer neither inflates texts nor crashes.

    Raises:
        ValueError: it does.
    """
    for part in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        if part is not None and _growth(json.loads(part.__getstate__())) > _MAX_GROWTH:
            raise ValueError(f"it makes texts more than {_MAX_GROWTH:,} times as long")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    for text in _TEXTS:
        with panics_raised():
            try:
                tokenizer.decode(tokenizer.encode(text).ids)
            except Exception:  # noqa: BLE001, S112 -- it need not be able to encode this text
                continue


def _growth(step: Mapping[str, Any]) -> float:
    """The growth factor of a text in one step of a normalizer or decoder."""
    kind = step.get("type")
    if kind == "Sequence":
        inner = [own for key in ("normalizers", "pretokenizers", "decoders") for own in step.get(key, ())]
        return math.prod(map(_growth, inner))
    if kind == "Replace":
        pattern = step["pattern"].get("String")  # an expression may match the empty text before every character
        return max(1.0, len(step["content"]) / len(pattern)) if pattern else 1.0 + len(step["content"])
    if kind == "Prepend":
        return 1.0 + len(step["prepend"])
    if kind == "Precompiled":
        content = base64.b64decode(step["precompiled_charsmap"])
        texts = content[4 + int.from_bytes(content[:4], "little") :].split(b"\0")
        return max(1, *map(len, texts))
    return _GROWTH.get(str(kind), 1)
