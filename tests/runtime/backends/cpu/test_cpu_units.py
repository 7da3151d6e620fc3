"""Units: what is compiled when, what their machine code is kept under, and what happens to a damaged cache."""

from __future__ import annotations

import os
import subprocess
import sys
import types as python
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba import types

from runtime.backends.cpu.backend import BACKEND
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.step import parameters_of
from runtime.backends.cpu.kernels.select import SELECT_EXACT
from runtime.backends.cpu.link import is_linked, link, most_scratch, needed
from runtime.backends.cpu.machine import isa, sync
from runtime.backends.cpu.machine.unit import Unit, digest
from runtime.backends.cpu.machine.vector import set_word
from runtime.backends.cpu.machine.view import record_of, view
from runtime.backends.cpu.pool import Pool
from runtime.backends.cpu.units import attention, inputs, paging, products
from runtime.errors import BackendError
from runtime.kv.kinds import KINDS

_KERNEL = """
import numba

FACTOR = {factor}

@numba.njit(nogil=True)
def inner(x: int) -> int:
    return x {operator} FACTOR

def outer(x: int) -> None:
    inner(x)

def other(x: int) -> None:
    {other}
"""


def made(factor: int = 3, operator: str = "*", other: str = "pass") -> Any:
    module = python.ModuleType("runtime.made")
    exec(_KERNEL.format(factor=factor, operator=operator, other=other), module.__dict__)
    return module


def test_a_digest_follows_what_a_function_calls_and_nothing_else() -> None:
    before = digest(made().outer)
    assert digest(made().outer) == before
    assert digest(made(other="x + 1").outer) == before
    assert digest(made(factor=4).outer) != before
    assert digest(made(operator="+").outer) != before


def test_a_digest_covers_intrinsics_and_the_records_that_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: getattr(inputs, name).folder.name for name in ("norm", "gather")}
    gather = record_of(op.Gather)
    turned = np.dtype([(name, gather[name]) for name in reversed(gather.names or ())])
    other = view("gather", turned, offset=op.HEADER.itemsize)
    monkeypatch.setattr(inputs, "gather_at", other)
    after = {name: getattr(inputs, name).folder.name for name in ("norm", "gather")}
    assert after["norm"] == before["norm"]
    assert after["gather"] != before["gather"]
    pages = attention.pages_4.folder.name
    monkeypatch.setattr("runtime.backends.cpu.machine.codes.exp2", set_word)
    monkeypatch.setattr("runtime.backends.cpu.kernels.attention.weights.exp2", set_word)
    assert attention.pages_4.folder.name != pages


def test_a_digest_covers_the_order_of_a_tuples_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    before = products.multiply_uniform_4.folder.name
    turned: Any = namedtuple("Tile", tuple(reversed(products.Tile._fields)))
    monkeypatch.setattr(products, "Tile", turned)
    assert products.multiply_uniform_4.folder.name != before


def test_a_digest_is_the_same_in_every_process() -> None:
    names = "attention.pages_4.folder, products.compensate_4.folder"
    script = f"from runtime.backends.cpu.units import attention, products; print({names})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(attention.pages_4.folder), str(products.compensate_4.folder)]


def test_no_two_processes_give_their_machine_code_the_same_names(tmp_path: Path) -> None:
    """Units of several processes meet in one, and of two functions with one name the linker would take the first."""
    name = "inputs.gather._compiled.native_name"
    script = f"from runtime.backends.cpu.units import inputs; inputs.gather.prepare(); print({name})"
    names = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "LOWBIT_CHAT_KERNEL_CACHE": str(tmp_path / name)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for name in ("one", "other")
    ]
    assert "gather" in names[0]
    assert names[0] != names[1]


def test_a_cache_needs_its_own_kernels_only() -> None:
    half, int4, hierarchical = (set(needed(KINDS[kind])) for kind in ("fp16", "int4", "hierarchical"))
    assert half - int4 == {attention.heads_to_halves}
    assert int4 - half == {attention.heads_to_codes, attention.pages_4}
    assert hierarchical - half == {attention.heads_to_window, attention.pages_planes, paging.flush, paging.restore}
    gear4, kcvt4 = set(needed(KINDS["gear4"])), set(needed(KINDS["kcvt4"]))
    assert gear4 - kcvt4 == {attention.corrected_pages_4, paging.flush_corrected}
    assert kcvt4 - gear4 == {attention.pages_4, paging.flush}
    assert {unit.name for unit in half & int4} == {
        *("execute", "set_active", "embed", "gather", "norm", "gate", "merge", "attend"),
    }


def test_linking_writes_the_unit_and_the_one_inside_it() -> None:
    words, none = np.zeros((2, op.WIDTH), np.int64), op.Matrix(0, 0)
    weights = op.Weights(0, 0, 0, 0, bits=4, tiles=6, blocks=3, groups=1, group_blocks=3)
    plain = op.Linear(weights, op.Quantized(0, 0, 0), False, none, bias=0, accumulate=False)
    op.write(words[0], plain)
    op.write(words[1], plain._replace(total=8, residual=op.Residual(0, 0, 2, 0)))
    assert not is_linked(words)
    link(words, threads=2)
    headers = [op.header_of(own) for own in words]
    assert is_linked(words)
    assert [header["unit"] for header in headers] == [products.multiply_uniform_4.address] * 2
    assert [header["inner"] for header in headers] == [0, products.compensate_2.address]
    assert most_scratch(words) == headers[1]["scratch"] > headers[0]["scratch"]


