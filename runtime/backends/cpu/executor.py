"""Executor: runs a recorded program on several threads, which take parts of one instruction after another.

One call runs one step of the whole model, so a token costs one hand-over to the threads and a few hundred instructions.
Nothing is allocated, and control does not return to Python before the logits are ready. Each instruction holds the
address of the unit that implements it (`runtime.backends.cpu.link`). Units do not know the executing thread or the
number of threads, so results do not depend on them.
"""

from __future__ import annotations

from typing import Any

from runtime.backends.cpu.data.instructions import BESIDE, WIDTH, Header
from runtime.backends.cpu.data.records import ACTIVE, DONE, LINE, TURN, Parameters
from runtime.backends.cpu.kernels.views import changing_header_at, changing_parameters_at
from runtime.backends.cpu.machine.kernel import call_5, kernel
from runtime.backends.cpu.machine.sync import (
    add_word,
    begin_turn,
    left_of,
    may_work,
    number_of,
    read_word,
    wait_while,
    wake_all,
    write_word,
)
from runtime.backends.cpu.machine.unit import compiled_unit
from runtime.backends.cpu.machine.vector import prefetch

_NUMBERS = (1 << 32) - 1
_AHEAD = 8 * WIDTH * 3 // LINE
"""Cache lines to prefetch of the next instructions: since they last ran, all weights have passed through the caches."""


@kernel
def _instruction(step: Parameters, number: int) -> int:
    """Address of the instruction of a number."""
    return step.program + 8 * WIDTH * ((number - step.first) & _NUMBERS)


@kernel
def _parts(step: Parameters, header: Header) -> int:
    """The number of parts of an instruction in this step, or `BESIDE`."""
    parts = header.parts if step.rows == 1 else header.parts_of_many
    return parts if parts != 0 else step.items


@kernel
def _go_on(control: int, thread: int, number: int) -> None:
    """Run single-part instructions from a number on, and start the first that has more parts; or end the program."""
    step: Any = changing_parameters_at(control)
    while (number - step.first) & _NUMBERS != step.instructions:
        i = _instruction(step, number)
        header: Any = changing_header_at(i)
        parts = _parts(step, header)
        if parts > 1:
            begin_turn(control, number, parts)
            return
        if parts != BESIDE:
            call_5(header.unit, i, control, 0, 1, step.scratch + thread * step.scratch_stride)
        number += 1
    begin_turn(control, number, 0)


@kernel
def _take_part(control: int, thread: int) -> int:
    """Take a part and run it; whoever completes the last part starts the next instruction.

    Returns:
        The number of an instruction with no parts left to take; -1 if there was one.
    """
    turn = add_word(control + 8 * TURN, -1)
    number, left = number_of(turn), left_of(turn)
    if left <= 0:
        return number
    step: Any = changing_parameters_at(control)  # valid while this thread holds a part: the step cannot end without it
    i = _instruction(step, number)
    header: Any = changing_header_at(i)
    parts = _parts(step, header)
    for line in range(_AHEAD):
        prefetch(i + 8 * WIDTH + LINE * line)
    call_5(header.unit, i, control, parts - left, parts, step.scratch + thread * step.scratch_stride)
    if add_word(control + 8 * DONE, 1) + 1 == parts:
        write_word(control + 8 * DONE, 0)
        _go_on(control, thread, number + 1)
    return -1


@kernel
def _alone(control: int) -> None:
    """Run the program on a single thread."""
    step: Any = changing_parameters_at(control)
    for n in range(step.instructions):
        i = step.program + 8 * WIDTH * n
        header: Any = changing_header_at(i)
        for line in range(_AHEAD):
            prefetch(i + 8 * WIDTH + LINE * line)
        if _parts(step, header) != BESIDE:
            call_5(header.unit, i, control, 0, 1, step.scratch)


@compiled_unit
def execute(control: int, thread: int) -> None:
    """Run a program: one for thread 0; other threads keep running programs until told to leave.

    Args:
        control: Address of the control block, which contains the program's address.
        thread: This thread's number.
    """
    if thread > 0:
        while may_work(control, thread):
            number = _take_part(control, thread)
            if number >= 0:
                wait_while(control, number)
        return
    if read_word(control + 8 * ACTIVE) == 1:
        _alone(control)
        return
    step: Any = changing_parameters_at(control)
    end = (step.first + step.instructions) & _NUMBERS
    _go_on(control, 0, step.first)
    number = -1
    while number != end:
        if number >= 0:
            wait_while(control, number)
        number = _take_part(control, thread)


@compiled_unit
def set_active(control: int, threads: int) -> None:
    """Set the number of active threads between two programs; 0 makes all but thread 0 leave for good."""
    write_word(control + 8 * ACTIVE, threads)
    wake_all(control + 8 * ACTIVE)
    if threads == 0:
        begin_turn(control, number_of(read_word(control + 8 * TURN)) + 1, 0)
