"""Units: what is compiled when, what their machine code is kept under, and what happens to a damaged cache."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.backends.cpu.backend import BACKEND
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.link import link, needed
from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.unit import Unit, digest
from runtime.backends.cpu.machine.vector import set_word
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
    module = types.ModuleType("runtime.made")
    exec(_KERNEL.format(factor=factor, operator=operator, other=other), module.__dict__)
    return module


def test_a_digest_follows_what_a_function_calls_and_nothing_else() -> None:
    before = digest(made().outer)
    assert digest(made().outer) == before
    assert digest(made(other="x + 1").outer) == before
    assert digest(made(factor=4).outer) != before
    assert digest(made(operator="+").outer) != before


def test_a_digest_covers_intrinsics_and_constants_of_other_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: getattr(inputs, name).folder.name for name in ("norm", "gather")}
    monkeypatch.setattr(op, "LOGIT_ROWS", op.LOGIT_ROWS + 1)
    after = {name: getattr(inputs, name).folder.name for name in ("norm", "gather")}
    assert after["norm"] == before["norm"]
    assert after["gather"] != before["gather"]
    pages = attention.page_4.folder.name
    monkeypatch.setattr("runtime.backends.cpu.machine.codes.exp2", set_word)
    monkeypatch.setattr("runtime.backends.cpu.kernels.attention.weights.exp2", set_word)
    assert attention.page_4.folder.name != pages


def test_a_digest_is_the_same_in_every_process() -> None:
    names = "attention.page_4.folder, products.compensate_4.folder"
    script = f"from runtime.backends.cpu.units import attention, products; print({names})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == [str(attention.page_4.folder), str(products.compensate_4.folder)]


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
    assert int4 - half == {attention.heads_to_codes, attention.page_4}
    assert hierarchical - half == {attention.heads_to_window, attention.page_planes, paging.flush, paging.restore}
    assert paging.flush_corrected in needed(KINDS["gear4"])
    assert {unit.name for unit in half & int4} == {
        *("execute", "embed", "gather", "norm", "gate", "merge", "attend"),
    }


def test_linking_writes_the_unit_and_the_one_inside_it() -> None:
    words = np.zeros((2, op.WIDTH), np.int64)
    words[:, 0] = op.LINEAR
    names = op.OPERANDS[op.LINEAR]
    for row, operands in zip(words, ({"bits": 4}, {"bits": 4, "total": 8, "residual_bits": 2}), strict=True):
        for name, value in operands.items():
            row[1 + names.index(name)] = value
    link(words)
    assert words[:, op.UNIT].tolist() == [products.multiply_uniform_4.address] * 2
    assert words[:, op.INNER].tolist() == [0, products.compensate_2.address]


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
