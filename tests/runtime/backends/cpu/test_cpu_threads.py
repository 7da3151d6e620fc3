"""Threads that share a program: any number, joining and leaving, gives the same results without deadlocks."""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

import numba
import numpy as np
import pytest

from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.records import ACTIVE, CLOSED, CONTROL_WORDS, SLEEPERS, TURN
from runtime.backends.cpu.decoder import CpuDecoder
from runtime.backends.cpu.machine.sync import wait_while
from runtime.backends.decoder import DecoderOptions, Step
from tests.runtime.conftest import make_model


def decode(decoder: CpuDecoder, position: int, *, draft: bool = False) -> np.ndarray[Any, Any]:
    row = np.zeros(1, np.int32)
    step = Step(tokens=row + 7 * position % 50, slots=row, positions=row + position, logit_rows=row, draft=draft)
    return decoder.forward(step).copy()


@pytest.fixture
def decoder() -> CpuDecoder:
    return CpuDecoder(make_model(), DecoderOptions(context=64, threads=5, k_chunk=64))


def test_crews_of_any_size_give_the_same_numbers(decoder: CpuDecoder) -> None:
    alone = CpuDecoder(make_model(), DecoderOptions(context=64, threads=1, k_chunk=64))
    wanted = [decode(alone, position) for position in range(40)]
    rng = np.random.default_rng(0)
    with decoder.session():
        for _ in range(5):
            for position in range(40):
                decoder._pool._thread_tuner.size = decoder._pool._thread_tuner._kept = int(rng.integers(1, 6))
                np.testing.assert_array_equal(decode(decoder, position), wanted[position])


def test_drafts_are_not_taken_for_fast_tokens(decoder: CpuDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many threads share a token is judged among its like."""
    timed: list[str] = []
    pool = decoder._pool
    monkeypatch.setattr(pool._thread_tuner, "token", lambda _: timed.append("token"))
    monkeypatch.setattr(pool._drafting, "token", lambda _: timed.append("draft"))
    for position, draft in enumerate((True, False, True)):
        decode(decoder, position, draft=draft)
    assert timed == ["draft", "token", "draft"]


def test_threads_that_slept_are_woken(decoder: CpuDecoder) -> None:
    with decoder.session():
        first = decode(decoder, 0)
        time.sleep(0.05)  # long past the spinning
        assert decoder._control[SLEEPERS] > 0
        np.testing.assert_array_equal(decode(decoder, 0), first)


@pytest.mark.slow
def test_sessions_end_and_begin_again_without_a_thread_left(decoder: CpuDecoder) -> None:
    before = threading.active_count()
    first = decode(decoder, 0)
    for turn in range(1000):  # a thread may find the last step over, and the session too, at any moment
        with decoder.session():
            if turn % 3:
                np.testing.assert_array_equal(decode(decoder, 0), first)
        assert threading.active_count() == before


def test_numbers_of_instructions_may_pass_their_end(decoder: CpuDecoder) -> None:
    first = decode(decoder, 0)
    with decoder.session():
        decoder._control[TURN] = np.int64(-5) << 32 | CLOSED  # five before 2^32
        for _ in range(3):
            np.testing.assert_array_equal(decode(decoder, 0), first)


def test_a_session_s_numbers_are_not_those_of_the_one_before(decoder: CpuDecoder) -> None:
    numbers = []
    for _ in range(3):
        with decoder.session():
            decode(decoder, 0)
            numbers.append(int(decoder._parameters["first"]))
    assert numbers == sorted({*numbers})


def test_a_part_waits_for_the_channels_that_another_chooses(decoder: CpuDecoder) -> None:
    decode(decoder, 0)  # leaves numbers in every buffer, and a choice in every instruction
    program = decoder.layer_program("down", 64)
    decoder.run_layers(program)
    place = next(n for n, words in enumerate(program) if isinstance(op.read(words), op.Linear))
    linear, header = op.read(program[place]), op.header_of(program[place])
    assert isinstance(linear, op.Linear)
    assert op.header_of(program[place - 1])["parts"] == op.BESIDE
    address, control = int(program.ctypes.data) + 8 * op.WIDTH * place, int(decoder._control.ctypes.data)
    step = decoder._parameters

    def run(part: int) -> None:
        scratch = int(step["scratch"]) + part * int(step["scratch_stride"])
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 5)(int(header["unit"]))(address, control, part, 2, scratch)

    outputs = np.ctypeslib.as_array((ctypes.c_float * (16 * linear.weights.tiles)).from_address(linear.out.at))
    chosen = np.ctypeslib.as_array((ctypes.c_int32 * linear.total).from_address(linear.chosen.at))
    outputs[:] = 0
    for part in (0, 1):
        run(part)
    wanted = outputs.copy()
    decoder._control[TURN] += 1 << 32  # the next turn: what was chosen counts no more
    chosen[:], outputs[:] = np.arange(linear.total), 0
    later = threading.Thread(target=run, args=(1,), daemon=True)
    later.start()
    later.join(0.2)
    assert later.is_alive()
    run(0)
    later.join(30)
    assert not later.is_alive()
    np.testing.assert_array_equal(outputs, wanted)


def test_who_is_to_leave_waits_for_no_turn() -> None:
    """A thread may see that it is to work just before all are to leave, and the turn just after the last one."""
    control = np.zeros(CONTROL_WORDS, np.int64)
    control[TURN], control[ACTIVE] = 5 << 32 | CLOSED, 0
    wait = numba.njit(nogil=True)(lambda control, number: wait_while(control, number))  # a kernel
    waiting = threading.Thread(target=wait, args=(control.ctypes.data, 5), daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()
    assert control[SLEEPERS] == 0
