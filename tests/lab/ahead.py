"""Compilation of Triton kernels ahead of time, for devices that are not here.

No device and no driver is needed: Triton brings ptxas and cuobjdump along. Kernels that were decorated while
`TRITON_INTERPRET` was set belong to the interpreter and can't be compiled; compile in a process without it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runtime.errors import BackendError
from runtime.system.lifetimes import ParentWatch
from tests.lab.sass import disassemble, main_loop
from tests.runtime.backends.triton.ahead.specialization import Specialization, Types
from tests.runtime.backends.triton.ahead.specializations import specializations

_ROOT = Path(__file__).resolve().parents[2]
TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""Compute capabilities of the devices this program is for: A100, RTX 30, RTX 40, H100, B200, B300, RTX 50, GB10."""
SHARED_LIMIT = {
    "sm_80": 163,
    "sm_86": 99,
    "sm_89": 99,
    "sm_90": 227,
    "sm_100": 227,
    "sm_103": 227,
    "sm_120": 99,
    "sm_121": 99,
}
"""KiB of shared memory that a program may have at most."""
MULTIPROCESSOR = {
    "sm_80": (164, 64, 32),
    "sm_86": (100, 48, 16),
    "sm_89": (100, 48, 24),
    "sm_90": (228, 64, 32),
    "sm_100": (228, 64, 32),
    "sm_103": (228, 64, 32),
    "sm_120": (100, 48, 24),
    "sm_121": (100, 48, 24),
}
"""KiB of shared memory of a multiprocessor, warps and programs that it holds; 65,536 registers everywhere."""
INSTRUCTION_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Compiled:
    """What a compiler made of one specialization for one device."""

    operation: str
    """See `Specialization`."""
    name: str
    """The specialization."""
    target: str
    """Compute capability, `sm_86`."""
    registers: int
    """32-bit registers of a thread."""
    spill_bytes: int
    """Local memory of a thread: registers that did not fit. Kernels here keep no arrays of their own there."""
    shared_bytes: int
    """Shared memory of a program, without the 1 KiB that devices from sm_90 on keep for themselves."""
    instructions: int
    """Machine instructions of 16 bytes, with the padding at the end."""
    threads: int
    """Threads of a program."""
    loop_instructions: int = 0
    """Machine instructions of a round of the main loop (`tests.lab.sass.Loop`); 0 where there is none."""
    loop_tensor: int = 0
    """Tensor core instructions among them."""
    copies: int = 0
    """Loads that stream through it."""
    asynchronous: bool = False
    """Whether they are copies to shared memory."""
    in_flight: float = 0.0
    """Rounds of the loop that such a load is on its way."""
    weights: int = 0
    """See `Specialization`."""
    short_sums: int = 0
    """Tensor core products whose sum is shorter than four threads take at once: wrong numbers (`short_sums`)."""

    @property
    def programs(self) -> int:
        """Programs that a multiprocessor holds at the same time: what is left by registers, shared memory and warps.

        Each of its four parts has a quarter of the registers, and takes whole warps.
        """
        shared_kib, warps, most = MULTIPROCESSOR[self.target]
        each = self.threads // 32
        by_registers = 4 * (16384 // (-(-self.registers // 8) * 8 * 32)) // each
        by_shared = (shared_kib << 10) // (self.shared_bytes + 1024)
        return min(by_registers, by_shared, warps // each, most)


def compile_ahead(specialization: Specialization, target: str) -> Compiled:
    """Compile one specialization for one device, which need not be here.

    Args:
        specialization: What to compile. Its pointers are taken to be aligned to 16 bytes, as torch's allocations are.
        target: `sm_80` and so on.

    Raises:
        BackendError: the kernel belongs to the interpreter, its signature is not the kernel's, or it does not compile.
    """
    from triton import compile as build
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.errors import TritonError

    signature = _ordered(specialization)
    places = dict(_leaves(tuple(signature.values())))
    aligned = {place: [["tt.divisibility", 16]] for place, kind in places.items() if kind.startswith("*")}
    constants: dict[Any, Any] = dict(specialization.constants)
    constants |= {place: None for place, kind in places.items() if kind == "constexpr" and len(place) > 1}
    options = {
        "num_warps": specialization.num_warps,
        "num_stages": specialization.num_stages,
        "launch_cooperative_grid": specialization.cooperative,
        **specialization.options,
    }
    try:
        built = build(
            ASTSource(specialization.kernel, signature, constants, aligned),
            GPUTarget("cuda", int(target.removeprefix("sm_")), 32),
            options | specialization.options_of(major(target)),
        )
    except (TritonError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise BackendError(f"{specialization.name} does not compile for {target}: {error}") from error
    usage = _resources(built.asm["cubin"])
    loop = main_loop(disassemble(built.asm["cubin"]))
    return Compiled(
        operation=specialization.operation,
        name=specialization.name,
        target=target,
        registers=usage["REG"],
        spill_bytes=usage["STACK"] + usage["LOCAL"],
        shared_bytes=built.metadata.shared,
        instructions=code_bytes(built.asm["cubin"]) // INSTRUCTION_BYTES,
        threads=32 * specialization.num_warps,
        loop_instructions=loop.instructions if loop else 0,
        loop_tensor=loop.tensor if loop else 0,
        copies=loop.copies if loop else 0,
        asynchronous=loop is not None and loop.asynchronous,
        in_flight=round(loop.ahead, 2) if loop else 0.0,
        weights=specialization.weights,
        short_sums=short_sums(built.asm["ttgir"]),
    )


def short_sums(ttgir: str) -> int:
    """Products of a kernel that a card gets wrong: four threads take `kWidth` neighbours each along a sum, all of them
    at once, but the sum is shorter than that. The interpreter knows no threads."""
    products = re.findall(
        r"tensor<\d+x(\d+)x\w+, #ttg\.dot_op<\{opIdx = 0, parent = #\w+, kWidth = (\d+)\}>> \* ", ttgir
    )
    return sum(int(sum_of) < 4 * int(width) for sum_of, width in products)


def pairs(names: Sequence[str] = (), targets: Sequence[str] = TARGETS) -> tuple[tuple[str, str], ...]:
    """Specializations, all of them where none are named, each with its targets: what `compile_all` takes."""
    known = {name: one for name, one in specializations().items() if not names or name in names}
    return tuple(
        (name, target) for name, one in known.items() for target in targets if one.only in (None, major(target))
    )


def major(target: str) -> int:
    """The major compute capability of a target: 9 for `sm_90`."""
    return int(target.removeprefix("sm_")) // 10


def compile_all(
    wanted: Sequence[tuple[str, str]] | None = None, workers: int = 2
) -> tuple[tuple[Compiled, ...], tuple[str, ...]]:
    """Compile specializations in child processes that don't interpret, whatever this process does.

    The child processes end when this one does, however that happens.

    Args:
        wanted: Names of specializations and targets (see `pairs`); all of them when None.
        workers: Child processes at the same time.

    Returns:
        What was compiled, by operation, name and target; and a message for each that does not compile.

    Raises:
        BackendError: a child process ended before its work did.
    """
    wanted = pairs() if wanted is None else wanted
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(_ROOT)
    with tempfile.TemporaryDirectory() as folder:
        shares = [Path(folder) / f"{worker}.json" for worker in range(workers)]
        children = []
        try:
            for worker, share in enumerate(shares):
                share.write_text(json.dumps(wanted[worker::workers]), encoding="utf-8")
                command = [sys.executable, "-P", "-m", __spec__.name, str(share), str(os.getpid())]
                children.append(
                    subprocess.Popen(
                        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                    )
                )
            said = [child.communicate()[0] for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        for child, words in zip(children, said, strict=True):
            if child.returncode:
                raise BackendError(f"compiling ahead of time ended with {child.returncode}: {words[-2000:]}")
        answers = [json.loads(share.read_text(encoding="utf-8")) for share in shares]
    compiled = [Compiled(**row) for answer in answers for row in answer["compiled"]]
    places = {pair: place for place, pair in enumerate(wanted)}
    compiled.sort(key=lambda row: (row.operation, row.name, places[row.name, row.target]))
    return tuple(compiled), tuple(message for answer in answers for message in answer["failed"])


def code_bytes(cubin: bytes) -> int:
    """Bytes of machine code in a compiled module: the sections of its ELF file that hold instructions."""
    executable = 4
    table, entry, count = (
        int.from_bytes(cubin[0x28:0x30], "little"),
        int.from_bytes(cubin[0x3A:0x3C], "little"),
        int.from_bytes(cubin[0x3C:0x3E], "little"),
    )
    total = 0
    for place in range(table, table + entry * count, entry):
        flags = int.from_bytes(cubin[place + 8 : place + 16], "little")
        size = int.from_bytes(cubin[place + 32 : place + 40], "little")
        total += size if flags & executable else 0
    return total


def _leaves(types: tuple[Any, ...], place: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """Every type in nested tuples, with its place in each of them from the outermost on."""
    for number, kind in enumerate(types):
        if isinstance(kind, str):
            yield (*place, number), kind
        else:
            yield from _leaves(kind, (*place, number))


def _ordered(specialization: Specialization) -> dict[str, Types]:
    """The types of all arguments in the kernel's own order, `constexpr` those of constants."""
    name, kernel = specialization.name, specialization.kernel
    arguments = getattr(kernel, "arg_names", None)
    if arguments is None or not hasattr(kernel, "cache_key"):
        raise BackendError(f"{name} was decorated for the interpreter; compile where TRITON_INTERPRET is not set")
    signature = {**specialization.types, **dict.fromkeys(specialization.constants, "constexpr")}
    if set(arguments) != set(signature):
        odd = ", ".join(sorted(set(arguments) ^ set(signature)))
        raise BackendError(f"{name}: the kernel and its described signature differ in {odd}")
    return {argument: signature[argument] for argument in arguments}


def _resources(cubin: bytes) -> dict[str, int]:
    """What cuobjdump says a module's kernel takes: REG, STACK, SHARED, LOCAL."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)], capture_output=True, text=True, check=True
        )
    usage = {word: int(number) for word, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", said.stdout)}
    if "REG" not in usage:
        raise BackendError(f"cuobjdump says nothing about registers: {said.stdout.strip()[-500:]}")
    return usage


def _main(share: Path, parent: int) -> None:
    """A child process of `compile_all`: compiles its share of the work, which the file names, and puts JSON there.

    Args:
        share: The file.
        parent: Number of the process that waits for it; without that one it ends at once, in the middle of its work.
    """
    work = json.loads(share.read_text(encoding="utf-8"))
    compiled, failed = [], []
    with ParentWatch(parent).watching(lambda: os._exit(1)):
        named = specializations()
        for name, target in work:
            try:
                compiled.append(asdict(compile_ahead(named[name], target)))
            except BackendError as error:
                failed.append(str(error))
    share.write_text(json.dumps({"compiled": compiled, "failed": failed}), encoding="utf-8")


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
