"""Every Triton kernel compiles for the devices this program is for, without spilling a register."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import psutil
import pytest

from runtime.backends.triton.kernels.gemv import resident
from runtime.errors import BackendError
from tests.lab import ahead
from tests.lab.ahead import (
    SHARED_LIMIT,
    TARGETS,
    Compiled,
    code_bytes,
    compile_all,
    major,
    pairs,
)
from tests.runtime.backends.triton.ahead.specializations import specializations

ROOT = Path(__file__).resolve().parents[4]
CACHE = ROOT / ".pytest_cache" / "triton"
WITHOUT_OPT_IN = 48 << 10
MANY = 14
# Compiling takes processor time, so much of it that a busy machine needs longer than other tests may take.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def sample() -> tuple[tuple[str, str], ...]:
    """Every second specialization of a kernel that has many, for one device, the devices in turn.

    All of them for all devices take many minutes: `make kernels`, where kernels or their compiler change.
    """
    known, by_kernel = specializations(), defaultdict[str, list[str]](list)
    for name, one in known.items():
        by_kernel[one.operation].append(name)
    taken = {name for names in by_kernel.values() for name in names[:: 1 if len(names) <= MANY else 2]}
    own = enumerate(pairs([name]) for name in known if name in taken)
    return tuple(found[turn % len(TARGETS) % len(found)] for turn, found in own)


@pytest.fixture(scope="module")
def everything() -> tuple[tuple[Compiled, ...], tuple[str, ...]]:
    """All specializations. Triton's cache knows sources and versions: only what changed is compiled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(CACHE))
        return compile_all(sample())


def test_every_kernel_compiles(everything):
    compiled, failed = everything
    assert not failed, "\n".join(failed)
    assert {(row.name, row.target) for row in compiled} == set(sample())


def test_every_kernel_module_is_compiled_and_every_device_is_compiled_for(everything):
    room = ROOT / "runtime" / "backends" / "triton" / "kernels"
    names = {path.stem for path in room.glob("*.py") if "_kernel(" in path.read_text(encoding="utf-8")}
    assert "gemv" in names
    assert "attention" in names
    assert {row.operation for row in everything[0]} == names
    assert {row.target for row in everything[0]} == set(TARGETS)


def _spilled(name: str, target: str) -> int:
    """Bytes that may: of GEAR over 512 channels and 576, where no tile spills less (docs/decisions/gpu.md); of a
    trellis's rows and of rows with minimums, four instructions of 1,800; and of 9 to 16 rows, some twenty of 1,400,
    where a second launch would be 1,100 more (3 bits on sm_86: 24 bytes on one machine, 32 on another, of the same
    code). Of products of one token, compensated or not, none."""
    if name == "gemv b4 minimums rows" or (name == "gemv b2 trellis rows" and major(target) == 12):
        return 16
    if re.match("gemv b. rows16", name):
        return 32 if major(target) < 10 else 80
    gear = re.match("attend gear. decode .* D5(12|76)", name)
    return {"12": 40, "76": 112}[gear[1]] if gear and major(target) >= 10 else 0


def test_nothing_spills(everything):
    spilled = [row for row in everything[0] if row.spill_bytes > _spilled(row.name, row.target)]
    assert not spilled, spilled


def test_no_sum_is_shorter_than_four_threads_take_at_once(everything):
    """As a card found of codes of 4 bits over 16 positions, and over 16 channels, which were right interpreted."""
    wrong = [row for row in everything[0] if row.short_sums]
    assert not wrong, wrong


def test_registers_fit_a_thread_and_programs_fit_a_multiprocessor(everything):
    greedy = [row for row in everything[0] if row.registers > 255 or row.registers * row.threads > 65536]
    assert not greedy, greedy


def test_shared_memory_fits_the_device(everything):
    large = [
        row
        for row in everything[0]
        if row.shared_bytes > (WITHOUT_OPT_IN if _fetches(row) else SHARED_LIMIT[row.target] << 10)
    ]
    assert not large, large


