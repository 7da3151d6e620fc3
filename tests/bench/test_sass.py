"""Analysis of machine code: loops, and how far ahead they load."""

from __future__ import annotations

import pytest

from tests.bench.kernels.sass import Loop, main_loop


def _code(*texts: str) -> tuple[tuple[int, str], ...]:
    return tuple((16 * place, text) for place, text in enumerate(texts))


def test_code_without_a_loop_has_none() -> None:
    assert main_loop(_code("MOV R1, R2", "EXIT", "BRA 0x20")) is None  # what ends every kernel jumps to itself


def test_the_loop_with_most_tensor_work_is_taken() -> None:
    code = _code("IADD3 R1, R1, R2, R3", "@P0 BRA 0x0", "HMMA.16816.F32 R4, R8, R10, R4", "@!P1 BRA 0x20", "EXIT")
    loop = main_loop(code)
    assert loop == Loop(instructions=2, tensor=1, copies=0, asynchronous=False, ahead=0.0)


def test_a_loop_that_streams_counts_more_than_a_longer_one() -> None:
    """As in compensation, whose selection is a longer loop than the fetch."""
    search = ("IADD3 R1, R1, R2, R3", *("ISETP R1, R2" for _ in range(8)), "@P0 BRA 0x0")
    fetch = ("LDGSTS.E.128 [R1], [R2.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x2", "FFMA R4, R5, R6, R4", "@P1 BRA 0xa0")
    loop = main_loop(_code(*search, *fetch, "EXIT"))
    assert loop is not None
    assert (loop.instructions, loop.copies, loop.asynchronous) == (5, 1, True)


@pytest.mark.parametrize(("outstanding", "ahead"), [("0x0", 0.25), ("0x1", 1.25), ("0x2", 2.25)])
def test_copies_end_at_the_wait_that_leaves_none_of_theirs(outstanding: str, ahead: float) -> None:
    """Asked for at the end of a loop of eight: with nothing left outstanding, the next round waits at once."""
    wait = f"DEPBAR.LE SB0, {outstanding}"
    work = ("LDS.128 R4, [R2]", "HMMA.16816.F32 R8, R4, R6, R8", "HMMA.16816.F32 R8, R4, R6, R8")
    code = _code("BAR.SYNC 0x0", wait, *work, "LDGSTS.E.128 [R1], [R2.64]", "LDGDEPBAR", "@P0 BRA 0x10", "EXIT")
    # The loop is the seven from the wait on; the copy stands fifth, three before the next wait.
    loop = main_loop(code)
    assert loop is not None
    assert (loop.copies, loop.asynchronous, loop.tensor) == (1, True, 2)
    assert loop.ahead == pytest.approx((3 + 7 * int(outstanding, 16)) / 7)
    assert round(loop.ahead) == int(ahead)


def test_loads_to_registers_end_where_one_of_them_is_read() -> None:
    code = _code(
        "LDG.E.128 R4, [R2.64]",
        "LDG.E R9, [R2.64]",
        "IADD3 R9, R9, R1, R3",
        "HMMA.16816.F32 R12, R7, R10, R12",
        "@P0 BRA 0x0",
    )
    loop = main_loop(code)
    assert loop is not None
    assert (loop.copies, loop.asynchronous) == (1, False)  # the widest alone
    assert loop.ahead == pytest.approx(3 / 5)
