"""The comparison with llama.cpp: a checkpoint as GGUF's tensors, and the process that quantizes and scores them there.

llama.cpp's Llama rotates neighbouring dimensions of a head (0 with 1, 2 with 3), Hugging Face's halves (0 with D / 2),
so the rows of queries and keys change places on the way.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.checkpoint import Checkpoint
from models.spec import ModelSpec
from runtime.measure.evaluate import windows

FULL = "F32"
KINDS = ("Q2_K", "Q3_K_M", "IQ3_M", "Q4_0", "Q4_K_M")
"""llama.cpp's quantizations that are compared with."""
_WORKER = Path(__file__).with_name("llama_worker.py")
_TABLE = "token_embd.weight"
_INPUTS = {
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "o": ("attn_output",),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}
"""GGUF's names of the matrices that read a linear layer's input."""

FloatArray = npt.NDArray[np.float32]


class PeerError(Exception):
    """llama.cpp could not be asked; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """What is scored."""

    tokens: Sequence[int]
    """The text."""
    window: int
    """Tokens of a window."""
    stride: int
    """Tokens between windows."""

    def parts(self) -> list[dict[str, Any]]:
        """The tokens of each window of `runtime.measure.evaluate`, and the first one scored in it: `first`; as a chat,
        `chat_first`."""
        count = len(self.tokens)
        chat = {part.start: part.first for part in windows(count, self.window, self.stride, as_chat=True)}
        return [
            {
                "tokens": list(self.tokens[part.start : part.end]),
                "first": part.first - part.start,
                "chat_first": chat.get(part.start, part.end) - part.start,
            }
            for part in windows(count, self.window, self.stride)
        ]

    def scored(self, *, as_chat: bool) -> int:
        """Tokens that are scored."""
        found = windows(len(self.tokens), self.window, self.stride, as_chat=as_chat)
        return sum(part.end - part.first for part in found)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRow:
    """What one of llama.cpp's quantizations did."""

    kind: str
    """`F32` or one of `KINDS`."""
    weighted: bool
    """Whether it was told the mean squares of the calibration activations (an importance matrix)."""
    gpu_bytes: int
    """Bytes of all tensors, the embedding table counted once, as the output head."""
    types: Mapping[str, float]
    """Share of the matrices' weights, by tensor type."""
    bits_per_weight: float
    """Of the matrices."""
    seconds: float
    """Wall time of quantizing."""
    nats: tuple[float, ...]
    """Negative log-likelihood of each window."""
    chat_nats: tuple[float, ...]
    """The same of the tokens that an evaluation as a chat scores."""


def available(python: str) -> str | None:
    """Version of llama-cpp-python that an interpreter has; None where it or `gguf` is missing."""
    code = "import gguf, llama_cpp; print(llama_cpp.__version__)"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None


