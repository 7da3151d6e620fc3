"""What compilers make of the Triton kernels: writes docs/kernels.md. Needs no GPU.

python -m tests.bench.kernels                or: python -m tests.bench.kernels --out FILE.md
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime.backends.triton.ahead import TARGETS, Compiled, compile_all, pairs
from tests.runtime.backends.triton.shapes import MODELS
from tests.runtime.backends.triton.variants import counted_apart

PAGE = Path(__file__).resolve().parents[2] / "docs" / "kernels.md"

INTRODUCTION = """# Kernels of the GPU backend, compiled

Every Triton kernel (`runtime/backends/triton/kernels/<op>.py`), in the specializations that real models launch,
compiled ahead of time for the devices this program is meant for: sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40), sm_90
(H100), sm_120 (RTX 50). No GPU is needed for that. `make test` compiles each of them for one of these devices and
fails where a kernel spills, takes more registers than a thread can have, or more shared memory than a program can have
on that device; all of them for all devices are compiled when this page is written, which says so where one spills.

This page is written by

    make kernels                                 or: python -m tests.bench.kernels

with Triton {triton}, whose own ptxas {ptxas} made the machine code ({blackwell} for sm_120), on {date}.

- **specialization**: a kernel with its constants, as a model launches it; **threads** of one of its programs.
- **registers**: 32-bit registers of a thread. A multiprocessor has 65,536, so a program of 128 threads
  that take 128 each leaves room for three more beside it, one of 128 threads that take 255 each for only one more.
- **shared**: bytes of shared memory of a program.
- **spills**: bytes of a thread's registers that went to local memory. Zero everywhere, or the kernel is wrong.
- **programs**: how many of them a multiprocessor of that device holds at the same time, by registers, shared memory
  and warps.
- **instructions**: machine instructions in the kernel's code, unrolled loops and the padding at the end included. How
  often each runs is not in that number: it tells when a kernel grew, not how fast it is.
- **loop**: instructions of a round of the innermost loop that does most of the work, and tensor core instructions
  among them.
- **in flight**: read from the machine code (`runtime/backends/triton/sass.py`): for how many rounds of that loop a load
  that streams through it is on its way, from its request to where the code waits for it. *async* are copies to shared
  memory, *regs* the widest loads to registers. Near 0, nothing is on its way while the loop works, and only other
  programs of the multiprocessor hide the wait; the number of loads is that of one round.
"""
LOADS = """
## What a load compiles, and a token launches

Specializations that Triton's own lookup keeps apart in the first steps of a load, one to three seconds each where a
machine sees them first; and launches of Triton kernels in a decoded token, to which torch adds two, the head's
compensation and the sum that shows a broken number. Compensated, prompts not; with prompts it is two more kernels.

| model | cache | kernels compiled | of them products, attention | launches of a token |
|---|---|--:|--:|--:|
"""
PRODUCTS = """
## Products with low-bit matrices, by weight

Of one warp, in a round of the loop: machine instructions of its 32 lanes for each weight, and tensor core instructions
for 16,384 weights, of which 64 are the product itself where a warp's tile has the columns of one (GEMV), and 512 for 64
rows (GEMM).

| specialization | target | instructions | tensor core instructions | loads in flight | programs |
|---|---|--:|--:|--:|--:|
"""
CHECKS = """
## Looking for races and bad addresses

On a machine with a GPU and the CUDA toolkit, its checker watches every access that the kernels' tests make:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    make sanitize-gpu

torch's allocator then hands out every tensor by itself; otherwise an address past a tensor's end would lie in another's
memory, and nobody would notice. `make sanitize-gpu` takes the tests that run only on a GPU; all of them, and the third
tool, are

    compute-sanitizer --tool synccheck --error-exitcode 1 .venv/bin/python -m pytest -q -x tests/runtime/backends/triton

`memcheck` finds reads and writes outside of allocations, `racecheck` unordered access to shared memory, `synccheck`
barriers that not all threads reach. It takes ten to a hundred times as long as the tests alone; `-k compensate` and the
like choose among them. None of the three watches the order of writes between
thread blocks: that the barrier of the compensation kernel holds is shown by the tests that compare its bits with those
of two launches, thousands of times.
"""


def page(compiled: Sequence[Compiled], triton: str, ptxas: str, blackwell: str, date: str) -> str:
    """The page as Markdown: one table for each operation, one row for each specialization and device.

    Args:
        compiled: As `compile_all` returns it.
        triton: Triton's version.
        ptxas: Version of its ptxas.
        blackwell: Version of its ptxas for sm_100 and later.
        date: ISO date.
    """
    parts = [INTRODUCTION.format(triton=triton, ptxas=ptxas, blackwell=blackwell, date=date), *_loads(), PRODUCTS]
    parts.extend(
        f"| {row.name} | {row.target} | {32 * row.loop_instructions / row.weights:.2f} "
        f"| {row.loop_tensor * 16384 / row.weights:.0f} | {row.in_flight:.2f} | {row.programs} |\n"
        for row in compiled
        if row.weights
    )
    for operation in dict.fromkeys(row.operation for row in compiled):
        parts.append(f"\n## {operation}\n\n")
        parts.append("| specialization | threads | target | registers | shared | spills | instructions | programs |")
        parts.append(" loop | tensor core | in flight |\n|---|--:|---|--:|--:|--:|--:|--:|--:|--:|---|\n")
        parts.extend(
            f"| {row.name} | {row.threads} | {row.target} | {row.registers} | {row.shared_bytes:,} | {row.spill_bytes} "
            f"| {row.instructions:,} | {row.programs} | {row.loop_instructions:,} | {row.loop_tensor} "
            f"| {_in_flight(row)} |\n"
            for row in compiled
            if row.operation == operation
        )
    return "".join([*parts, CHECKS])


def _loads() -> Iterator[str]:
    """The table of what loads compile."""
    yield LOADS
    cases = counted_apart([(name, kv, 0) for name in MODELS for kv in ("fp16", "int8", "int4", "hierarchical")])
    for (name, kv, _), found in cases.items():
        products = found.variants["_gemv_kernel"] + found.variants["_gemm_kernel"]
        attention = found.variants["_attend_kernel"] + found.variants["_merge_kernel"]
        yield f"| {name} | {kv} | {found.total} | {products}, {attention} | {found.launches} |\n"


def _in_flight(row: Compiled) -> str:
    """What the page says of the loads in a kernel's loop."""
    if not row.copies:
        return "–"
    return f"{row.in_flight:.2f} ({row.copies} {'async' if row.asynchronous else 'regs'})"


def main() -> None:
    """Compile everything and write the page."""
    import triton
    from triton import knobs

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("names", nargs="*", help="specializations to compile and print, without writing the page")
    arguments = parser.parse_args()
    compiled, failed = compile_all(pairs(arguments.names, arguments.targets.split(",")))
    text = page(
        compiled,
        triton.__version__,
        knobs.nvidia.ptxas.version,
        knobs.nvidia.ptxas_blackwell.version,
        dt.datetime.now(tz=dt.UTC).date().isoformat(),
    )
    for message in failed:
        print(message, file=sys.stderr)
    if arguments.names:
        print(text[text.index("## ") :] if compiled else "")
    elif not failed:
        arguments.out.write_text(text, encoding="utf-8")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
