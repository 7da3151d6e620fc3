"""Every Triton kernel in the specializations that real models launch, compiled ahead of time. Needs no GPU.

    python -m tests.lab.kernels                         all, for all devices; minutes
    python -m tests.lab.kernels NAME --targets sm_86    some
    python -m tests.lab.kernels --products              products of one token, of which other pages tell more

Registers are 32-bit ones of a thread; a multiprocessor has 65,536, and `programs` counts how many programs its
registers, shared memory and warps hold. Spilled bytes other than zero are a defect, except some of products of several
rows, and 40 of GEAR's attention over 512 channels from sm_100 on, where no tile spills less. `in_flight` is read from
the machine code (sass.py): for how many iterations of the main loop a streaming load is on its way; near 0, only other
programs hide the latency.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from models.recipe import Recipe
from runtime.backends.triton.sizes import BLOCK, weight_bytes
from tests.lab.ahead import TARGETS, compile_all, pairs
from tests.lab.store import RESULTS, about_run, columns, parser, table, write
from tuner.devices import DEVICES
from tuner.simulate import FITTED


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


SHOWN = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
PRODUCTS = ("gemv b3", "gemv b4", "gemv b3 trellis", "gemv b4 trellis")
"""Products of one token: of uniform codes in groups of 128, and of trellises."""
ISSUED = 0.75
"""Share of a multiprocessor's issue slots that products are taken to use."""
SMALL_US = 3.5
"""Microseconds of a kernel that is no product, as on an H200."""
LAPTOPS = ("rtx-4050m", "rtx-4060m", "rtx-4070m")


def per_weight(row: Mapping[str, Any]) -> float:
    """Instructions of a lane for each weight of a product's main loop."""
    return float(32 * row["loop_instructions"] / row["weights"])


def products(rows: Sequence[Mapping[str, Any]]) -> str:
    """Products of one token by device: instructions a weight, KiB in flight of a multiprocessor, programs, spills."""

    def cell(row: Mapping[str, Any]) -> str:
        bits = int(row["name"].split()[1][1:])
        flight = row["programs"] * row["in_flight"] * 64 * BLOCK * bits / 8 / 1024
        return f"{per_weight(row):.1f}, {flight:.0f}, {row['programs']}, {row['spill_bytes']}"

    by = {(row["name"], row["target"]): row for row in rows}
    return table(("product", *SHOWN), [(name, *(cell(by[name, on]) for on in SHOWN)) for name in PRODUCTS])


def on_laptops(rows: Sequence[Mapping[str, Any]]) -> str:
    """Tokens a second of Llama 3 8B on laptops' cards, and the term that takes longest."""
    from tests.lab.launches import launches_of
    from tests.runtime.backends.triton.shapes import LLAMA

    need = {row["name"]: per_weight(row) for row in rows if row["target"] == "sm_89" and row["name"] in PRODUCTS}
    shapes = [LLAMA.linear_shape(name) for name in LLAMA.linear_names()]
    weights, small = sum(N * K for N, K in shapes), launches_of("llama-3-8b-trellis").token - len(shapes)
    found = []
    for card, name in itertools.product(map(DEVICES.__getitem__, LAPTOPS), PRODUCTS):
        trellis, bits = name.endswith("trellis"), int(name.split()[1][1:])
        recipe = Recipe(method="trellis", bits=bits) if trellis else Recipe(method="rtn", bits=bits, group_size=128)
        read = weight_bytes(LLAMA, recipe, compensated=False)
        terms = {
            "memory": read / (1e6 * card.memory_gb_s * FITTED.memory_efficiency),
            "instructions": weights * need[name] / (1e6 * card.sm_count * card.clock_ghz * 128 * ISSUED),
        }
        most, others = max(terms, key=terms.__getitem__), small * SMALL_US / 1e3
        numbers = (read / 1e9, *terms.values(), others, 1e3 / (terms[most] + others))
        found.append((card.name, "trellis" if trellis else "uniform", bits, *(f"{x:.1f}" for x in numbers), most))
    head = ("card", "codes", "bits", "GB", "memory, ms", "instructions, ms", "other kernels, ms", "tokens/s", "limit")
    return table(head, found)


def main() -> None:
    """Compile, print and store."""
    import triton

    options = parser(__doc__)
    options.add_argument("--targets", default=",".join(TARGETS))
    options.add_argument("--products", action="store_true", help="store those that are compared by device")
    options.add_argument("names", nargs="*", help="specializations to compile and print; all are stored, some are not")
    given = options.parse_args()
    if given.products:
        given.names, given.targets = PRODUCTS, ",".join(SHOWN)
    compiled, failed = compile_all(pairs(given.names, given.targets.split(",")))
    rows = [{**asdict(row), "programs": row.programs} for row in compiled]
    print(columns(rows) if given.names else summary(rows))
    for message in failed:
        print(message, file=sys.stderr)
    if (given.products or not given.names) and not failed:
        about = about_run("python -m tests.lab.kernels", ("runtime/backends/triton",))
        name = "products" if given.products else "kernels"
        write(given.out or RESULTS / f"{name}.json", {**about, "triton": triton.__version__, "rows": rows})
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