def _of_a_token(row: Compiled) -> bool:
    """Whether it is a product with a matrix for one token or a few, or with those of its experts."""
    own = row.operation == "gemv" or _in_one(row)
    return own or (row.operation == "experts" and row.name.endswith(("gate_up", "down")))


def _in_one(row: Compiled) -> bool:
    """Whether it multiplies and compensates."""
    return row.name.startswith("compensated ")


def _fetches(row: Compiled) -> bool:
    """Whether it fetches residuals for rows that choose channels."""
    return row.operation == "compensate" and "union" not in row.name and not _in_one(row)


def test_weights_are_on_their_way_while_products_are_made(everything):
    """Read from the machine code: a product with a matrix of one token asks for the next block long before it waits.

    Blocks of a trellis take three times as long, and those of 2 bits come in two loads, the first after half of it.
    """
    products = [row for row in everything[0] if _of_a_token(row) and "codebook" not in row.name]
    late = [row for row in products if row.in_flight < (0.3 if "rows" in row.name or "trellis" in row.name else 0.5)]
    assert products
    assert not late, late


def test_a_multiprocessor_holds_the_programs_that_a_product_is_divided_for(everything):
    """Programs beyond that begin in a second wave (`gemv.configure`)."""
    held = [row for row in everything[0] if _of_a_token(row)]
    assert held
    for row in held:
        constants = specializations()[row.name].constants
        assert row.programs >= resident(constants["tile"].BLOCK_M, constants["form"], major(row.target)), row


