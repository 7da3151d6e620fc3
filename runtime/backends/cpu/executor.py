"""Runs a recorded program: every thread walks the same instructions, does its share of each, and meets the others.

One call is one step of the whole model, so a token costs one hand-over to the threads and a few hundred barriers.
Nothing is allocated, and nothing returns to Python before the logits are there. What an instruction does is in the unit
whose address it holds (`runtime.backends.cpu.link`).
"""

from __future__ import annotations

import numba

from runtime.backends.cpu.data.instructions import WIDTH, changing_header_at
from runtime.backends.cpu.data.step import changing_parameters_at
from runtime.backends.cpu.machine.sync import TICKET, add_word, barrier, wait_for_ticket
from runtime.backends.cpu.machine.unit import call_5, compiled_unit


@numba.njit(nogil=True)
def _run(control: int, thread: int, threads: int) -> None:
    step = changing_parameters_at(control)
    scratch = step.scratch + thread * step.scratch_stride
    program, count = step.program, step.instructions
    for n in range(count):
        i = program + 8 * WIDTH * n
        call_5(changing_header_at(i).unit, i, control, thread, threads, scratch)
        barrier(control, threads)


@compiled_unit
def execute(control: int, thread: int, threads: int) -> None:
    """Run a program: once for thread 0, which starts the others; for those, each time it does, until they are to stop.

    Args:
        control: Address of the control block, which says where the program is.
        thread: This thread's number.
        threads: Number of threads.
    """
    if thread == 0:
        add_word(control + 8 * TICKET, 1)
        _run(control, thread, threads)
        return
    seen = numba.int64(0)
    while True:
        seen = wait_for_ticket(control, seen)
        if seen < 0:
            return
        _run(control, thread, threads)
