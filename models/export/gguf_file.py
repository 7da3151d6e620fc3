"""GGUF files for llama.cpp: 4-bit groups as Q4_1, with their codes as they are; other matrices as Q8_0 or F16.

A block of Q4_1 has 32 weights, a scale and a minimum: w = code * scale + minimum. Our groups are made of such blocks,
so only the minimum, -zero * scale, is rounded (to half precision).

A file names how texts are cut, and has no expression for it. So the name is found whose cuts are those of the
tokenizer in a text with something of everything, and the finished file is read back and compared on that text.

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and block_q4_1 in ggml/src/ggml-common.h.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from models.errors import UnsupportedModelError
from models.export import Step
from models.families import FAMILIES
from models.generation_config import GGUF_KEYS
from models.gguf.architectures import ARCHITECTURES
from models.gguf.header import read_header
from models.gguf.tensors import name_in_file
from models.gguf.tokenizer import (
    BYTE,
    CONTROL,
    NAMED,
    NORMAL,
    PRE_TOKENIZERS,
    TOKENIZER,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    PreTokenizer,
    cutter,
    tokenizer_files,
)
from models.packed import PackedLinear, rows_of
from models.packing import unpack
from models.plain_tokenizer import TokenizerFiles, plain_tokenizer, several
from models.quantizers.dequantize import parts, pieces, restored, uniform_groups
from models.quantizers.groups import GroupCodes
from models.recipe import FLOATS, FLOATS_8, GGUF_GROUPS, TWO_LEVELS
from models.rope import frequencies
from models.spec import LAYER_TYPES
from models.store import StoredModel

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers import Tokenizer

Array = npt.NDArray[Any]

_BLOCK = 32
"""Weights in a block of Q4_1 and Q8_0."""
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "phi3", "granite", "seed_oss")
"""Families whose blocks, multipliers folded into the weights, are those of llama.cpp's llama, qwen2, qwen3 or phi3."""
_FILE_TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "F16": 1}
"""`general.file_type`: what most matrices are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    """A tensor to be written."""

    name: str
    rows: slice
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
        self._kept = model.recipe.types or {}
        if {*TWO_LEVELS, FLOATS, FLOATS_8} & set(self._kept.values()):
            raise refusal(model, "it has the weights of its source as they are there; use that")
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
                kind, kept = self._kind(linear), self._kept.get(linear.name)
                packed = _kept(linear, kind) if kept in GGUF_GROUPS else _packed(linear, kind, self._residuals)
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
        if (kept := self._kept.get(linear.name)) in GGUF_GROUPS:
            return str(kept)
        if linear.shape[1] % _BLOCK:
            return "F16"
        return "Q8_0" if self._residuals or linear.zeros is None else "Q4_1"

    def _matrices(self) -> Iterator[tuple[PackedLinear, list[_Tensor]]]:
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
            if name not in keys:
                continue
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
            raise refusal(
                self._model, f"blocks of {self._architecture} models have no sliding windows of their own in it"
            )
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
        raise refusal(
            self._model, f"the rotary scaling '{rope.kind}' of {self._architecture} models has no place in it"
        )

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return refusal(self._model, reason)


def _announce(writer: GGUFWriter, name: str, kind: str, shape: tuple[int, int]) -> None:
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


def _kept(linear: PackedLinear, kind: str) -> Array:
    """All rows of a matrix that was kept, uint8 [N, bytes]: for each block its scale, its minimum and its codes.

    At 5 bits the highest ones of all codes come first.
    """
    (rows, width), halves = linear.shape, [linear.scales, *([] if linear.minimums is None else [linear.minimums])]
    codes = unpack(np.ascontiguousarray(linear.codes), linear.bits, width).reshape(rows, -1, _BLOCK)
    low = codes & np.uint8(15)
    octets = codes ^ 128 if kind == "Q8_0" else low[..., : _BLOCK // 2] | low[..., _BLOCK // 2 :] << np.uint8(4)
    factors = [np.ascontiguousarray(each.astype("<f2"))[..., None].view(np.uint8) for each in halves]
    tops = [np.packbits(codes >> np.uint8(4), axis=-1, bitorder="little")] if linear.bits == 5 else []
    return np.concatenate([*factors, *tops, octets], axis=-1).reshape(rows, -1)


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


PROBE = (
    "Hello, world!  It's 12345 o'clock, isn't it? WE'LL see.\n\n\tdef f(x):\n        return x**2 + 3.1e-9  # naïve\r\n"
    "Der Fluß ist 1.024 km lang; l'été à l'école, mañana.  Привет, мир! 日本語のテキスト、中文文本。"
    "한국어 문장 العربية हिन्दी 🙂👩\u200d👧 e\u0301 ﬁ ½ ² İstanbul ǅ\u00a0x   \n \n   end/of\\path "
    "http://a.b/c?d=e&f=g ...!!! ---\n```json\n"
    '{"key": [1, 22, 333, 4444], "ok": true}\n```\nCamelCaseWords snake_case_words UPPER lower 1st 2nd 0x1F $9.99 50%\n'
)
"""A text with something of everything."""
_SPACE = "▁"
_BYTES = re.compile("<0x[0-9A-F]{2}>")
_NO_SCORE = -1e6
"""Score of a token that no merge makes."""


def write_tokenizer(writer: GGUFWriter, model: StoredModel) -> None:
    """Write the metadata of a model's tokenizer.

    Raises:
        UnsupportedModelError: GGUF has no name for its kind, or for its way of cutting texts.
    """
    files = _files(model)
    description = json.loads(files.fast.to_str())
    bpe = description["model"]
    if bpe["type"] != "BPE":
        raise refusal(model, f"its tokenizer is of the kind {bpe['type']}, and only BPE can be written")
    tokens, types = _vocabulary(files, bpe, model.spec.vocab_size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    if bpe["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_prefixed(files.fast))
    else:
        name = _pre_tokenizer(files.fast, ignore_merges=bpe["ignore_merges"])
        if name is None:
            raise refusal(model, "GGUF has no name for how its tokenizer splits text")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_merges(merges)
        writer.add_add_space_prefix(files.fast.encode("a", add_special_tokens=False).tokens[0][0] != "a")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _write_special(writer, files, model)


def check_read_back(path: Path, model: StoredModel) -> None:
    """Read the tokenizer of a written file, and compare what it makes of `PROBE` with the model's own.

    Raises:
        UnsupportedModelError: they differ.
    """
    from tokenizers import Tokenizer

    found = Tokenizer.from_str(tokenizer_files(read_header(path))[TOKENIZER].decode())
    own = _files(model).fast
    if any(found.encode(line).ids != own.encode(line).ids for line in (PROBE, *PROBE.splitlines())):
        raise refusal(model, "what GGUF can express of its tokenizer encodes text differently")


def refusal(model: StoredModel, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{model.name} cannot be exported as gguf: {reason}")


def _files(model: StoredModel) -> TokenizerFiles:
    files = plain_tokenizer(model.tokenizer_path)
    if files is None:
        raise refusal(model, "its tokenizer is more than a tokenizer.json")
    return files


def _vocabulary(files: TokenizerFiles, bpe: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Text and type of every token; ids without a token are unused."""
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in files.fast.get_vocab().items():
        if index < size:
            byte = bpe["byte_fallback"] and _BYTES.fullmatch(token)
            tokens[index], types[index] = token, BYTE if byte else NORMAL
    for index, added in files.fast.get_added_tokens_decoder().items():
        if index < size:
            types[index] = CONTROL if added.special else USER_DEFINED
    unknown = files.special.get("unk_token") or bpe["unk_token"]
    if bpe["byte_fallback"] and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores by which sentencepiece merges in the same order: the first merge that makes a token, negated."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks[token]) if token in ranks else _NO_SCORE for token in tokens]


