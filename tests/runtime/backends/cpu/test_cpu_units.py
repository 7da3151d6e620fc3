"""Units: what is compiled when, what their machine code is kept under, and what happens to a damaged cache."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import types as python
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba import types

from assets import demo_path
from models.progress import Progress
from models.store import StoredModel
from runtime.backends.cpu.backend import BACKEND
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.step import parameters_of
from runtime.backends.cpu.kernels.select import SELECT_EXACT
from runtime.backends.cpu.link import is_linked, link, most_scratch, needed, units_of
from runtime.backends.cpu.machine import build as building
from runtime.backends.cpu.machine import isa, kept, sync
from runtime.backends.cpu.machine.build import build
from runtime.backends.cpu.machine.compiler import machine_code
from runtime.backends.cpu.machine.digest import digest
from runtime.backends.cpu.machine.unit import Unit
from runtime.backends.cpu.machine.vector import set_word
from runtime.backends.cpu.machine.view import record_of, view
from runtime.backends.cpu.pool import Pool
from runtime.backends.cpu.units import attention, inputs, paging, panels, products, repacking, residuals, selection
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
    before = {name: getattr(inputs, name).symbol for name in ("norm", "gather")}
    gather = record_of(op.Gather)
    turned = np.dtype([(name, gather[name]) for name in reversed(gather.names or ())])
    other = view("gather", turned, offset=op.HEADER.itemsize)
    monkeypatch.setattr(inputs, "gather_at", other)
    after = {name: getattr(inputs, name).symbol for name in ("norm", "gather")}
    assert after["norm"] == before["norm"]
    assert after["gather"] != before["gather"]
    pages = attention.pages_4.symbol
    monkeypatch.setattr("runtime.backends.cpu.machine.codes.exp2", set_word)
    monkeypatch.setattr("runtime.backends.cpu.kernels.attention.weights.exp2", set_word)
    assert attention.pages_4.symbol != pages


def test_a_digest_covers_the_order_of_a_tuples_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    before = products.multiply_uniform_4.symbol
    turned: Any = namedtuple("Tile", tuple(reversed(products.Tile._fields)))
    monkeypatch.setattr(products, "Tile", turned)
    assert products.multiply_uniform_4.symbol != before


def test_a_digest_is_the_same_in_every_process() -> None:
    names = "attention.pages_4.symbol, products.compensate_4.symbol"
    script = f"from runtime.backends.cpu.units import attention, products; print({names})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == [attention.pages_4.symbol, products.compensate_4.symbol]


_MEETING = """
import types as python
from pathlib import Path
import numpy as np
from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.unit import Unit

isa.KERNEL_CACHE = Path({folder!r})

def made(factor):
    module = python.ModuleType("runtime.made")
    module.FACTOR = factor
    exec('''
import numba
from runtime.backends.cpu.machine.vector import set_word

@numba.njit(nogil=True)
def inner(x: int) -> int:
    for _ in range(x % 7):
        x = x * FACTOR + x // 3
    return x

def outer(to: int, x: int) -> None:
    set_word(to, inner(x))
''', module.__dict__)
    return Unit(module.outer)

def gives(unit):
    word = np.zeros(1, np.int64)
    unit(int(word.ctypes.data), 5)
    return int(word[0])

