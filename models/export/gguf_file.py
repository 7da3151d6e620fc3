"""GGUF files for llama.cpp: 4-bit groups as Q4_1, with their codes as they are; other matrices as Q8_0 or F16.

A block of Q4_1 has 32 weights, a scale and a minimum: w = code * scale + minimum. Our groups are made of such blocks,
so only the minimum, -zero * scale, is rounded (to half precision).

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and block_q4_1 in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from models.errors import UnsupportedModelError
from models.export.formats import Step
from models.export.gguf_tokenizer import check_read_back, write_tokenizer
from models.export.matrices import parts, pieces, restored, uniform_groups
from models.families import FAMILIES
from models.generation_config import GGUF_KEYS
from models.gguf.architectures import ARCHITECTURES
from models.gguf.tensors import name_in_file
from models.packed import PackedLinear, rows_of
from models.quantizers.groups import GroupCodes
from models.rope import frequencies
from models.spec import LAYER_TYPES
from models.store import StoredModel

if TYPE_CHECKING:
    from gguf import GGUFWriter

Array = npt.NDArray[Any]

_BLOCK = 32
"""Weights in a block of Q4_1 and Q8_0."""
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "seed_oss")
"""Families whose blocks, multipliers folded into the weights, are those of llama.cpp's llama, qwen2, qwen3 or phi3."""
_FILE_TYPES = {"Q4_1": 3, "Q8_0": 7, "F16": 1}
"""`general.file_type`: what most matrices are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor to be written."""

    name: str
    """Its name in the file."""
    rows: slice
    """Its rows of the matrix that it is a part of."""
    heads: int = 0
    """Number of heads whose rows llama.cpp reorders; 0 if it keeps the order."""


