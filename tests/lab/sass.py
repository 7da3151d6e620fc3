"""Machine code of a compiled kernel (SASS): its main loop, and how many rounds ahead that loop loads.

An intermediate representation shows only what was meant: the last compiler decides whether a copy is in flight while
something else is computed. So this reads the code that runs, by Triton's own cuobjdump.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^\s+/\*([0-9a-f]{4,6})\*/\s+(.*?);", re.MULTILINE)
_BRANCH = re.compile(r"\bBRA(?:\.\S+)?\s+(?:\S+,\s*)?(0x[0-9a-f]+)")
_PREDICATE = re.compile(r"^@!?U?P\S+\s+")
_REGISTER = re.compile(r"\bR(\d+)\b")
_WAIT = re.compile(r"DEPBAR\.LE SB0, (0x[0-9a-f]+)")
_TENSOR = ("HMMA", "HGMMA", "IMMA", "IGMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA")
_ROUNDS = 12
"""Rounds of a loop that are followed to find the end of a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The innermost loop of a kernel that does most of its work."""

    instructions: int
    """Machine instructions of one round."""
    tensor: int
    """Tensor core instructions among them."""
    copies: int
    """Loads from memory that stream through the loop: asynchronous copies to shared memory (LDGSTS), else the widest
    loads to registers (LDG)."""
    asynchronous: bool
    """Whether they are copies to shared memory."""
    ahead: float
    """Rounds of the loop that such a load is on its way, on average, from its request to where the code waits for it or
    reads its first register; 0 where there are none. Near 0, nothing is in flight while the loop works."""


def disassemble(cubin: bytes) -> tuple[tuple[int, str], ...]:
    """Address and text of each instruction of a compiled module."""
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "-sass", str(file)], capture_output=True, text=True, check=True
        )
    return tuple((int(address, 16), text.strip()) for address, text in _LINE.findall(said.stdout))


def main_loop(code: Sequence[tuple[int, str]]) -> Loop | None:
    """The loop with most tensor core instructions, of those without any other inside.

    Without any, that with most copies to shared memory, which a program makes of what it streams; or else the longest.

    Args:
        code: As `disassemble` returns it.

    Returns:
        The loop; None where there is none.
    """
    bodies = [[text for address, text in code if first <= address <= last] for first, last in _innermost(code)]
    if not bodies:
        return None
    body = max(bodies, key=lambda texts: (_tensor(texts), _names(texts)["LDGSTS"], len(texts)))
    asynchronous = any(_operation(text).startswith("LDGSTS") for text in body)
    distances = list(_copies_ahead(body) if asynchronous else _loads_ahead(body))
    return Loop(
        instructions=len(body),
        tensor=_tensor(body),
        copies=len(distances),
        asynchronous=asynchronous,
        ahead=sum(distances) / len(distances) / len(body) if distances else 0.0,
    )


def _operation(text: str) -> str:
    """Name of an instruction, with its modifiers."""
    return _PREDICATE.sub("", text).split()[0]


def _tensor(body: Sequence[str]) -> int:
    """Tensor core instructions."""
    return sum(count for name, count in _names(body).items() if name in _TENSOR)


def _names(body: Sequence[str]) -> Counter[str]:
    return Counter(_operation(text).split(".")[0] for text in body)


def _innermost(code: Sequence[tuple[int, str]]) -> list[tuple[int, int]]:
    """First and last address of each loop that holds no other: what lies between a branch back and its target."""
    loops = []
    for address, text in code:
        found = _BRANCH.search(text)
        if found and int(found[1], 16) < address:
            loops.append((int(found[1], 16), address))
    return [
        (first, last)
        for first, last in loops
        if not any(first <= other <= end <= last and (other, end) != (first, last) for other, end in loops)
    ]


def _copies_ahead(body: Sequence[str]) -> Iterator[int]:
    """Instructions between each asynchronous copy and the wait that ends it.

    Copies are closed to groups in order (LDGDEPBAR); a wait leaves so many of the last groups on their way.
    """
    waiting: list[tuple[int, int]] = []  # place, and number of the group
    group = 0
    for place in range(_ROUNDS * len(body)):
        text = body[place % len(body)]
        name = _operation(text)
        if name.startswith("LDGSTS") and place < len(body):
            waiting.append((place, group))
        elif name.startswith("LDGDEPBAR"):
            group += 1
        elif found := _WAIT.search(text):
            done = [one for one in waiting if one[1] < group - int(found[1], 16)]
            waiting = [one for one in waiting if one not in done]
            yield from (place - start for start, _ in done)


def _loads_ahead(body: Sequence[str]) -> Iterator[int]:
    """Instructions between each of the widest loads and the first that names one of the registers it fills."""
    loads = [(place, _width(text)) for place, text in enumerate(body) if _operation(text).startswith("LDG.")]
    widest = max((width for _, width in loads), default=0)
    for start, width in loads:
        target = _REGISTER.search(body[start].split(",")[0])
        if width < widest or target is None:
            continue
        filled = {int(target[1]) + step for step in range(width // 4)}
        for distance in range(1, len(body) + 1):
            text = body[(start + distance) % len(body)]
            if filled & {int(register) for register in _REGISTER.findall(text)}:
                yield distance
                break


def _width(text: str) -> int:
    """Bytes that a load brings to a thread."""
    found = re.search(r"\.(64|128)\b", _operation(text))
    return int(found[1]) // 8 if found else 4
