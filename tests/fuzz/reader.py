"""A reader under test, and hypothesis as its source of inputs."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.strategies import SearchStrategy

READERS = {
    "gguf": "tests.fuzz.gguf_files:models",
    "gguf-tokenizer": "tests.fuzz.gguf_files:tokenizers",
    "safetensors": "tests.fuzz.folders:safetensors",
    "config": "tests.fuzz.folders:config",
    "tokenizer": "tests.fuzz.texts:tokenizer",
    "template": "tests.fuzz.texts:template",
    "schemas": "tests.fuzz.schemas:schemas",
    "history": "tests.fuzz.talk:history",
    "requests": "tests.fuzz.talk:requests",
    "stream": "tests.fuzz.talk:stream",
    "tools": "tests.fuzz.talk:tools",
    "documents": "tests.fuzz.documents:documents",
}
"""Where each reader is found; importing one brings in the room that it reads for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """What reads, and what it is given."""

    sound: tuple[bytes, ...]
    """Inputs that are read without any error."""
    inputs: SearchStrategy[bytes]
    """Inputs that may be read or refused."""
    read: Callable[[bytes], object]
    """Reads one, as the program does."""
    errors: tuple[type[Exception], ...]
    """What a refusal raises; anything else is a defect."""


Opener = Callable[[Path], AbstractContextManager[Reader]]
"""Makes a reader that may write into a folder."""


def opener(name: str) -> Opener:
    """A reader by its name in READERS, or by `module:function`."""
    module, _, function = READERS.get(name, name).partition(":")
    found: Opener = getattr(importlib.import_module(module), function)
    return found


def attempt(reader: Reader, content: bytes) -> None:
    """Read an input that may be refused.

    Raises:
        Exception: whatever is no refusal; panics of libraries written in Rust too, which hypothesis would not catch.
    """
    try:
        with warnings.catch_warnings(action="error"):
            reader.read(content)
    except reader.errors:
        return
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise AssertionError(f"{type(error).__module__}.{type(error).__name__}: {error}") from error


def fuzz(reader: Reader, *, start: int, count: int) -> None:
    """Try inputs; the same ones for the same start.

    Args:
        reader: What reads them.
        start: Seed of hypothesis.
        count: Inputs at most.

    Raises:
        Exception: what the smallest input raised that is no refusal.
    """

    @seed(start)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @given(reader.inputs)
    def each(content: bytes) -> None:
        attempt(reader, content)

    each()
