"""Units: when they are compiled, the keys of their stored machine code, and damaged files."""

from __future__ import annotations

import ast
import math
import os
import pkgutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numba
import numpy as np
import pytest
from numba import types

from assets import demo_path
from models.progress import Progress
from models.store import StoredModel
from runtime.backends.cpu import executor, units
from runtime.backends.cpu.backend import BACKEND
from runtime.backends.cpu.data import instructions as op
from runtime.backends.cpu.data.instructions import SELECT_EXACT
from runtime.backends.cpu.data.pages import HALF, TWO_PLANES
from runtime.backends.cpu.data.records import CONTROL_WORDS, parameters_of, record_of
from runtime.backends.cpu.kernels.views import view
from runtime.backends.cpu.link import is_linked, link, most_scratch, needed, paging_units, prompt_units, units_of
from runtime.backends.cpu.machine import build as building
from runtime.backends.cpu.machine import code_cache, isa
from runtime.backends.cpu.machine import unit as unit_module
from runtime.backends.cpu.machine.build import build, build_later
from runtime.backends.cpu.machine.kernel import kernel, machine_code
from runtime.backends.cpu.machine.unit import Sources, Unit, compiled_unit, digest
from runtime.backends.cpu.machine.vector import set_word
from runtime.backends.cpu.pool import Pool
from runtime.backends.cpu.units import attention, inputs, paging, panels, products, repacking, selection
from runtime.errors import BackendError
from runtime.kv.kinds import KINDS
from tests.runtime.backends.cpu.machine import unplaced

_FILES = {
    "runtime/units/first.py": "from runtime.kernels import (\n    inner,\n    outer as other,\n)\n",
    "runtime/kernels/__init__.py": "",
    "runtime/kernels/inner.py": "import numba\nfrom models.numbers import FACTOR as factor\n",
    "runtime/kernels/outer.py": "def outer():\n    from runtime.units.first import unit  # and back\n",
    "runtime/kernels/aside.py": "from runtime.units.first import unit\n",
    "models/numbers.py": "FACTOR = 3\n",
    "app/screen.py": "from runtime.units.first import unit\n",
}


@pytest.mark.parametrize("edited", _FILES)
def test_a_digest_follows_a_module_and_what_it_imports_and_nothing_else(edited: str, tmp_path: Path) -> None:
    for name, text in _FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    unit = tmp_path / "runtime/units/first.py"
    sources = Sources(tmp_path)
    before = sources.digest(unit)
    assert Sources(tmp_path).digest(unit) == before
    with (tmp_path / edited).open("a") as file:
        file.write("NUMBER = 4\n")
    behind = {"first.py", "inner.py", "outer.py", "numbers.py", "__init__.py"}
    assert (Sources(tmp_path).digest(unit) != before) == (Path(edited).name in behind)
    assert sources.digest(unit) == before  # that of what this process has imported


def test_no_import_of_a_kernel_is_overlooked() -> None:
    """Sources are searched for imports; here they are parsed."""
    root = Path(isa.__file__).parents[4]
    sources = Sources(root)
    for file in (root / "runtime/backends/cpu/units").glob("*.py"):
        behind = set(sources.behind(file))
        named = set()
        for node in ast.walk(ast.Module([*(ast.parse(own.read_text()) for own in behind)], [])):
            if isinstance(node, ast.ImportFrom):
                assert node.level == 0, "an import that says from where"
                named |= {str(node.module), *(f"{node.module}.{own.name}" for own in node.names)}
            elif isinstance(node, ast.Import):
                named |= {own.name for own in node.names}
        places = [root.joinpath(*name.split(".")) for name in named]
        files = {path for own in places for path in (own.with_suffix(".py"), own / "__init__.py") if path.is_file()}
        assert behind == files | {file}


def test_units_of_one_module_and_variants_have_digests_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def own() -> set[str]:
        return {
            digest(unit.module, unit.name, unit.source)
            for unit in (products.multiply_uniform_3, products.multiply_uniform_4)
        }

    before = own()
    monkeypatch.setattr(isa, "VARIANT", "another")
    unit_module._circumstances.cache_clear()
    after = own()
    unit_module._circumstances.cache_clear()
    assert len(before | after) == 4


def test_a_function_inside_another_is_no_unit() -> None:
    """One source would make two of it, which only what encloses them tells apart."""

    def inside(_x: int) -> None:
        pass

    with pytest.raises(AssertionError):
        compiled_unit(inside)


