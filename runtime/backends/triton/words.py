"""How many words the codes of a matrix take on the GPU, from shapes alone.

`runtime.backends.triton.layout` fills them, and `runtime.backends.triton.whole` those of W4A8.

Importing this needs no torch: a plan of the memory asks as well.
"""

from __future__ import annotations

BLOCK = 512
"""Input channels of a block."""
PIECE = 32
"""Input channels of a piece: two for each lane."""
LANES = 16
"""Words of an output channel, for one block and one word of it."""
WORDS = {3: 3, 4: 4}
"""Words of a block by bits."""
SHORT = 2
"""Most pieces of a short word."""


def pieces(K: int) -> int:
    """Pieces of so many input channels."""
    return -(-K // PIECE)


def tail_words(bits: int, left: int) -> tuple[int, int]:
    """Whole and short words of the pieces behind the last whole block, `left` of them."""
    each = 16 // bits
    last = left % each
    return left // each + (last > SHORT), int(0 < last <= SHORT)


def code_words(shape: tuple[int, int], bits: int) -> int:
    """32-bit words that the codes of a matrix [N, K] take on the device."""
    N, K = shape
    blocks, left = divmod(pieces(K), BLOCK // PIECE)
    whole, short = tail_words(bits, left)
    return (blocks * WORDS[bits] + whole) * N * LANES + short * N * LANES // 2


def half_of(group_size: int) -> int:
    """Channels of an operand, H, by the channels of a group; 0 = no groups."""
    return 64 if group_size == 0 else min(64, group_size // 2)


def token_width(K: int, group_size: int) -> int:
    """Codes of a token of K channels, filled up to whole groups or blocks."""
    each = group_size or 2 * half_of(0)
    return -(-K // each) * each


def whole_bytes(shape: tuple[int, int], group_size: int) -> int:
    """Bytes of such a matrix without its bias."""
    N, K = shape
    groups = -(-K // group_size) if group_size else 1
    return N * (token_width(K, group_size) // 2 + 2 + 2 * groups)
