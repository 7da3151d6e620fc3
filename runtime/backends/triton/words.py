"""How many words the codes of a matrix take on the GPU, from shapes alone; `runtime.backends.triton.layout` fills them.

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