class GgufWriter:
    """Writes one model.

    Args:
        model: The model.
        residuals: Whether residuals are added, which makes matrices Q8_0.

    Raises:
        UnsupportedModelError: a GGUF file cannot hold it.
    """

    def __init__(self, model: StoredModel, residuals: bool) -> None:
        self._model, self._spec, self._residuals = model, model.spec, residuals
        self._family = FAMILIES[model.spec.family]
        self._architecture = self._checked_architecture()
        self._window = self._checked_window()
        self._rope = self._checked_rope()
        self.notes: list[str] = []
        """What differs from the stored model."""
        if self._window:
            self.notes.append("llama.cpp ignores the sliding window of Mistral models")
        if model.recipe.bits < 4 and self._kind(model.linear("layers.0.qkv")) == "Q4_1":
            self.notes.append("codes of 3 bits take 4 bits in Q4_1")
        if model.recipe.per_token:
            self.notes.append("activations are not rounded as qoq rounds them")

    def write(self, path: Path, step: Step) -> dict[str, int]:
        """Write the file, and return the number of weights by type.

        Raises:
            UnsupportedModelError: its tokenizer has no name in GGUF.
            OSError: the disk refuses.
        """
        from gguf import GGUFWriter

        writer = GGUFWriter(path, self._architecture)
        self._describe(writer)
        write_tokenizer(writer, self._model)
        counts: dict[str, int] = {}
        for linear, tensors in self._matrices():
            kind = self._kind(linear)
            for tensor in tensors:
                shape = tensor.rows.stop - tensor.rows.start, linear.shape[1]
                counts[kind] = counts.get(kind, 0) + math.prod(shape)
                _announce(writer, tensor.name, kind, shape)
        vectors = dict(self._vectors())
        for name, vector in vectors.items():
            writer.add_tensor_info(name, vector.shape, vector.dtype, vector.nbytes)
        try:
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_ti_data_to_file()
            for linear, tensors in self._matrices():
                step()
                packed = _packed(linear, self._kind(linear), self._residuals)
                for tensor in tensors:
                    writer.write_tensor_data(_reordered(packed[tensor.rows], tensor.heads))
                self._model.release()
            for vector in vectors.values():
                writer.write_tensor_data(vector)
        finally:
            writer.close()
        counts["F16"] = counts.get("F16", 0) + vectors["token_embd.weight"].size
        check_read_back(path, self._model)
        return counts

    def _kind(self, linear: PackedLinear) -> str:
        """The type that holds a matrix."""
        if linear.shape[1] % _BLOCK:
            return "F16"
        return "Q8_0" if self._residuals or linear.codebook is not None else "Q4_1"

    def _matrices(self) -> Iterator[tuple[PackedLinear, list[_Tensor]]]:
        """All matrices with the tensors that they become."""
        spec = self._spec
        heads = {"self_attn.q_proj": spec.num_heads, "self_attn.k_proj": spec.num_kv_heads}
        for layer in range(spec.num_layers):
            for kind in LAYER_TYPES:
                tensors = [
                    _Tensor(
                        name=name_in_file(f"model.layers.{layer}.{module}.weight", self._architecture, self._family),
                        rows=rows,
                        heads=heads.get(module, 0) if self._architecture == "llama" else 0,
                    )
                    for module, rows in parts(spec, self._family, kind)
                ]
                yield self._model.linear(f"layers.{layer}.{kind}"), tensors
        head = self._model.linear("head")
        yield head, [_Tensor(name="output.weight", rows=slice(0, head.shape[0]))]

    def _vectors(self) -> Iterator[tuple[str, Array]]:
        """Everything that is no matrix of the blocks: norms, biases, factors, and the embedding table."""
        model, spec = self._model, self._spec
        yield "token_embd.weight", np.ascontiguousarray(model.embedding())
        for name in spec.vector_names():
            (module,) = self._family.sources(name)
            yield (
                name_in_file(f"{module}.weight", self._architecture, self._family),
                np.ascontiguousarray(model.vector(name)),
            )
        for linear, tensors in self._matrices():
            if linear.bias is not None:
                for tensor in tensors:
                    yield tensor.name.replace(".weight", ".bias"), _reordered(linear.bias[tensor.rows], tensor.heads)
        for name, factors in self._rope.items():
            yield f"{name}.weight", np.asarray(factors, np.float32)

    def _describe(self, writer: GGUFWriter) -> None:
        """Write the metadata of the architecture."""
        spec, rope = self._spec, self._spec.rope
        writer.add_type("model")
        writer.add_name(self._model.name)
        writer.add_quantization_version(2)
        writer.add_file_type(_FILE_TYPES[self._kind(self._model.linear("layers.0.qkv"))])
        writer.add_context_length(spec.max_context)
        writer.add_embedding_length(spec.hidden_size)
        writer.add_block_count(spec.num_layers)
        writer.add_feed_forward_length(spec.intermediate_size)
        writer.add_head_count(spec.num_heads)
        writer.add_head_count_kv(spec.num_kv_heads)
        writer.add_key_length(spec.head_dim)
        writer.add_value_length(spec.head_dim)
        writer.add_layer_norm_rms_eps(spec.norm_eps)
        writer.add_rope_dimension_count(rope.rotary_dim)
        writer.add_rope_freq_base(rope.theta)
        if self._window or self._architecture == "phi3":
            writer.add_sliding_window(self._window)
        if rope.kind == "linear":
            writer.add_string(f"{self._architecture}.rope.scaling.type", "linear")
            writer.add_rope_scaling_factor(rope.factor)
        if "rope_factors_long" in self._rope:
            writer.add_rope_scaling_orig_ctx_len(rope.original_context)
            writer.add_rope_scaling_attn_factors(rope.attention_factor)
        keys = {name: key for key, name in GGUF_KEYS.items()}
        for name, value in self._model.sampling.items():
            if name == "top_k":
                writer.add_int32(f"general.sampling.{keys[name]}", int(value))
            else:
                writer.add_float32(f"general.sampling.{keys[name]}", value)

    def _checked_architecture(self) -> str:
        """The architecture of llama.cpp whose block is that of the model."""
        spec = self._spec
        if spec.family not in _FAMILIES:
            raise self._refusal(f"{spec.family} models have no place in it yet")
        if spec.family == "phi3":
            return "phi3"
        if spec.rope.rotary_dim != spec.head_dim:
            raise self._refusal("its heads rotate in part")
        biases = (spec.qkv_bias, spec.o_bias, spec.mlp_bias)
        if spec.qk_norm:
            if any(biases):
                raise self._refusal("llama.cpp's models with norms of queries and keys have no biases")
            return "qwen3"
        if biases == (True, False, False):
            return "qwen2"
        if spec.qkv_bias != spec.o_bias:
            raise self._refusal("only some of its attention's matrices have biases")
        return "llama"

    def _checked_window(self) -> int:
        """The sliding window of all blocks; 0: none."""
        windows = {window if window and window < self._spec.max_context else 0 for window in self._spec.windows}
        if windows == {0}:
            return 0
        if len(windows) > 1 or not ARCHITECTURES[self._architecture].windows:
            raise self._refusal(f"blocks of {self._architecture} models have no sliding windows of their own in it")
        return windows.pop()

    def _checked_rope(self) -> dict[str, Any]:
        """Tables of rotary factors by the names that files give them."""
        rope = self._spec.rope
        if rope.kind in ("default", "linear"):
            return {}
        short, long = rope.short_factor, rope.long_factor
        same = rope.kind == "longrope" and short == long and rope.attention_factor == 1.0
        if rope.kind == "llama3" or same:
            if self._architecture != "llama":
                raise self._refusal(f"{self._architecture} models have no table of rotary factors in it")
            exponents = np.arange(0, rope.rotary_dim, 2) / rope.rotary_dim
            return {"rope_freqs": rope.theta**-exponents / frequencies(rope, self._spec.max_context)}
        if rope.kind == "longrope" and self._architecture == "phi3":
            return {"rope_factors_short": short, "rope_factors_long": long}
        raise self._refusal(f"the rotary scaling '{rope.kind}' of {self._architecture} models has no place in it")

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._model.name} cannot be exported as gguf: {reason}")


