"""Windows and macOS, as far as they can be told from here: imports, and what is behind a seam."""

from __future__ import annotations

import ast
import ctypes
import io
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import llvmlite.binding as llvm
import pytest
from llvmlite import ir

from app.cli import output
from models import files
from runtime.backends.cpu.machine.emit import I64
from runtime.backends.cpu.machine.sync import sleeping
from runtime.system.lifetimes import Job
from tests.architecture import ROOT
from tests.grid import grid
from tests.systems import MACHINES, POSIX, ROOMS
from tuner import sysctl


@pytest.mark.parametrize("system", grid(MACHINES, {"win32"}))
def test_everything_can_be_imported(system: str) -> None:
    command = [sys.executable, "-m", "tests.systems", system]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout.split()[0]) > 400


def test_only_these_functions_import_what_windows_lacks() -> None:
    """Each of them asks for the system before, or goes on without."""
    found = set()
    for file in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            found |= {(str(file.relative_to(ROOT)), name) for name in names if name in POSIX}
    assert found == {
        ("app/cli/repl.py", "readline"),
        ("app/cli/talk.py", "termios"),
        ("app/tui/terminal.py", "termios"),
        ("runtime/backends/triton/residual.py", "resource"),
        ("runtime/measure/speed.py", "resource"),
        ("runtime/system/child_process.py", "resource"),
    }


class Compiled:
    """`sleep(address, value)` and `wake(address)` of a system, compiled for this one.

    Args:
        name: `sys.platform`.
        calls: Stands in for the functions of that system that this one lacks.
    """

    def __init__(self, name: str, **calls: Any) -> None:
        for symbol, function in calls.items():
            llvm.add_symbol(symbol, ctypes.cast(function, ctypes.c_void_p).value)
        module = ir.Module()
        emits = sleeping(name, "arm64" if name == "darwin" else "amd64", waits=True)
        for symbol, emit, count in (("sleep", emits.sleep, 2), ("wake", emits.wake, 1)):
            function = ir.Function(module, ir.FunctionType(ir.VoidType(), [I64] * count), symbol)
            builder = ir.IRBuilder(function.append_basic_block())
            emit(builder, *function.args)
            builder.ret_void()
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(str(module)), machine)
        self._engine.finalize_object()

    def __call__(self, name: str, *arguments: int) -> None:
        address = self._engine.get_function_address(name)
        ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * len(arguments))(address)(*arguments)


def test_a_thread_waits_for_a_word_on_windows() -> None:
    said: list[Any] = []

    def wait(address: int, compared: int, size: int, milliseconds: int) -> int:
        said.append((address, ctypes.c_uint32.from_address(compared).value, size, milliseconds))
        return 1

    pointers = ctypes.c_void_p, ctypes.c_void_p
    waits = ctypes.CFUNCTYPE(ctypes.c_int, *pointers, ctypes.c_size_t, ctypes.c_uint32)(wait)
    wakes = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(said.append)
    system = Compiled("win32", WaitOnAddress=waits, WakeByAddressAll=wakes)
    system("sleep", 4096, (7 << 32) + 0xFEDCBA98)
    system("wake", 8192)
    assert said == [(4096, 0xFEDCBA98, 4, 0xFFFFFFFF), 8192]


def test_a_thread_waits_for_a_word_on_macos() -> None:
    said: list[Any] = []

    def note(*given: int) -> int:
        said.append(given)
        return 0

    waits = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_uint32)(note)
    wakes = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint32)(note)
    system = Compiled("darwin", os_sync_wait_on_address=waits, os_sync_wake_by_address_all=wakes)
    system("sleep", 4096, (7 << 32) + 0xFEDCBA98)
    system("wake", 8192)
    assert said == [(4096, 0xFEDCBA98, 4, 0), (8192, 4, 0)]


class Kernel32:
    """Windows' calls on jobs, noted."""

    def __init__(self, refuse: str = "") -> None:
        self.said: list[Any] = []
        self._refuse = refuse

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any) -> int:
            self.said.append((name, given))
            return 0 if name == self._refuse else {"CreateJobObjectW": 71, "OpenProcess": 72}.get(name, 5)

        setattr(self, name, call)
        return call


def test_a_job_ends_its_processes_with_this_one() -> None:
    kernel = Kernel32()
    Job(kernel).add(1234)
    names = [name for name, _ in kernel.said]
    assert names == [
        "CreateJobObjectW",
        "SetInformationJobObject",
        "OpenProcess",
        "AssignProcessToJobObject",
        "CloseHandle",
    ]
    _, (job, kind, _, size) = kernel.said[1]
    assert (job.value, kind) == (71, 9)
    if ctypes.sizeof(ctypes.c_void_p) == 8:
        assert size.value == 144  # the structure of 64-bit Windows
    assert kernel.said[2][1][2] == 1234
    assert [handle.value for handle in kernel.said[3][1]] == [71, 72]
    kernel = Kernel32("AssignProcessToJobObject")
    with pytest.raises(OSError, match="a call of Windows failed with error 5"):
        Job(kernel).add(1234)
    assert kernel.said[-1][0] == "CloseHandle"


@pytest.mark.parametrize(("failed", "found"), [(0, 6), (-1, None)])
def test_macos_tells_its_fast_cores(failed: int, found: int | None) -> None:
    def sysctlbyname(name: bytes, value: Any, size: Any, *_: Any) -> int:
        assert name == b"hw.perflevel0.physicalcpu"
        ctypes.c_int32.from_buffer(value._obj).value, size._obj.value = 6, 4
        return failed

    library = SimpleNamespace(sysctlbyname=sysctlbyname)
    assert sysctl.number("hw.perflevel0.physicalcpu", library) == found


def test_a_file_that_is_being_read_is_replaced_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[Path] = []
    replace = Path.replace

    def busy(own: Path, target: Path) -> Path:
        tries.append(own)
        if len(tries) < 4:
            raise PermissionError(13, "The process cannot access the file")
        return replace(own, target)

    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr(files, "_PAUSE_S", 0.0)
    for system, count in (("win32", 4), ("linux", 1)):
        monkeypatch.setattr(files, "sys", SimpleNamespace(platform=system))
        tries.clear()
        if system == "win32":
            with files.replacing(tmp_path / "file") as file:
                file.write(b"new")
        else:
            with pytest.raises(PermissionError), files.replacing(tmp_path / "file"):
                pass
        assert len(tries) == count
    assert (tmp_path / "file").read_bytes() == b"new"


def test_pipes_carry_utf_8_on_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = {
        name: io.TextIOWrapper(io.BytesIO("naïve 日本".encode()), encoding="cp1252") for name in ("stdin", "stdout")
    }
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    monkeypatch.setattr(output.sys, "platform", "win32")
    output.prepare_streams()
    assert streams["stdin"].read() == "naïve 日本"
    assert streams["stdout"].encoding == "utf-8"
