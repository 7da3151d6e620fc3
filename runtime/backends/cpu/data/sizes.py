"""Sizes shared by Python and compiled code."""

from __future__ import annotations

from typing import Final

LANES: Final = 16
"""Lanes of a vector of floats or integers: output channels, or tokens, handled side by side."""
BLOCK: Final = 32
"""Input channels unpacked at a time."""
BLOCK_BYTES: Final = {3: 192, 4: 256}
"""Bytes of a block of 16 output by 32 input channels, by bits."""
ENTRY_BYTES: Final = 512
"""Bytes of a block of decoded entries, 16 output by 32 input channels."""
PIECE: Final = 64
"""Channel distance at which quads of INT8 activations are equally spaced."""
SPAN: Final = 64
"""Tokens per update of attention's running softmax."""
RUN_ROWS: Final = 8
"""Most rows of a sequence in one work item of attention."""