def _prefixed(fast: Tokenizer) -> bool:
    return str(fast.encode("a", add_special_tokens=False).tokens[0]).startswith(_SPACE)


def _pre_tokenizer(fast: Tokenizer, *, ignore_merges: bool) -> str | None:
    """The name of the way in which a byte-level tokenizer cuts texts; None if it has none."""
    if fast.pre_tokenizer is None:
        return None
    expected = _cut(fast.normalizer, fast.pre_tokenizer)
    names: dict[PreTokenizer, str] = {}
    for name, way in PRE_TOKENIZERS.items():
        names.setdefault(way, name)
    for way, name in names.items():
        if way.ignore_merges == ignore_merges and _cut(*cutter(way, space=False)) == expected:
            return name
    return None


def _cut(normalizer: Any, pre_tokenizer: Any) -> list[list[str]]:
    """Pieces of each line of `PROBE`, and of all of it."""
    lines = (PROBE, *PROBE.splitlines())
    normal = lines if normalizer is None else [normalizer.normalize_str(line) for line in lines]
    return [[piece for piece, _ in pre_tokenizer.pre_tokenize_str(line)] for line in normal]


def _write_special(writer: GGUFWriter, files: TokenizerFiles, model: StoredModel) -> None:
    fast = files.fast
    ids = {name: fast.token_to_id(text) for name, text in files.special.items() if name in NAMED}
    ends = [token for token in model.spec.eos_token_ids if token < model.spec.vocab_size]
    if ends and ids.get("eos_token") not in ends:
        ids["eos_token"] = ends[0]
    if model.spec.bos_token_id is not None:
        ids.setdefault("bos_token", model.spec.bos_token_id)
    for name, index in ids.items():
        if index is not None:
            writer.add_uint32(f"tokenizer.ggml.{NAMED[name]}", index)
    if others := [token for token in ends if token != ids["eos_token"]]:
        writer.add_eot_token_id(others[0])
    plain, whole = (fast.encode("a", add_special_tokens=special).ids for special in (False, True))
    writer.add_add_bos_token(len(whole) > len(plain) and whole[0] == ids.get("bos_token"))
    writer.add_add_eos_token(len(whole) > len(plain) and whole[-1] == ids.get("eos_token"))
    if files.template is not None:
        tools = files.tool_template
        writer.add_chat_template(several(files.template, tools) if tools else files.template)