units = {{factor: made(factor) for factor in {factors}}}
compiled = [unit.is_compiled for unit in units.values()]
print([gives(unit) for unit in units.values()], compiled)
"""


def test_units_of_several_processes_keep_their_own_functions_where_they_meet(tmp_path: Path) -> None:
    """Of two functions with one name a linker takes the first; compiled alike in two processes, theirs would agree."""

    def run(*factors: int) -> str:
        script = _MEETING.format(folder=str(tmp_path), factors=factors)
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    alone = {factor: run(factor) for factor in (2, 3)}
    assert all(text.endswith("[False]\n") for text in alone.values())
    expected = [text.split("]")[0].removeprefix("[") for text in alone.values()]
    assert expected[0] != expected[1]
    assert run(2, 3) == f"[{', '.join(expected)}] [True, True]\n"
    assert run(3, 2) == f"[{', '.join(reversed(expected))}] [True, True]\n"


def test_a_cache_needs_its_own_kernels_only() -> None:
    half, int8, hierarchical = (set(needed(KINDS[kind])) for kind in ("fp16", "int8", "hierarchical"))
    assert half - int8 == {attention.heads_to_halves}
    assert int8 - half == {attention.heads_to_codes, attention.pages_8}
    assert hierarchical - half == {attention.heads_to_window, attention.pages_planes, paging.flush, paging.restore}
    gear4, kcvt4 = set(needed(KINDS["gear4"])), set(needed(KINDS["kcvt4"]))
    assert gear4 - kcvt4 == {attention.corrected_pages_4, paging.flush_corrected}
    assert kcvt4 - gear4 == {attention.pages_4, paging.flush}
    assert {unit.name for unit in half & int8} == {
        *("execute", "set_active", "embed", "gather", "check", "norm", "gate", "merge", "attend"),
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
    assert op.header_of(words).tolist() == (op.OPERATIONS.index(op.Norm), 0, 0, 0, 0, 0)
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
    compiled: list[str] = []

    def counted(function: Callable[..., None], symbol: str) -> bytes:
        compiled.append(symbol)
        return machine_code(function, symbol)

    monkeypatch.setattr("runtime.backends.cpu.machine.unit.machine_code", counted)
    return compiled


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda _data: b"",
        lambda _data: b"rubbish",
        lambda data: data[:-9] + b"\0" * 9,
    ],
    ids=["cut", "empty", "rubbish", "changed"],
)
def test_damaged_machine_code_is_made_anew(
    damage: Callable[[bytes], bytes], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = count_compilations(monkeypatch)
    first = Unit(note_address)
    assert not first.is_compiled
    assert works(first)
    assert works(Unit(note_address))
    assert len(compiled) == 1
    (file,) = folder.glob("*.code")
    file.write_bytes(damage(file.read_bytes()))
    assert works(Unit(note_address))
    assert len(compiled) == 2
    assert Unit(note_address).is_compiled
    assert works(Unit(note_address))
    assert len(compiled) == 2


def test_a_file_under_another_name_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = Unit(note_address)
    other = kept.file_of(folder, "other-0123456789abcdef")
    kept.write(other, unit.keep())
    other.rename(unit.file)
    compiled = count_compilations(monkeypatch)
    assert works(unit)
    assert len(compiled) == 1


def test_a_killed_process_leaves_nothing_that_disturbs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it wrote: there is a part of a file beside where the file was to be."""
    assert works(Unit(note_address))
    (file,) = folder.glob("*.code")
    part = file.rename(file.with_suffix(".0123.part"))
    compiled = count_compilations(monkeypatch)
    assert not Unit(note_address).is_compiled
    assert works(Unit(note_address))
    assert works(Unit(note_address))
    assert len(compiled) == 1
    os.utime(part, (0, 0))
    kept.sweep(folder)
    assert not part.exists()


def test_without_a_place_to_keep_it_a_unit_works_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_bytes(b"not a folder")
    assert works(Unit(note_address))
    folder.unlink()

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    assert works(Unit(note_address))
    assert not Unit(note_address).is_compiled


_DAY = 86400


def test_old_machine_code_is_removed(folder: Path) -> None:
    """What was superseded goes a day after its last use; the last of every unit stays, and so does what is not ours."""
    now = time.time()
    ages = {
        "gather-0000000000000001.code": 0,
        "gather-0000000000000002.code": _DAY // 2,
        "gather-0000000000000003.code": 2 * _DAY,
        "norm-0000000000000001.code": 30 * _DAY,
        "merge-0000000000000001.code": 61 * _DAY,
        "notes.txt": 90 * _DAY,
    }
    for name, age in ages.items():
        folder.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"")
        os.utime(folder / name, (now - age, now - age))
    for name, age in {"attend-0000000000000001": 2 * _DAY, "embed-0000000000000001": 60}.items():
        (folder / name / "inside").mkdir(parents=True)
        (folder / name / "inside" / "code.nbc").write_bytes(b"")
        os.utime(folder / name, (now - age, now - age))
    kept.sweep(folder)
    assert {path.name for path in folder.iterdir()} == {
        "gather-0000000000000001.code",
        "gather-0000000000000002.code",
        "norm-0000000000000001.code",
        "embed-0000000000000001",
        "notes.txt",
    }
    kept.sweep(folder / "nowhere")


def test_using_code_keeps_it(folder: Path) -> None:
    unit = Unit(note_address)
    assert works(unit)
    os.utime(unit.file, (time.time() - 2 * _DAY,) * 2)
    assert works(Unit(note_address))
    assert time.time() - unit.file.stat().st_mtime < _DAY


