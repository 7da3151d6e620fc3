"""Machine code of the CPU backend's product of one row, for processors that are not at hand.

    python -m tests.lab.cpu_code

The unit is compiled ahead for each processor, and the instructions of its innermost loop are counted: a block of 32
inputs of 16 outputs, 512 weights.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from runtime.backends.cpu.machine.loader import processor
from tests.lab.store import ROOT, about_run, parser, write
from tests.lab.store import table as markdown_table

WEIGHTS = 512
LINUX_ARM = "aarch64-unknown-linux-gnu"
TARGETS = {
    "avx2": ("x86_64-unknown-linux-gnu", "haswell", ""),
    "avxvnni": ("x86_64-unknown-linux-gnu", "alderlake", ""),
    "avx512": ("x86_64-unknown-linux-gnu", "icelake-server", ""),
    "neon, Neoverse N1": (LINUX_ARM, "neoverse-n1", ""),
    "neon, Cortex-A76": (LINUX_ARM, "cortex-a76", ""),
    "neon, Apple M1": ("arm64-apple-macosx", "apple-m1", ""),
    "neon-i8mm, Snapdragon X": (LINUX_ARM, processor("oryon-1"), "+i8mm"),
}
"""Triple, processor and features of LLVM by the variant and who has it."""
UNITS = {
    "4 bits": "multiply_uniform_4",
    "3 bits": "multiply_uniform_3",
    "4 bits, codebook": "multiply_codebook_4",
    "3 bits, trellis": "multiply_trellis_3",
    "4 bits, trellis": "multiply_trellis_4",
}
_COMPILE = """
import json, platform, sys
import numba, numpy
import llvmlite.binding as llvm
variant, triple, cpu, features, names = json.loads(sys.argv[1])
machine_name = "x86_64" if triple.startswith("x86") else "aarch64"
platform.machine = lambda: machine_name
from runtime.backends.cpu.machine import isa
isa.VARIANT, isa.VECTORS = variant, variant.removesuffix("-i8mm")
isa.VBMI = variant == "avx512"  # as Ice Lake has it
from runtime.backends.cpu.machine import kernel as compiler
from runtime.backends.cpu.units import products
llvm.initialize_all_targets()
llvm.initialize_all_asmprinters()
made = llvm.Target.from_triple(triple).create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic")
compiler.target_machine = lambda: made
optimize = compiler._optimize
def retargeted(module, machine):
    module.triple, module.data_layout = triple, str(machine.target_data)
    optimize(module, machine)
compiler._optimize = retargeted
llvm.TargetMachine.emit_object = lambda machine, module: machine.emit_assembly(module).encode()
print(json.dumps({name: compiler.machine_code(getattr(products, name).function, name).decode() for name in names}))
"""


def assembly(variant: str, triple: str, cpu: str, features: str = "") -> dict[str, str]:
    """Assembly of `UNITS` by their names."""
    asked = json.dumps([variant, triple, cpu, features, list(UNITS.values())])
    settings = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "NUMBA_OPT": "0"}
    done = subprocess.run(
        [sys.executable, "-c", _COMPILE, asked],
        cwd=ROOT,
        env={**os.environ, **settings, "LOWBIT_CHAT_CPU_VARIANT": "generic"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout))


_LABEL = re.compile(r"(\.?L[\w.$]*):")
_PRODUCT = re.compile(r"(?:{vex}\s*)?v?(pmaddubsw|pdpbusd|us?dot|sdot)")


def innermost(code: str) -> list[str]:
    """The instructions of the loop of one row: of those that hold no other loop, the one with the fewest products."""
    lines = [line.split("//")[0].split(";")[0].split("##")[0].split(" #")[0].rstrip() for line in code.splitlines()]
    lines = [line for line in lines if line.strip() and not re.match(r"\s+\.", line)]
    places = {match[1]: i for i, line in enumerate(lines) if (match := _LABEL.match(line.strip()))}
    loops = []
    for i, line in enumerate(lines):
        words = re.split(r"[\s,]+", line.strip())
        target = places.get(words[-1])
        if re.match(r"(j|b|cb|tb)", words[0]) and target is not None and target < i:
            loops.append((target, i))
    inner = [loop for loop in loops if not any(loop[0] <= a and b <= loop[1] for a, b in loops if (a, b) != loop)]
    bodies = [[line.strip() for line in lines[a : b + 1] if not _LABEL.match(line.strip())] for a, b in inner]
    products = {i: sum(bool(_PRODUCT.match(line)) for line in body) for i, body in enumerate(bodies)}
    return bodies[min((number, i) for i, number in products.items() if number)[1]]


def count() -> list[dict[str, Any]]:
    """Rows of instructions per weight."""
    rows = []
    for name, (triple, cpu, features) in TARGETS.items():
        code = assembly(name.partition(",")[0], triple, cpu, features)
        loops = {words: innermost(code[unit]) for words, unit in UNITS.items()}
        rows.append({"name": name, **{words: len(body) for words, body in loops.items()}})
    return rows


def table(found: Mapping[str, Any]) -> str:
    """Instructions per weight by processor."""
    rows = [(row["name"], *(f"{row[words] / WEIGHTS:.3f}" for words in UNITS)) for row in found["rows"]]
    return markdown_table(("instructions per weight", *UNITS), rows)


def main() -> None:
    """Count, print and store."""
    given = parser(__doc__, "cpu-code").parse_args()
    found = {**about_run("python -m tests.lab.cpu_code", ("runtime/backends/cpu",)), "rows": count()}
    print(table(found))
    write(given.out, found)


if __name__ == "__main__":
    main()