def test_a_digest_is_the_same_in_every_process() -> None:
    names = "attention.pages_4.symbol, products.compensate_4.symbol"
    script = f"from runtime.backends.cpu.units import attention, products; print({names})"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert found == [attention.pages_4.symbol, products.compensate_4.symbol]


_MEETING = """
import importlib.util
from pathlib import Path
import numpy as np
from runtime.backends.cpu.machine import isa
from runtime.backends.cpu.machine.unit import Unit

isa.KERNEL_CACHE = Path({folder!r})

def made(factor):
    spec = importlib.util.spec_from_file_location("made", isa.KERNEL_CACHE / str(factor) / "made.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    unit = Unit("made", "outer", Path(module.__file__))
    unit.define(module.outer)
    return unit

def gives(unit):
    word = np.zeros(1, np.int64)
    unit(int(word.ctypes.data), 5)
    return int(word[0])

units = {{factor: made(factor) for factor in {factors}}}
compiled = [unit.is_compiled for unit in units.values()]
print([gives(unit) for unit in units.values()], compiled)
"""

_MADE = """
import numba
from runtime.backends.cpu.machine.vector import set_word

@numba.njit(nogil=True)
def inner(x: int) -> int:
    for _ in range(x % 7):
        x = x * {factor} + x // 3
    return x

def outer(to: int, x: int) -> None:
    set_word(to, inner(x))
"""


def test_units_of_several_processes_keep_their_own_functions_where_they_meet(tmp_path: Path) -> None:
    """Of two functions with one name a linker takes the first; compiled alike in two processes, theirs would agree."""
    for factor in (2, 3):
        (tmp_path / str(factor)).mkdir()
        (tmp_path / str(factor) / "made.py").write_text(_MADE.format(factor=factor))

    def run(*factors: int) -> str:
        script = _MEETING.format(folder=str(tmp_path), factors=factors)
        return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout

    alone = {factor: run(factor) for factor in (2, 3)}
    assert all(text.endswith("[False]\n") for text in alone.values())
    expected = [text.split("]")[0].removeprefix("[") for text in alone.values()]
    assert expected[0] != expected[1]
    assert run(2, 3) == f"[{', '.join(expected)}] [True, True]\n"
    assert run(3, 2) == f"[{', '.join(reversed(expected))}] [True, True]\n"


def test_the_instruction_set_names_every_unit_and_no_other() -> None:
    named = {units.page_unit(form, rank) for form in (2, 4) for rank in (0, 4)}
    named |= {units.page_unit(form, 0) for form in (8, TWO_PLANES)}
    named |= {units.heads_unit(form, window) for form in (4, HALF) for window in (0, 64)}
    named |= {units.flush_unit(rank) for rank in (0, 4)}

    def listed(value: object) -> list[object]:
        return [own for each in value.values() for own in listed(each)] if isinstance(value, dict) else [value]

    named |= {own for value in vars(units).values() for own in listed(value) if isinstance(own, Unit)}
    modules = [import_module(f"{units.__name__}.{found.name}") for found in pkgutil.iter_modules(units.__path__)]
    places = [place for module in (executor, *modules) for place in vars(module).items()]
    assert named == {own for _, own in places if isinstance(own, Unit)}
    assert all(name == own.name and own.function for name, own in places if isinstance(own, Unit))


def test_new_sources_are_not_compiled_under_an_old_name(tmp_path: Path) -> None:
    source = tmp_path / "made.py"
    source.write_text("FACTOR = 2\n")
    unit = Unit("made", "outer", source)
    source.write_text("FACTOR = 3\n")
    with pytest.raises(BackendError, match="updated while it ran: start it again"):
        unit.keep()


def test_a_cache_needs_its_own_kernels_only() -> None:
    half, int8, hierarchical = (set(needed(KINDS[kind])) for kind in ("fp16", "int8", "hierarchical"))
    assert half - int8 == {attention.heads_to_halves}
    assert int8 - half == {attention.heads_to_codes, attention.pages_8}
    assert hierarchical - half == {attention.heads_to_window}
    gear4, kcvt4, planes = (paging_units(KINDS[kind]) for kind in ("gear4", "kcvt4", "hierarchical"))
    assert gear4 == [paging.flush_corrected, attention.corrected_pages_4, paging.restore]
    assert kcvt4 == [paging.flush, attention.pages_4, paging.restore]
    assert planes == [paging.flush, attention.pages_planes, paging.restore]
    assert paging_units(KINDS["fp16"]) == paging_units(KINDS["int8"]) == []
    assert {unit.name for unit in half & int8} == {
        *("execute", "set_active", "embed", "gather", "check", "norm", "gate", "merge", "attend"),
    }


