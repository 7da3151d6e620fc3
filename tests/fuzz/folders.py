"""Readers of checkpoints in folders: safetensors headers, and the files that describe a model."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from models.checkpoint import Checkpoint
from models.errors import ModelError
from models.families import FAMILIES, spec_from_config
from models.rope import frequencies
from tests.fuzz.mutation import Draw, addressed, altered_json, damaged, mostly, written
from tests.fuzz.reader import Reader
from tests.models.conftest import write_checkpoint

MORE = {
    "rope_parameters": None, "attention_bias": False, "sliding_window": 16, "use_sliding_window": False,
    "layer_types": ["full_attention"], "partial_rotary_factor": 1.0, "quantization_config": None,
}  # fmt: skip
"""What only some families' config.json says."""
_FIRST_CONTEXT = {"original_max_position_embeddings": 9}
ROPES: tuple[Any, ...] = (
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4, **_FIRST_CONTEXT},
    {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, **_FIRST_CONTEXT},
    {"type": "yarn", "factor": 4.0},
    {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5},
    {"full_attention": {"rope_type": "default"}},
)
CONFIG, INDEX = "config.json", "model.safetensors.index.json"


def try_checkpoint(checkpoint: Checkpoint) -> None:
    """Read every weight."""
    frequencies(checkpoint.spec.rope, checkpoint.spec.max_context)
    checkpoint.embedding()
    for name in checkpoint.spec.vector_names():
        checkpoint.vector(name)
    for name in checkpoint.spec.linear_names():
        checkpoint.linear(name)


@st.composite
def _weights(draw: Draw, table: dict[str, Any], data: bytes) -> bytes:
    header = draw(altered_json(table, ("F32", "U8", "I64", "F4", "F8_E4M3", [0, 0], [1, 1], len(data))))
    content = struct.pack("<Q", len(header)) + header + data
    return draw(damaged(content, 8 + len(header))) if draw(st.integers(0, 7)) == 0 else content


@contextmanager
def safetensors(folder: Path) -> Iterator[Reader]:
    """A safetensors file beside a sound config.json, opened and read to its last weight."""
    write_checkpoint(folder, layers=1)
    file = folder / "model.safetensors"
    sound = file.read_bytes()
    end = 8 + struct.unpack_from("<Q", sound)[0]

    def read(content: bytes) -> None:
        file.write_bytes(content)
        try_checkpoint(Checkpoint.open(folder))

    inputs = mostly(_weights(json.loads(sound[8:end]), sound[end:]))
    yield Reader(sound=(sound,), inputs=inputs, read=read, errors=(ModelError,))


@contextmanager
def config(folder: Path) -> Iterator[Reader]:
    """The files that describe a checkpoint, each in turn beside others that are sound."""
    write_checkpoint(folder, layers=1, shards=2)
    files = {file.name: file.read_bytes() for file in folder.glob("*.json")}
    described = json.loads(files[CONFIG]) | MORE
    families = [
        {**described, "model_type": name, "architectures": [one.architecture]} for name, one in FAMILIES.items()
    ]

    def read(content: bytes) -> None:
        name, _, own = content.partition(b"\n")
        file = folder / name.decode()
        file.write_bytes(own)
        try:
            if file.name == CONFIG:
                _try_family(own)
            try_checkpoint(Checkpoint.open(folder))
        finally:
            file.write_bytes(files[file.name])

    inputs = mostly(st.sampled_from(families).flatmap(lambda one: altered_json(one | {"rope_scaling": {}}, ROPES)))
    inputs = addressed(
        CONFIG, inputs | st.sampled_from(ROPES).flatmap(lambda one: altered_json(described | {"rope_scaling": one}))
    )
    inputs |= addressed("generation_config.json", altered_json({"bos_token_id": 1, "eos_token_id": [2, 3]}))
    inputs |= addressed(INDEX, altered_json(json.loads(files[INDEX]), ("../x.safetensors", CONFIG, "x\0.safetensors")))
    sound = tuple(f"{name}\n".encode() + files[name] for name in (CONFIG, "generation_config.json", INDEX))
    sound += (f"{CONFIG}\n".encode() + written(described),)
    yield Reader(sound=sound, inputs=inputs, read=read, errors=(ModelError,))


def _try_family(content: bytes) -> None:
    """Read a configuration by itself: the folder's weights belong to one family alone."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        frequencies(spec_from_config(found).rope, 64)