def interleaved(rows: FloatArray, heads: int) -> FloatArray:
    """Rows of a query or key matrix in llama.cpp's order: of every head rows 0, D/2, 1, D/2 + 1, ...

    Args:
        rows: [heads * D, K], halves rotating together.
        heads: Number of heads.
    """
    count, width = rows.shape
    return rows.reshape(heads, 2, count // heads // 2, width).swapaxes(1, 2).reshape(count, width)


def describe(spec: ModelSpec) -> dict[str, Any]:
    """The sizes that GGUF's metadata holds.

    Raises:
        PeerError: an architecture that this conversion does not know.
    """
    plain = spec.rope.kind == "default" and spec.rope.rotary_dim == spec.head_dim
    if spec.family != "llama" or not plain or spec.qkv_bias or spec.qk_norm:
        raise PeerError(f"only plain Llama models are converted, not {spec.family}")
    return {
        "context": spec.max_context,
        "hidden": spec.hidden_size,
        "layers": spec.num_layers,
        "intermediate": spec.intermediate_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "vocabulary": spec.vocab_size,
    }


def gguf_tensors(checkpoint: Checkpoint) -> dict[str, FloatArray]:
    """The checkpoint's tensors in float32, by GGUF's names."""
    spec = checkpoint.spec

    def matrix(name: str) -> FloatArray:
        weight: FloatArray = checkpoint.linear(name)[0].float().numpy()
        return weight

    found = {_TABLE: checkpoint.embedding().float().numpy(), "output_norm.weight": checkpoint.vector("norm").numpy()}
    if not spec.tied:
        found["output.weight"] = matrix("head")
    for i in range(spec.num_layers):
        q, k, v = np.split(matrix(f"layers.{i}.qkv"), [spec.q_width, spec.q_width + spec.kv_width])
        gate, up = np.split(matrix(f"layers.{i}.gate_up"), 2)
        block = {
            "attn_norm": checkpoint.vector(f"layers.{i}.input_norm").numpy(),
            "attn_q": interleaved(q, spec.num_heads),
            "attn_k": interleaved(k, spec.num_kv_heads),
            "attn_v": v,
            "attn_output": matrix(f"layers.{i}.o"),
            "ffn_norm": checkpoint.vector(f"layers.{i}.post_norm").numpy(),
            "ffn_gate": gate,
            "ffn_up": up,
            "ffn_down": matrix(f"layers.{i}.down"),
        }
        found |= {f"blk.{i}.{name}.weight": tensor for name, tensor in block.items()}
    return found


def importance(spec: ModelSpec, squares: Mapping[str, FloatArray]) -> dict[str, FloatArray]:
    """llama.cpp's importance matrix: mean squares of the matrices' inputs, by GGUF's names.

    Args:
        spec: The architecture.
        squares: Mean of x² of every linear layer's inputs, float32 [K] by layer.
    """
    found: dict[str, FloatArray] = {}
    for name in spec.linear_names():
        if name == "head":
            found[_TABLE if spec.tied else "output.weight"] = squares[name]
            continue
        _, layer, kind = name.split(".")
        found |= {f"blk.{layer}.{part}.weight": squares[name] for part in _INPUTS[kind]}
    return found


def ask(
    python: str,
    checkpoint: Checkpoint,
    text: Text,
    squares: Mapping[str, FloatArray],
    kinds: Sequence[tuple[str, bool]],
) -> tuple[str, list[PeerRow]]:
    """Let llama.cpp quantize a checkpoint and score a text in the windows that `runtime.measure.evaluate` uses.

    Args:
        python: An interpreter with llama-cpp-python and gguf.
        checkpoint: The model.
        text: What is scored.
        squares: Result of `importance`.
        kinds: What to measure, and whether with the importance matrix.

    Returns:
        Version of llama-cpp-python, and a row for each kind.

    Raises:
        PeerError: llama.cpp could not do it.
    """
    about = describe(checkpoint.spec)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _save(folder / "tensors.npz", gguf_tensors(checkpoint))
        _save(folder / "importance.npz", squares)
        request = {
            "about": about,
            "tensors": str(folder / "tensors.npz"),
            "importance": str(folder / "importance.npz"),
            "kinds": [list(kind) for kind in kinds],
            "windows": text.parts(),
        }
        (folder / "request.json").write_text(json.dumps(request), encoding="utf-8")
        done = subprocess.run(
            [python, str(_WORKER), str(folder / "request.json")], capture_output=True, text=True, check=False
        )
    if done.returncode:
        raise PeerError(f"llama.cpp's process ended with status {done.returncode}: {done.stderr[-600:].strip()}")
    answer = json.loads(done.stdout)
    return answer["version"], [_row(row) for row in answer["rows"]]


def _save(path: Path, arrays: Mapping[str, Any]) -> None:
    np.savez(path, **arrays)


def _row(row: Mapping[str, Any]) -> PeerRow:
    """Sizes of a file, summed up."""
    matrices = [tensor for tensor in row["tensors"] if "norm" not in tensor["name"]]
    tied = not any(tensor["name"] == "output.weight" for tensor in matrices)
    matrices = [tensor for tensor in matrices if tied or tensor["name"] != _TABLE]
    weights, stored = (sum(tensor[key] for tensor in matrices) for key in ("weights", "bytes"))
    types: dict[str, float] = {}
    for tensor in matrices:
        types[tensor["type"]] = types.get(tensor["type"], 0.0) + tensor["weights"] / weights
    norms = sum(tensor["bytes"] for tensor in row["tensors"] if "norm" in tensor["name"])
    return PeerRow(
        kind=row["kind"],
        weighted=row["weighted"],
        gpu_bytes=stored + norms,
        types={name: round(share, 4) for name, share in sorted(types.items(), key=lambda pair: -pair[1])},
        bits_per_weight=round(8 * stored / weights, 4),
        seconds=row["seconds"],
        nats=tuple(row["nats"]),
        chat_nats=tuple(row["chat_nats"]),
    )
