"""Readers of GGUF files. A file is described by what JSON can hold, so that descriptions can be altered like JSON."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import strategies as st

from models.checkpoint import Checkpoint
from models.errors import ModelError
from runtime.errors import RuntimeFailure
from runtime.text.tokenizer import Tokenizer
from tests.fuzz.folders import try_checkpoint
from tests.fuzz.mutation import Draw, altered, damaged, mostly
from tests.fuzz.reader import Reader
from tests.fuzz.texts import try_tokenizer

ALIGNMENT = 32
MOST_DATA = 1 << 20
CHARSMAP = [0, 4, 0, 0, *[0] * 1024, *b"a\0"]
"""Replaces nothing: the length of a trie, the trie, and a text."""
TYPES = ("Q4_0", "Q6_K", "IQ2_XXS", "IQ4_XS", "MXFP4", "TQ1_0", "I8", "F64")
VALUES = (*TYPES, "mistral", "linear", "yarn", "llama", "t5", "gpt2")


def vocabulary(kind: str) -> dict[str, Any]:
    """Metadata of a tokenizer of 40 tokens."""
    space = "Ġ" if kind == "gpt2" else "▁"
    tokens = ["<unk>", "<s>", "</s>", space, *"abcdefghijklmnopqrstuvwxyz", "th", f"{space}t", f"{space}th"]
    tokens += ["<0x0A>", "<0x41>"] if kind == "llama" else ["Ċ", "!"]
    tokens += [f"<{index}>" for index in range(len(tokens), 40)]
    values: dict[str, Any] = {
        "model": kind, "pre": "llama-bpe" if kind == "gpt2" else "default", "tokens": tokens,
        "token_type": [2, 3, 3, *[1] * 37], "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0,
        "add_bos_token": True,
    }  # fmt: skip
    if kind == "gpt2":
        values["merges"] = ["t h", "Ġ t", "Ġt h", "Ġ th"]
    else:
        values["scores"] = [-float(index) for index in range(40)]
    if kind == "t5":
        values |= {"add_space_prefix": True, "remove_extra_whitespaces": True, "precompiled_charsmap": CHARSMAP}
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return {**{f"tokenizer.ggml.{key}": value for key, value in values.items()}, "tokenizer.chat_template": template}


def tensor(*shape: int, kind: str = "F32") -> dict[str, Any]:
    """One whose offset is where the tensor before it ends."""
    return {"shape": list(shape), "kind": kind, "offset": None}


def model(architecture: str, kind: str, width: int = 32, **more: Any) -> dict[str, Any]:
    """A model of one block."""
    fused = architecture == "phi3"
    half = {"attn_q": (width, width), "attn_k": (width // 2, width), "attn_v": (width // 2, width)}
    matrices = (
        {"attn_qkv": (3 * width, width), "ffn_up": (2 * width, width)} if fused else {**half, "ffn_gate": (width,) * 2}
    )
    matrices = {"ffn_up": (width, width), "attn_output": (width, width), "ffn_down": (width, width), **matrices}
    vectors = {"attn_norm.weight": width, "ffn_norm.weight": width}
    if architecture == "qwen3":
        vectors |= {"attn_q_norm.weight": width // 4, "attn_k_norm.weight": width // 4}
    if architecture == "qwen2":
        vectors |= {f"{name}.bias": shape[0] for name, shape in half.items()}
    tensors = {f"blk.0.{name}.weight": tensor(*shape, kind=kind) for name, shape in matrices.items()}
    tensors |= {f"blk.0.{name}": tensor(size) for name, size in vectors.items()}
    tensors |= {"token_embd.weight": tensor(40, width, kind=kind), "output_norm.weight": tensor(width)}
    if fused:
        tensors |= {f"rope_factors_{side}.weight": tensor(width // 8) for side in ("short", "long")}
    values = {
        "context_length": 64, "embedding_length": width, "block_count": 1, "feed_forward_length": width,
        "attention.head_count": 4, "attention.head_count_kv": 4 if fused else 2,
        "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 10000.0, "rope.dimension_count": width // 4,
        **{key.replace("__", "."): value for key, value in more.items()},
    }  # fmt: skip
    own = {f"{architecture}.{key}": value for key, value in values.items()}
    general = {"general.architecture": architecture, "general.type": "model", "general.alignment": ALIGNMENT}
    return {
        "version": 3,
        "counts": [None, None],
        "values": general | own | vocabulary("gpt2"),
        "tensors": tensors,
        "fill": 60,
    }


def written(described: Any) -> tuple[bytes, int]:
    """A file as its description has it, however little sense that makes. Returns it, and where its header ends."""
    table = _mapping(described)
    values, tensors = _mapping(table.get("values")), _mapping(table.get("tensors"))
    told = table.get("counts")
    counts = told if isinstance(told, list) and len(told) == 2 else (None, None)
    parts = [b"GGUF", _number("I", table.get("version"))]
    for count, own in zip(counts, (tensors, values), strict=True):
        parts.append(_number("Q", len(own) if count is None else count))
    for key, value in values.items():
        parts += [_text(key), _value(value)]
    end = 0
    for name, given in tensors.items():
        entry = _mapping(given)
        shape = entry["shape"] if isinstance(entry.get("shape"), list) else []
        kind = GGMLQuantizationType.__members__.get(str(entry.get("kind")), entry.get("kind"))
        offset = end if entry.get("offset") is None else entry["offset"]
        parts += [_text(name), _number("I", len(shape)), *(_number("Q", size) for size in shape[::-1])]
        parts += [_number("I", kind), _number("Q", offset)]
        end += -(-_size(shape, kind) // ALIGNMENT) * ALIGNMENT
    header = b"".join(parts)
    fill = bytes([table["fill"] % 256]) if type(table.get("fill")) is int else b"\xf0\x7f"
    return header + bytes(-len(header) % ALIGNMENT) + (fill * end)[: min(end, MOST_DATA)], len(header)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _size(shape: Sequence[Any], kind: Any) -> int:
    """Bytes of a tensor; 64 where nobody knows."""
    if not isinstance(kind, GGMLQuantizationType) or not all(
        type(size) is int and 0 < size < 1 << 16 for size in shape
    ):
        return 64
    block, size = GGML_QUANT_SIZES[kind]
    return min(math.prod(shape) // block * size, MOST_DATA)


def _number(code: str, value: Any) -> bytes:
    """A number without sign; what is none, as one."""
    known = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return struct.pack(f"<{code}", (int(value) if known else 1) % (1 << 8 * struct.calcsize(f"<{code}")))


def _text(text: str) -> bytes:
    content = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(content)) + content


def _value(value: Any) -> bytes:
    """A value of the metadata, with the number of its type before it; a list has the type of its first."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return (
            struct.pack("<I", 4) + _number("I", value)
            if 0 <= value < 1 << 32
            else struct.pack("<I", 10) + _number("Q", value)
        )
    if isinstance(value, float):
        return struct.pack("<Id", 12, value) if 1e38 < abs(value) < math.inf else struct.pack("<If", 6, value)
    if isinstance(value, list):
        items = [_value(item) for item in value] or [struct.pack("<I", 8)]
        return struct.pack("<I4sQ", 9, items[0][:4], len(value)) + b"".join(item[4:] for item in items)
    return struct.pack("<I", 8) + _text(value if isinstance(value, str) else json.dumps(value))