def test_linking_writes_the_unit_and_the_one_inside_it() -> None:
    words, plain = np.zeros((2, op.WIDTH), np.int64), unplaced(6, 3)
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
    control, words, none = np.zeros(CONTROL_WORDS, np.int64), np.zeros((1, op.WIDTH), np.int64), op.Matrix(0, 0)
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


def unit_of(function: Callable[..., None]) -> Unit:
    """A unit of this module, in a process that has not seen it yet."""
    unit = Unit(__name__, function.__name__, Path(__file__))
    unit.define(function)
    return unit


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

    monkeypatch.setattr("runtime.backends.cpu.machine.kernel.machine_code", counted)
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
    first = unit_of(note_address)
    assert not first.is_compiled
    assert works(first)
    assert works(unit_of(note_address))
    assert len(compiled) == 1
    (file,) = folder.glob("*.code")
    file.write_bytes(damage(file.read_bytes()))
    assert works(unit_of(note_address))
    assert len(compiled) == 2
    assert unit_of(note_address).is_compiled
    assert works(unit_of(note_address))
    assert len(compiled) == 2


def test_machine_code_that_others_may_have_written_is_made_anew(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert works(unit_of(note_address))
    (file,) = folder.glob("*.code")
    file.chmod(0o666)
    compiled = count_compilations(monkeypatch)
    unit = unit_of(note_address)
    assert not unit.is_compiled
    assert works(unit)
    assert works(unit_of(note_address))
    assert len(compiled) == 1


def test_a_file_under_another_name_is_not_believed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unit = unit_of(note_address)
    other = code_cache.file_of(folder, "other-0123456789abcdef")
    code_cache.write(other, unit.keep())
    other.rename(unit.file)
    compiled = count_compilations(monkeypatch)
    assert works(unit)
    assert len(compiled) == 1


def test_a_killed_process_leaves_nothing_that_disturbs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it wrote: there is a part of a file beside where the file was to be."""
    assert works(unit_of(note_address))
    (file,) = folder.glob("*.code")
    part = file.rename(file.with_suffix(".0123.part"))
    compiled = count_compilations(monkeypatch)
    assert not unit_of(note_address).is_compiled
    assert works(unit_of(note_address))
    assert works(unit_of(note_address))
    assert len(compiled) == 1
    os.utime(part, (0, 0))
    code_cache.sweep(folder)
    assert not part.exists()


def test_without_a_place_to_keep_it_a_unit_works_all_the_same(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_bytes(b"not a folder")
    assert works(unit_of(note_address))
    folder.unlink()

    def full(*_arguments: Any, **_options: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    assert works(unit_of(note_address))
    assert not unit_of(note_address).is_compiled


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
    code_cache.sweep(folder)
    assert {path.name for path in folder.iterdir()} == {
        "gather-0000000000000001.code",
        "gather-0000000000000002.code",
        "norm-0000000000000001.code",
        "embed-0000000000000001",
        "notes.txt",
    }
    code_cache.sweep(folder / "nowhere")


def test_using_code_keeps_it(folder: Path) -> None:
    unit = unit_of(note_address)
    assert works(unit)
    os.utime(unit.file, (time.time() - 2 * _DAY,) * 2)
    assert works(unit_of(note_address))
    assert time.time() - unit.file.stat().st_mtime < _DAY


def test_several_processes_may_keep_and_remove_at_once(folder: Path) -> None:
    """Each writes the same unit and sweeps; none fails, and what is left is whole."""
    folder.mkdir()
    script = (
        "import contextlib, sys, os; from pathlib import Path; from runtime.backends.cpu.machine import code_cache; "
        "folder = Path(sys.argv[1])\n"
        "for n in range(200):\n"
        "    old = folder / f'gather-{n % 7:016x}.code'\n"
        "    code_cache.write(folder / 'gather-ffffffffffffffff.code', b'code' * 1000)\n"
        "    assert code_cache.read(folder / 'gather-ffffffffffffffff.code') == b'code' * 1000\n"
        "    with contextlib.suppress(FileNotFoundError):\n"  # another may have removed it
        "        old.write_bytes(b''); os.utime(old, (0, 0))\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", script, str(folder)]) for _ in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert code_cache.read(folder / "gather-ffffffffffffffff.code") == b"code" * 1000


def unknown(_x: int) -> None:
    """Nothing that numba knows."""
    object()


def test_what_cannot_be_compiled_is_a_backend_error(folder: Path) -> None:
    with pytest.raises(BackendError, match="the kernel 'unknown' cannot be built here"):
        unit_of(unknown)(1)
    assert not list(folder.glob("*.code"))


def note_an_integral(to: int, value: int) -> None:
    """Calls something that other processes may not have."""
    set_word(to, int(math.erf(value)))


def test_machine_code_that_calls_what_others_may_lack_is_refused(folder: Path) -> None:
    with pytest.raises(BackendError, match="other processes may not have"):
        works(unit_of(note_an_integral))


def test_python_cannot_call_a_kernel() -> None:
    with pytest.raises(TypeError, match="share_of_all is a kernel: only compiled code calls it"):
        kernel(share_of_all)(7)


def share_of_all(value: int) -> int:
    """Something that a kernel computes."""
    return value // 2


def test_a_kernel_can_be_called_through_a_function_of_its_own() -> None:
    """As tests and benchmarks do."""
    inner = kernel(share_of_all)
    outer = kernel(lambda value: inner(value) + inner(value + 1))
    assert numba.njit(lambda value: outer(value) - inner(1))(7) == 7


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
    uncompiled: list[Unit], folder: Path, monkeypatch: pytest.MonkeyPatch, planted: Callable[[], list[str]]
) -> None:
    """In processes that take nothing from the current folder."""
    here = count_compilations(monkeypatch)
    monkeypatch.setattr(building, "_cores", lambda: 2)
    told: list[tuple[int, int]] = []
    build([*uncompiled, *uncompiled], lambda done, total: told.append((done, total)))
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert {file.stem for file in folder.glob("*.code")} == {unit.symbol for unit in uncompiled}
    assert all(unit.address for unit in uncompiled)
    assert here == []
    assert planted() == []
    build(uncompiled, lambda *_: pytest.fail("there was nothing to do"))


def test_units_can_be_compiled_beside_what_goes_on(uncompiled: list[Unit], monkeypatch: pytest.MonkeyPatch) -> None:
    here = count_compilations(monkeypatch)
    build_later(uncompiled)
    threads = [thread for thread in threading.enumerate() if thread.name == "compile"]
    assert threads
    for thread in threads:
        thread.join(120)
    assert all(unit.is_compiled for unit in uncompiled)
    assert here == []
    build_later(uncompiled)
    assert "compile" not in {thread.name for thread in threading.enumerate()}


def test_what_compiles_in_the_background_takes_turns(uncompiled: list[Unit], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model that is opened compiles there, and somebody may try many."""
    at_once = [0]

    class Compilers:
        def __init__(self, _missing: Sequence[Unit], nice: int) -> None:
            assert nice
            at_once.append(at_once[-1] + 1)

        def tried(self) -> Iterator[str]:
            time.sleep(0.01)
            return iter(())

        def stop(self) -> None:
            at_once.append(at_once[-1] - 1)

    monkeypatch.setattr(building, "_Compilers", Compilers)
    for _ in range(3):
        build_later(uncompiled)
    for thread in [thread for thread in threading.enumerate() if thread.name == "compile"]:
        thread.join(60)
    assert at_once == [0, 1, 0, 1, 0, 1, 0]


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
    monkeypatch.setattr(building, "_cores", lambda: 1)  # here, which is faster for so few
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
    repack_of = {3: repacking.repack_uniform_3, 4: repacking.repack_uniform_4}
    products_of = {3: products.multiply_uniform_3, 4: products.multiply_uniform_4}
    weights = {unit for own in bits for unit in (products_of[own], repack_of[own])}
    assert plain == {*needed(KINDS["fp16"]), *weights}
    assert compensated - plain == {products.compensate_4, selection.select_by_buckets}
    assert set(prompt_units(stored)) == {panels.multiply_panel, panels.panel_4, panels.share_4}
    turned: Any = SimpleNamespace(spec=stored.spec, linear=lambda name: replace(stored.linear(name), trellis=True))
    assert set(prompt_units(turned)) == {inputs.pick, products.add_whole}


def test_two_processes_make_a_unit_once(folder: Path) -> None:
    """The second waits for the first and takes what it made."""
    unit = unit_of(note_address)
    with code_cache.one_at_a_time(unit.file):
        waiting = threading.Thread(target=unit.prepare)
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        other = unit_of(note_address)._made()
        written = unit.file.stat().st_mtime_ns
    waiting.join(60)
    assert code_cache.read(unit.file) == other
    assert unit.file.stat().st_mtime_ns == written
