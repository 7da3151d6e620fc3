"""The choice of a GGUF model among a repository's files, by its type of weights, which file names end with.

A large one comes in parts, `Qwen3-32B-Q8_0-00001-of-00002.gguf`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from models.errors import CheckpointError

DEFAULT_TYPES = ("Q8_0", "BF16", "F16", "F32")
"""Types to take unless one is asked for, the best first. 8 bits are half the download of 16, and rounding them again to
4 or 3 bits costs next to nothing; what has fewer bits is only taken on request."""
_TYPE = re.compile(
    r".*?[.-](?P<type>I?Q\d\w*|TQ\d_\d|MXFP4|NVFP4|BF16|F(?:P)?16|F(?:P)?32)(?:-\d{5}-of-\d{5})?\.gguf",
    re.ASCII | re.IGNORECASE,
)
PART = re.compile(r"(?P<model>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.ASCII)
"""Name of a part of a model."""
_MOST_PARTS = 999
_PROJECTOR = "mmproj"
"""What the names of a vision model's image encoders begin with."""


def type_of(file: str) -> str | None:
    """The type of weights that a file's name ends with, as in `Qwen3-4B-Q8_0.gguf`; None if it names none."""
    match = _TYPE.fullmatch(file)
    return None if match is None else match["type"].upper().replace("FP16", "F16").replace("FP32", "F32")


def part_names(file: str) -> tuple[str, ...]:
    """Names of all files of a model, by the name of any."""
    match = PART.fullmatch(file)
    count = 0 if match is None else int(match["count"])
    if match is None or not 1 <= count <= _MOST_PARTS:
        return (file,)
    return tuple(f"{match['model']}-{number:05}-of-{count:05}.gguf" for number in range(1, count + 1))


def choose(name: str, files: Iterable[str], wanted: str | None) -> tuple[str, ...]:
    """The GGUF files of the model to take: one, or all of its parts in order.

    Args:
        name: The repository, for messages.
        files: Names of files.
        wanted: A type of weights; the first of `DEFAULT_TYPES` that there is if None.

    Raises:
        CheckpointError: there is none of that type, or not all of its parts.
    """
    models = {file for file in files if file.endswith(".gguf") and not file.startswith(_PROJECTOR)}
    whole = {parts for parts in map(part_names, models) if models.issuperset(parts)}
    types = {kind: parts for parts in sorted(whole, reverse=True) if (kind := type_of(parts[0])) is not None}
    for kind in DEFAULT_TYPES if wanted is None else (wanted.upper(),):
        if kind in types:
            return types[kind]
    if wanted is None and len(whole) == 1 and not types:
        return whole.pop()
    if not models:
        raise CheckpointError(f"{name} has no GGUF file: leave out ':{wanted}', or choose another repository.")
    if not types:
        raise CheckpointError(
            f"{name} has GGUF files of which parts are missing, or without a type in their names "
            f"({', '.join(sorted(models)[:3])}): choose another repository, or download one and give its path."
        )
    there = ", ".join(sorted(types))
    if wanted is not None:
        raise CheckpointError(f"{name} has no GGUF file of type {wanted} (there are: {there}): name one of them.")
    raise CheckpointError(
        f"{name} has only GGUF files of few bits ({there}), and quantizing one of them loses quality twice: choose a "
        f"repository with Q8_0 or safetensors, or name a type all the same, as in {name}:{min(types)}."
    )