def test_instructions_are_read_back_as_they_were_written() -> None:
    words = np.full(op.WIDTH, -1, np.int64)
    to = op.Input(7, True, op.Matrix(1 << 60, 64), op.Quantized(1, 2, 3), 4)
    op.write(words, op.Norm(op.Matrix(5, 6), to, 8, eps=0.5))
    assert op.read(words) == op.Norm(op.Matrix(5, 6), to, 8, eps=0.5)
    assert op.header_of(words).tolist() == (op.OPERATIONS.index(op.Norm), 0, 0, 0)
    assert words[-1] == 0


def test_a_program_that_needs_more_scratch_than_there_is_does_not_run() -> None:
    control, words, none = np.zeros(sync.CONTROL_WORDS, np.int64), np.zeros((1, op.WIDTH), np.int64), op.Matrix(0, 0)
    x = np.zeros((1, 64), np.float32)
    rows = op.Matrix(int(x.ctypes.data), x.nbytes)
    border = op.Border(0.0, 0.0, 0.0)
    select = op.Select(rows, 64, False, 1, 1, none, SELECT_EXACT, border, 0, 0, 0, measure=True, hits=0)
    op.write(words[0], select)
    step = parameters_of(control)
    step["scratch_stride"] = 8 * 64 - 1
    with pytest.raises(AssertionError):
        Pool(control, 1).step(words)
    step["scratch_stride"] = 8 * 64
    op.write(words[0], select)
    Pool(control, 1).step(words)  # compensation is off, so it does nothing


class Inner(NamedTuple):
    number: int
    half: float


class Outer(NamedTuple):
    first: float
    inner: Inner
    truth: bool


def test_views_read_fields_by_name() -> None:
    record = np.zeros(3, record_of(Outer))
    record[1] = Outer(0.25, Inner(-7, 0.5), True)
    outer_at = view("outer", record.dtype, offset=record.itemsize)

    @numba.njit
    def read(address: int) -> Any:
        outer = outer_at(address)
        inner = outer.inner
        return outer.first, inner.number, inner.half, outer.truth

    assert read(record.ctypes.data) == (0.25, -7, 0.5, 1)
    with pytest.raises(numba.TypingError, match="Unknown attribute 'seconds'"):
        numba.njit(lambda address: outer_at(address).seconds)(record.ctypes.data)


def number_by(at: Any) -> Callable[[int], int]:
    return lambda address: at(address).number


def test_a_view_that_changes_is_read_anew() -> None:
    """Others are read once, however often they are named: a loop over stores does not load them again."""
    loads = []
    for at in (view("counter", record_of(Inner), changes=changes) for changes in (False, True)):
        read = numba.njit(types.int64(types.int64))(number_by(at))
        (code,) = read.inspect_llvm().values()
        loads.append(code.count("!invariant.load"))
    assert loads[0] > loads[1] == 0


def note_address(to: int, value: int) -> None:
    """Something small to compile."""
    set_word(to, value)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(isa, "KERNEL_CACHE", tmp_path / "kernels")
    return tmp_path / "kernels"


def works(unit: Unit) -> bool:
    word = np.zeros(1, np.int64)
    unit(int(word.ctypes.data), 7)
    return bool(word[0] == 7)


def count_compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    from numba.core.ccallback import CFunc

    compiled: list[str] = []
    compile_uncached = CFunc._compile_uncached

    def counted(self: Any) -> Any:
        compiled.append(self.__name__)
        return compile_uncached(self)

    monkeypatch.setattr(CFunc, "_compile_uncached", counted)
    return compiled


@pytest.mark.parametrize("suffix", ["nbc", "nbi"])
@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda _data: b"", lambda _data: b"rubbish"])
def test_damaged_machine_code_is_made_anew(
    suffix: str, damage: Callable[[bytes], bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compilations(monkeypatch)
    first = Unit(note_address)
    assert not first.is_compiled
    assert works(first)
    assert works(Unit(note_address))
    assert len(compiled) == 1
    (file,) = folder.glob(f"*/*/*.{suffix}")
    file.write_bytes(damage(file.read_bytes()))
    assert works(Unit(note_address))
    assert len(compiled) == 2
    assert Unit(note_address).is_compiled
    assert works(Unit(note_address))
    assert len(compiled) == 2


def test_a_killed_process_leaves_nothing_that_disturbs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between index and code, or while writing the code: the index names a file that is not there."""
    assert works(Unit(note_address))
    (file,) = folder.glob("*/*/*.nbc")
    file.rename(file.with_suffix(".nbc.tmp.0123"))
    compiled = count_compilations(monkeypatch)
    assert not Unit(note_address).is_compiled
    assert works(Unit(note_address))
    assert works(Unit(note_address))
    assert len(compiled) == 1


def test_without_a_place_to_keep_it_a_unit_works_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_bytes(b"not a folder")
    assert works(Unit(note_address))
    folder.unlink()

    def full(*_arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numba.core.caching.IndexDataCacheFile.save", full)
    assert works(Unit(note_address))
    assert not Unit(note_address).is_compiled


def test_what_cannot_be_compiled_is_a_backend_error(folder: Path) -> None:
    def unknown(_x: int) -> None:
        object()

    with pytest.raises(BackendError, match="the kernel 'unknown' cannot be built here"):
        Unit(unknown)(1)
    assert not list(folder.glob("*/*/*"))


def test_a_load_says_what_it_will_compile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert folder.name
    for unit in {*needed(KINDS["fp16"]), *needed(KINDS["int4"])}:
        monkeypatch.setattr(unit, "_compiled", None)
    assert "for this processor" in str(BACKEND.preparation("fp16"))
    for unit in needed(KINDS["fp16"]):
        monkeypatch.setattr(unit, "_compiled", object())
    assert BACKEND.preparation("fp16") is None
    assert "int4 caches need besides" in str(BACKEND.preparation("int4"))
