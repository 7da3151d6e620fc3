"""Control block: the words through which threads share a program (`runtime.backends.cpu.machine.sync`).

Each contended word has its own cache line (8 words). TURN holds the number of the instruction in its upper half, and in
its lower half the parts still available, above `CLOSED`. The parameters of a step (`runtime.backends.cpu.data.step`)
follow.
"""

from __future__ import annotations

TURN = 0
"""Number of the instruction, and its parts not yet taken."""
DONE = 8
"""Completed parts of the instruction."""
SLEEPERS = 16
"""Threads sleeping until the turn changes."""
ACTIVE = 24
"""Number of active threads; 0 = all others leave."""
FAILED = 32
"""1 once NaN or infinity was found."""
CONTROL_WORDS = 64

CLOSED = 1 << 20
"""Lower half of TURN when no parts are left. Every thread may look once more and decrement it."""