def test_a_product_takes_its_tensor_work_once(everything):
    """64 tensor core instructions for 16,384 weights, and twice as many for 9 to 16 rows: none to take offsets off."""
    tokens = [row for row in everything[0] if _of_a_token(row)]
    work = {(row.name.endswith("rows16"), row.loop_tensor * 16384 // row.weights) for row in tokens}
    assert work == {(False, 64), (True, 128)}


def test_decoded_tokens_have_blocks_of_the_cache_on_their_way(everything):
    """Copies of a block are requested a whole block before the code waits for them."""
    late = [
        row
        for row in everything[0]
        if row.operation == "attention" and " decode " in row.name and "gear" not in row.name and row.in_flight < 0.9
    ]
    assert not late, late


def test_compensation_has_residuals_on_their_way(everything):
    """Four tiles of 16 rows of 128 bytes for each program, in one launch as in two: a link needs 24 to 48 KB."""
    fetches = [row for row in everything[0] if _fetches(row)]
    assert len(fetches) >= 7
    assert not [row for row in fetches if not row.asynchronous or row.in_flight < 3]


KERNELS = """
from typing import Any, NamedTuple
import triton
import triton.language as tl
from tests.lab.ahead import compile_ahead
from tests.runtime.backends.triton.ahead.specialization import Specialization

class Pair(NamedTuple):
    x: Any
    y: Any
    absent: Any = None

@triton.jit
def one_by_one(x_ptr, y_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    tl.store(y_ptr + offs, x)

@triton.jit
def together(pair, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(pair.x + offs)
    if pair.absent is not None:
        x += 1
    tl.store(pair.y + offs, x)

flat = {"x_ptr": "*i32", "y_ptr": "*i32"}
nested = {"pair": Pair("*i32", "*i32", "constexpr")}
for kernel, types in ((one_by_one, flat), (together, nested)):
    copy = Specialization(name="copy", kernel=kernel, types=types, constants={"BLOCK": 512})
    found = compile_ahead(copy, "sm_80")
    print(found.registers, found.instructions)

@triton.jit
def product(x_ptr, codes_ptr, y_ptr, SUM: tl.constexpr):
    rows, sums, pairs, columns = tl.arange(0, 16), tl.arange(0, SUM), tl.arange(0, 16), tl.arange(0, 32)
    x = tl.load(x_ptr + rows[:, None] * SUM + sums[None, :])
    codes = tl.load(codes_ptr + sums[:, None] * 16 + pairs[None, :])
    weights = tl.interleave((codes & 15).to(tl.float16), (codes >> 4).to(tl.float16))
    tl.store(y_ptr + rows[:, None] * 32 + columns[None, :], tl.dot(x, weights))

for SUM in (16, 32):
    types = {"x_ptr": "*fp16", "codes_ptr": "*u8", "y_ptr": "*fp32"}
    one = Specialization(name="product", kernel=product, types=types, constants={"SUM": SUM})
    print(compile_ahead(one, "sm_89").short_sums)
"""
"""512 numbers of 128 threads: copied 16 bytes at a time, where pointers are known to be aligned. Then codes of 4 bits,
multiplied over 16 and over 32."""


def test_tuples_of_arguments_compile_to_what_they_do_one_by_one_and_short_sums_are_seen(tmp_path):
    (tmp_path / "kernels.py").write_text(KERNELS, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(CACHE), "PYTHONPATH": str(ROOT)}
    one_by_one, together, *short = subprocess.run(
        [sys.executable, "kernels.py"], env=environment, cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert one_by_one == together
    assert short == ["1", "0"]


def test_parameter_lists_are_short():
    """Eight at most; kernels that many tensors meet in, twelve."""
    room = ROOT / "runtime" / "backends" / "triton"
    lists = {
        (path.name, node.name): len(node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        - any(argument.arg == "self" for argument in node.args.args[:1])
        for path in room.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
    }
    long = {name: count for name, count in lists.items() if count > (12 if name[1].endswith("_kernel") else 8)}
    assert len(lists) > 100
    assert not long


def test_a_child_that_dies_is_reported(monkeypatch):
    monkeypatch.setattr(ahead.sys, "executable", shutil.which("false"))
    with pytest.raises(BackendError, match="ended with 1"):
        compile_all((), workers=1)


def test_a_child_does_not_outlive_its_parent(tmp_path):
    share = tmp_path / "share.json"
    share.write_text(json.dumps(ahead.pairs()), encoding="utf-8")
    words = [sys.executable, "-m", ahead.__name__, str(share)]
    quiet = "stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL"  # it would hold the parent's pipes open
    start = f"import os, subprocess; print(subprocess.Popen([*{words!r}, str(os.getpid())], {quiet}).pid)"
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": ""}
    parent = subprocess.run([sys.executable, "-c", start], env=environment, capture_output=True, text=True, check=True)
    # The parent is gone by now, and all kernels for all devices take minutes.
    children = [psutil.Process(pid) for pid in [int(parent.stdout)] if psutil.pid_exists(pid)]
    _, alive = psutil.wait_procs(children, timeout=60)
    for child in alive:
        child.kill()
    assert not alive
    assert json.loads(share.read_text(encoding="utf-8")) == [list(pair) for pair in ahead.pairs()]


def test_what_does_not_compile_is_named(monkeypatch, tmp_path, planted):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    name = next(iter(specializations()))
    compiled, failed = compile_all([(name, "sm_x")], 1)
    assert not compiled
    assert len(failed) == 1
    assert failed[0].startswith(f"{name} does not compile for sm_x: ")
    assert planted() == [], "the child process took a module from the current folder"


def test_only_code_counts_as_instructions():
    section = 64
    header = bytearray(64)
    header[0x28:0x30] = (64).to_bytes(8, "little")
    header[0x3A:0x3C], header[0x3C:0x3E] = section.to_bytes(2, "little"), (2).to_bytes(2, "little")
    data, code = bytearray(section), bytearray(section)
    data[32:40], code[32:40] = (999).to_bytes(8, "little"), (160).to_bytes(8, "little")
    data[8:16], code[8:16] = (2).to_bytes(8, "little"), (6).to_bytes(8, "little")
    assert code_bytes(bytes(header + data + code)) == 160