def _announce(writer: GGUFWriter, name: str, kind: str, shape: tuple[int, int]) -> None:
    """Add a matrix's name, type and shape to the header."""
    from gguf import GGMLQuantizationType

    if kind == "F16":
        writer.add_tensor_info(name, shape, np.dtype(np.float16), 2 * math.prod(shape))
        return
    row = _row_bytes(kind, shape[1])
    stored = (shape[0], row)
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), math.prod(stored), GGMLQuantizationType[kind])


def _row_bytes(kind: str, width: int) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    return width // weights * size


def _packed(linear: PackedLinear, kind: str, residuals: bool) -> Array:
    """All rows of a matrix as the file holds them: float16 [N, K], or uint8 [N, bytes]."""
    from gguf import GGMLQuantizationType, quantize

    rows, width = linear.shape
    if kind == "F16":
        packed: Array = np.empty((rows, width), np.float16)
    else:
        packed = np.empty((rows, _row_bytes(kind, width)), np.uint8)
    for piece in pieces(linear):
        part = rows_of(linear, piece)
        if kind == "Q4_1":
            groups = uniform_groups(part)
            assert groups is not None
            packed[piece] = q4_1(groups)
        elif kind == "Q8_0":
            packed[piece] = quantize(restored(part, residuals), GGMLQuantizationType.Q8_0)
        else:
            packed[piece] = restored(part, residuals)
    return packed


def q4_1(groups: GroupCodes) -> npt.NDArray[np.uint8]:
    """Rows of Q4_1: uint8 [N, K / 32 * 20], for each block a scale, a minimum and codes.

    Code i, below 16, is in the low nibble of byte i, and code i + 16 in its high one.

    Args:
        groups: Groups of a multiple of 32 channels; K is one, too.
    """
    rows, width = groups.codes.shape
    which = np.arange(width // _BLOCK) * _BLOCK // groups.group_size
    scales = groups.scales.astype(np.float32)
    minima = (-scales * groups.zeros).astype("<f2")
    blocks = np.empty((rows, width // _BLOCK, 20), np.uint8)
    blocks[:, :, 0:2] = groups.scales.astype("<f2")[:, which, None].view(np.uint8)
    blocks[:, :, 2:4] = minima[:, which, None].view(np.uint8)
    codes = groups.codes.reshape(rows, width // _BLOCK, 2, _BLOCK // 2)
    blocks[:, :, 4:] = codes[:, :, 0] | codes[:, :, 1] << np.uint8(4)
    return blocks.reshape(rows, -1)


def _reordered(rows: Array, heads: int) -> Array:
    """llama.cpp's order of rows: it rotates neighbours (0, 1), Hugging Face halves (0, D / 2)."""
    if not heads:
        return np.ascontiguousarray(rows)
    halves = rows.reshape(heads, 2, -1, *rows.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
