"""The page docs/kernels.md: the Triton kernels, compiled ahead of time. Needs no GPU.

python -m tests.bench.kernels                or: python -m tests.bench.kernels --out FILE.md
"""

from __future__ import annotations

import argparse
import datetime as dt
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.bench.kernels import token_time
from tests.bench.kernels.ahead import TARGETS, Compiled, compile_all, pairs
from tests.bench.reporting.origin import line, stamp
from tests.runtime.backends.triton.shapes import MODELS
from tests.runtime.backends.triton.variants import counted_apart

PAGE = Path(__file__).resolve().parents[3] / "docs" / "kernels.md"

INTRODUCTION = """# Kernels of the GPU backend, compiled

The compiled form of every Triton kernel (`runtime/backends/triton/kernels/<op>.py`), in the specializations that
real models launch, for the devices this program supports: sm_80 (A100), sm_86 (RTX 30), sm_89 (RTX 40), sm_90 (H100),
sm_100 (B200), sm_103 (B300), sm_120 (RTX 50), sm_121 (GB10). No GPU is needed. `make test-all` compiles each for one of
these devices, and fails where a kernel spills or exceeds that device's registers or shared memory. All of them are
compiled for all devices by

    make kernels                                 or: python -m tests.bench.kernels

which writes this page, with Triton {triton}; its own ptxas {ptxas} generated the machine code, from sm_100 on
{blackwell}.

{origin}

- **specialization**: a kernel with its constants, as a model launches it; **threads** per program.
- **registers**: 32-bit registers of a thread. A multiprocessor has 65,536, so a program of 128 threads with 128
  registers each leaves room for three more, one of 128 threads with 255 each for only one more.
- **shared**: bytes of shared memory per program.
- **spills**: bytes of a thread's registers spilled to local memory. Anything but zero is a defect, except 8
  bytes where they buy two programs more (`gemv.REGISTERS`), and 40 of GEAR's attention over 512 channels from sm_100
  on, where no tile spills less.
- **programs**: concurrent programs per multiprocessor, limited by registers, shared memory and warps.
- **instructions**: machine instructions in the kernel's code, including unrolled loops and padding. The number shows
  growth of a kernel, not its speed.
- **loop**: instructions per iteration of the innermost loop that does most of the work, and those of the
  tensor cores among them.
- **in flight**: read from the machine code (`tests/bench/kernels/sass.py`): for how many iterations of that loop
  a streaming load is in flight, from its request to where the code waits for it. *async* are copies to shared memory,
  *regs* the widest loads to registers; the number is that of one iteration. Near 0, nothing is in flight while the loop
  works, and only other programs of the multiprocessor hide the latency.
"""
LOADS = """
## Kernels of a load, and launches of a token

Specializations that Triton's own lookup distinguishes in the first steps of a load (one to three seconds each the
first time on a machine), and launches of Triton kernels in a decoded token. torch adds two launches: the head's
compensation, and the sum that detects NaN and infinity. Decoding is compensated; compensated prompts add two kernels.
Of the kernels, four are for steps of several rows: drafts and parallel answers. Experts take ten more, delta rules
five, short convolutions one, windows in some blocks alone three; heads of two widths another one for the heads, for
the merge and for flushed pages, norms behind one, and embeddings of the blocks' own four.

| model | cache | kernels compiled | of them products, attention | launches of a token |
|---|---|--:|--:|--:|
"""
TIMES = """
## A model of a token's time

By `python -m tests.bench.kernels.token_time`.

"""
PRODUCTS = """
## Products with low-bit matrices, by weight

For one warp and one iteration of the loop: machine instructions of its 32 lanes per weight, and tensor core
instructions per 16,384 weights. The product itself takes 64 of these for one row (GEMV) and 512 for 64 rows (GEMM).

| specialization | target | instructions | tensor core instructions | loads in flight | programs |
|---|---|--:|--:|--:|--:|
"""
CHECKS = """
## Races and bad addresses

On a machine with a GPU and the CUDA toolkit, compute-sanitizer checks every memory access of the kernels' tests:

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    make sanitize-gpu

Without its cache, torch allocates every tensor separately; otherwise an address past a tensor's end could be in
another tensor's memory and go unnoticed. `make sanitize-gpu` runs the tests that need a GPU. All tests, with the third
tool:

    compute-sanitizer --tool synccheck --error-exitcode 1 .venv/bin/python -m pytest -q -x tests/runtime/backends/triton

`memcheck` finds reads and writes outside of allocations, `racecheck` unordered access to shared memory, `synccheck`
barriers that not all threads reach. They take ten to a hundred times as long as the tests alone; `-k compensate` and
the like select some. None of them checks the order of writes between thread blocks. Tests of the compensation
kernel's barrier compare its bits with those of two launches, thousands of times.
"""


def page(compiled: Sequence[Compiled], triton: str, ptxas: str, blackwell: str, origin: str) -> str:
    """The page as Markdown: one table for each operation, one row for each specialization and device.

    Args:
        compiled: As `compile_all` returns it.
        triton: Triton's version.
        ptxas: Version of its ptxas.
        blackwell: Version of its ptxas for sm_100 and later.
        origin: The line about the code that was compiled (`tests.bench.reporting.origin`).
    """
    introduction = INTRODUCTION.format(triton=triton, ptxas=ptxas, blackwell=blackwell, origin=origin)
    parts = [introduction, *_loads(), TIMES, *token_time.page(), PRODUCTS]
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
    for (model, kv, _), found in cases.items():
        products = sum(found.variants.get(f"_{name}_kernel", 0) for name in ("gemv", "gemm", "few", "many"))
        attention = found.variants["_attend_kernel"] + found.variants["_merge_kernel"]
        yield f"| {model} | {kv} | {found.total} | {products}, {attention} | {found.launches} |\n"


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
        line([{"date": dt.datetime.now(tz=dt.UTC).date().isoformat(), **stamp(("runtime/backends/triton",))}], 0),
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