@st.composite
def _files(draw: Draw, described: Sequence[Any]) -> bytes:
    content, end = written(draw(altered(draw(st.sampled_from(described)), VALUES)))
    return draw(damaged(content, end)) if draw(st.integers(0, 7)) == 0 else content


@contextmanager
def models(folder: Path) -> Iterator[Reader]:
    """A GGUF file, opened and read to its last weight."""
    described = [
        model("llama", "Q8_0", rope__scaling__type="linear", rope__scaling__factor=2.0),
        model("qwen2", "F16"),
        model("qwen3", "Q4_0", attention__key_length=8, attention__value_length=8),
        model("phi3", "BF16", attention__sliding_window=16),
        model("llama", "Q4_K", 256),
    ]
    described[-1]["tensors"]["rope_freqs.weight"] = tensor(32)

    def read(content: bytes) -> None:
        file = folder / "model.gguf"
        file.write_bytes(content)
        checkpoint = Checkpoint.open(file)
        assert checkpoint.files.tokenizer is not None
        checkpoint.files.tokenizer()
        try_checkpoint(checkpoint)

    sound = tuple(written(one)[0] for one in described)
    yield Reader(sound=sound, inputs=mostly(_files(described)), read=read, errors=(ModelError,))


@contextmanager
def tokenizers(folder: Path) -> Iterator[Reader]:
    """The tokenizer in a GGUF file's metadata, made and used."""
    kinds = (("qwen2", "gpt2"), ("llama", "llama"), ("phi3", "llama"), ("llama", "t5"))
    described = [{"version": 3, "values": {"general.architecture": own, **vocabulary(kind)}} for own, kind in kinds]

    def read(content: bytes) -> None:
        file = folder / "model.gguf"
        file.write_bytes(content)
        try_tokenizer(Tokenizer(file))

    sound = tuple(written(one)[0] for one in described)
    yield Reader(sound=sound, inputs=_files(described), read=read, errors=(ModelError, RuntimeFailure))