def test_several_processes_may_keep_and_remove_at_once(folder: Path) -> None:
    """Each writes the same unit and sweeps; none fails, and what is left is whole."""
    folder.mkdir()
    script = (
        "import contextlib, sys, os; from pathlib import Path; from runtime.backends.cpu.machine import kept; "
        "folder = Path(sys.argv[1])\n"
        "for n in range(200):\n"
        "    old = folder / f'gather-{n % 7:016x}.code'\n"
        "    kept.write(folder / 'gather-ffffffffffffffff.code', b'code' * 1000)\n"
        "    assert kept.read(folder / 'gather-ffffffffffffffff.code') == b'code' * 1000\n"
        "    with contextlib.suppress(FileNotFoundError):\n"  # another may have removed it
        "        old.write_bytes(b''); os.utime(old, (0, 0))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(folder)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert kept.read(folder / "gather-ffffffffffffffff.code") == b"code" * 1000


def test_what_cannot_be_compiled_is_a_backend_error(folder: Path) -> None:
    def unknown(_x: int) -> None:
        object()

    with pytest.raises(BackendError, match="the kernel 'unknown' cannot be built here"):
        Unit(unknown)(1)
    assert not list(folder.glob("*.code"))


def note_through_the_interpreter(to: int, value: int) -> None:
    """Calls something that only processes with numba have."""
    set_word(to, len(str(value)))


def test_machine_code_that_needs_numba_to_run_is_refused(folder: Path) -> None:
    with pytest.raises(BackendError, match="other processes may not have"):
        works(Unit(note_through_the_interpreter))


@pytest.fixture(scope="module")
def stored() -> StoredModel:
    return StoredModel.open_folder(demo_path(), "demo")


@pytest.fixture
def uncompiled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[Unit]:
    """Three units of the program of which nothing is compiled."""
    units = [inputs.gather, inputs.embed, inputs.gate]
    for unit in units:
        monkeypatch.setattr(unit, "_loaded", None)
        monkeypatch.setattr(unit, "_call", None)
    return units


def test_units_are_compiled_in_processes_and_counted(
    uncompiled: list[Unit], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = count_compilations(monkeypatch)
    monkeypatch.setattr(building, "_cores", lambda: 2)
    told: list[tuple[int, int]] = []
    build([*uncompiled, *uncompiled], lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert {file.stem for file in folder.glob("*.code")} == {unit.symbol for unit in uncompiled}
    assert all(unit.address for unit in uncompiled)
    assert here == []
    build(uncompiled, lambda *_: pytest.fail("there was nothing to do"))


@pytest.mark.parametrize("trouble", ["none can be started", "they die", "one core"])
def test_without_other_processes_units_are_compiled_here(
    trouble: str, uncompiled: list[Unit], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = count_compilations(monkeypatch)
    monkeypatch.setattr(building, "_cores", lambda: 1 if trouble == "one core" else 2)
    if trouble != "one core":
        monkeypatch.setattr(sys, "executable", "/nowhere/python" if trouble == "none can be started" else "/bin/false")
    told: list[int] = []
    build(uncompiled, lambda done, _total: told.append(done))
    assert told == [0, 1, 2, 3]
    assert sorted(here) == sorted(unit.symbol for unit in uncompiled)


def test_a_load_says_how_many_kernels_it_compiles(
    uncompiled: list[Unit], monkeypatch: pytest.MonkeyPatch, stored: StoredModel
) -> None:
    for unit in {*units_of(stored, KINDS["fp16"], compensated=True)} - set(uncompiled):
        monkeypatch.setattr(unit, "_loaded", object())
    told: list[Progress] = []
    BACKEND.prepare(stored, "fp16", compensated=True, progress=told.append)
    assert [(report.phase, report.done, report.total, report.unit) for report in told] == [
        ("compile", done, 3, "kernels") for done in range(4)
    ]
    assert "compiling 3 kernels for this processor, once" in told[0].message
    BACKEND.prepare(stored, "fp16", compensated=True, progress=lambda _report: pytest.fail("nothing to do"))


def test_a_model_needs_the_products_of_its_weights_only(stored: StoredModel) -> None:
    plain, compensated = (set(units_of(stored, KINDS["fp16"], compensated=own)) for own in (False, True))
    bits = {stored.linear(name).bits for name in stored.spec.linear_names()}
    products_of = {3: products.multiply_uniform_3, 4: products.multiply_uniform_4}
    weights = {unit for own in bits for unit in (products_of[own], repacking.UNIFORM[own])}
    assert plain == {*needed(KINDS["fp16"]), *weights}
    decoding = {products.compensate_4, selection.select_by_buckets}
    prompts = {panels.multiply_panel, panels.panel_4, residuals.share_4}
    assert compensated - plain == decoding | prompts


def test_two_processes_make_a_unit_once(folder: Path) -> None:
    """The second waits for the first and takes what it made."""
    unit = Unit(note_address)
    with kept.one_at_a_time(unit.file):
        waiting = threading.Thread(target=unit.prepare)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        other = Unit(note_address)._made()
        written = unit.file.stat().st_mtime_ns
    waiting.join(60)
    assert kept.read(unit.file) == other
    assert unit.file.stat().st_mtime_ns == written
