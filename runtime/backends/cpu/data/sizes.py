"""Sizes on which Python and compiled code agree."""

from __future__ import annotations

from typing import Final

LANES: Final = 16
"""Lanes of a vector of floats or integers: the output channels, or tokens, that a kernel handles side by side."""
BLOCK: Final = 32
"""Input channels unpacked at a time."""
BLOCK_BYTES: Final = {3: 192, 4: 256}
"""Bytes of a block of 16 output by 32 input channels, by bits."""
ENTRY_BYTES: Final = 512
"""Bytes of a block of decoded entries, 16 output by 32 input channels."""
PIECE: Final = 64
"""Channels between which quads of INT8 activations are equally far apart."""
SPAN: Final = 64
"""Tokens that attention handles between two updates of the softmax."""
RUN_ROWS: Final = 8
"""Rows of one sequence that one work item of attention takes at most."""
