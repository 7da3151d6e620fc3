"""Every Triton kernel in the specializations that real models launch, compiled ahead of time. Needs no GPU.

    python -m tests.lab.kernels                         all, for all devices; minutes
    python -m tests.lab.kernels NAME --targets sm_86    some

Registers are 32-bit ones of a thread; a multiprocessor has 65,536, and `programs` counts how many programs its
registers, shared memory and warps hold. Spilled bytes other than zero are a defect, except 8 where they buy two
programs more (`gemv.REGISTERS`), and 40 of GEAR's attention over 512 channels from sm_100 on, where no tile spills
less. `in_flight` is read from the machine code (sass.py): for how many iterations of the main loop a streaming load is
on its way; near 0, only other programs hide the latency.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tests.lab.ahead import TARGETS, compile_all, pairs
from tests.lab.store import RESULTS, about_run, columns, table, write


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """By operation: how many were compiled, and the extremes."""

    def largest(own: Sequence[Mapping[str, Any]], field: str) -> str:
        return f"{max(row[field] for row in own):,}"

    cells = []
    for operation in dict.fromkeys(row["operation"] for row in rows):
        own = [row for row in rows if row["operation"] == operation]
        most = (largest(own, field) for field in ("registers", "shared_bytes", "spill_bytes", "instructions"))
        cells.append((operation, len(own), *most, min(row["programs"] for row in own)))
    return table(
        ("operation", "compiled", "registers", "shared, bytes", "spilled, bytes", "instructions", "fewest programs"),
        cells,
    )


def main() -> None:
    """Compile, print and store."""
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("names", nargs="*", help="specializations to compile and print; all are stored, some are not")
    given = parser.parse_args()
    compiled, failed = compile_all(pairs(given.names, given.targets.split(",")))
    rows = [{**asdict(row), "programs": row.programs} for row in compiled]
    print(columns(rows) if given.names else summary(rows))
    for message in failed:
        print(message, file=sys.stderr)
    if not given.names and not failed:
        about = about_run("python -m tests.lab.kernels", ("runtime/backends/triton",))
        write(RESULTS / "kernels.json", {**about, "triton": triton.__version__, "rows": rows})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
