"""The control block: the words by which threads share a program (`runtime.backends.cpu.machine.sync`).

Each hot word has a cache line (8 words) of its own. TURN has the number of the instruction in its upper half and the
parts that are left to take, above `CLOSED`, in its lower. The parameters of a step
(`runtime.backends.cpu.data.step`) stand behind them.
"""

from __future__ import annotations

TURN = 0
"""Number of the instruction, and the parts of it that nobody has taken yet."""
DONE = 8
"""Parts of the instruction that are done."""
SLEEPERS = 16
"""Threads that sleep until the turn changes."""
ACTIVE = 24
"""Threads that are to work: those numbered below; 0 = all others leave."""
FAILED = 32
"""1 when a NaN or infinity was met."""
CONTROL_WORDS = 64

CLOSED = 1 << 20
"""What the lower half of TURN is when nothing is left to take. Every thread may look once more and make it less."""
