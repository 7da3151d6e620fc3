"""Checkpoints whose weights are quantized already, read as if they were not: a matrix is dequantized as it is read.

config.json says how under `quantization_config`:

- `fp8`: 8-bit floating-point numbers, with a scale for each block, output channel or matrix (DeepSeek-V3, §3.3);
- `mxfp4`: floating-point numbers of 4 bits in blocks of 32, which share a power of two, as gpt-oss stores experts. A
  module has `…_blocks` uint8 [.., rows, G, 16], the first of two numbers in the lower nibble, and `…_scales` uint8
  [.., rows, G], exponents plus 127 (OCP Microscaling Formats (MX) Specification 1.0, §5.3.3 and §5.4);
- `awq`, `gptq` and `compressed-tensors`: integers in groups (`models.integer_formats`), or floating-point numbers of 8
  bits as above.

What is then quantized here is what the checkpoint holds, so residuals restore that, and not the model before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from models.errors import CheckpointError, UnsupportedModelError
from models.families.fields import Fields
from models.integer_formats import Integers, from_awq, from_compressed_tensors, from_gptq
from models.packed import HALF_STEPS, NOT_A_NUMBER, Lattice
from models.recipe import FLOATS, FLOATS_8, LARGEST_KEPT_GROUP, OWN_GROUPS
from models.recipe import INTEGERS as INTEGER_TYPES
from models.shard import DTYPES, FLOATS_OF_8_BITS, INTEGERS, OCTETS, ShardTensor, StoredTensor, weights_by_type

Array = npt.NDArray[Any]
Shape = tuple[int, int]

_UNUSED = ("weight_shape", "input_scale", "activation_scale", "output_scale", "input_zero_point", "k_scale", "v_scale")
"""Last names of tensors that say nothing about weights that others don't: of activations and caches, and a shape."""
_ANOTHER = "Take another checkpoint of the model."
_WORD = 32
_GPTQ_BITS, _PACKED_BITS = (2, 3, 4, 8), (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How the weights of a checkpoint are stored."""

    name: str
    """As users are told."""
    main: str
    """Last name of the tensor that every quantized matrix has."""
    needed: tuple[str, ...]
    possible: tuple[str, ...] = ()
    shape: Callable[[Mapping[str, tuple[int, ...]]], Shape | None]
    """Gives the shape [N, K] of the matrix by those of its tensors; None if they contradict each other."""
    restore: Callable[[Mapping[str, torch.Tensor]], torch.Tensor] | None = None
    """Gives the matrix, float32 [N, K]; None of integers."""
    integers: Callable[[Mapping[str, Array]], Integers] | None = None
    """Gives these, of their tensors; None of floating-point numbers."""
    block: Shape | None = None
    """Rows and columns that share a scale of floating-point numbers; None: rows, or the matrix, do."""
    bits: int = 8
    """Of a weight."""
    along: int = 0
    """The axis of groups in the scales of integers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitTensor:
    """A matrix that several tensors of a checkpoint make up. See `models.shard.StoredTensor`."""

    form: Form
    parts: Mapping[str, ShardTensor]
    shape: tuple[int, ...]
    """[N, K]."""
    part: slice = field(default_factory=partial(slice, None))

    @property
    def path(self) -> Path:
        return self.parts[self.form.main].path

    @property
    def name(self) -> str:
        return self.parts[self.form.main].name

    @property
    def dtype(self) -> str:
        return self.form.name

    def check_readable(self) -> None:
        """Nothing: tensors of other types are refused before."""

    def rows(self, first: int, count: int) -> LowBitTensor:
        """Rows of the matrix. Reading them reads the whole."""
        return replace(self, shape=(count, self.shape[1]), part=slice(first, first + count))

    def read(self) -> torch.Tensor:
        """Dequantize it: float32 [N, K].

        Raises:
            CheckpointError: the file is gone or was truncated, or a number in it is out of range.
        """
        if self.form.restore is not None:
            return self.form.restore({last: tensor.stored() for last, tensor in self.parts.items()})[
                self.part
            ].contiguous()
        try:
            whole = torch.from_numpy(self._integers().dequantize())
        except IndexError as error:
            raise CheckpointError(
                f"{self.path}: the groups of '{self.name}' are damaged ({error}). {_ANOTHER}"
            ) from error
        return whole[self.part].contiguous()

    @property
    def group_size(self) -> int:
        """Input channels that share a scale, if groups follow each other: K / G, rounded up."""
        groups = next(tensor.shape[self.form.along] for last, tensor in self.parts.items() if "scale" in last)
        return -(-self.shape[1] // groups)

    @property
    def kind(self) -> str:
        """One of `models.recipe.INTEGERS`, or FP8, where it can be kept so; else what it is."""
        kind = f"int{self.form.bits}"
        if self.form.restore is not None:
            return self._kind_of_floats()
        if self.form.integers is None or kind not in INTEGER_TYPES:
            return self.dtype
        if (size := self.group_size) % 32 or self.shape[1] % size or size > LARGEST_KEPT_GROUP:
            return f"{self.dtype} in groups of {size}"
        for last, tensor in self.parts.items():
            if last.endswith("g_idx") and not np.array_equal(tensor.stored(), np.arange(self.shape[1]) // size):
                return f"{self.dtype} in groups of scattered inputs"
            if "scale" in last and tensor.dtype != "F16" and not _are_halves(tensor.stored()):
                return f"{self.dtype} with scales beyond half precision"
        return kind

    def lattice(self) -> Lattice:
        """Codes, scales and zeros as they are stored, where `kind` says that they can be kept.

        Raises:
            CheckpointError: the file is gone or was truncated, or a scale is no number.
        """
        if self.form.restore is not None:
            return self._lattice_of_floats()
        own = self._integers()
        scales = own.scales.T[self.part]
        if not np.isfinite(scales).all():
            raise CheckpointError(f"{self.path}: scales of '{self.name}' are NaN or infinite. {_ANOTHER}")
        codes, zeros = own.codes.T[self.part], own.zeros.T[self.part].astype(np.uint8)
        return Lattice(kind=f"int{self.form.bits}", codes=codes, scales=scales.astype(np.float16), zeros=zeros)

    def _kind_of_floats(self) -> str:
        width, group = self.shape[1], OWN_GROUPS[FLOATS_8]
        if (kind := self.parts[self.form.main].dtype) != "F8_E4M3":
            return f"FP8 as {kind}"
        if width % group:
            return f"FP8 of {width} inputs"
        (scales,) = (math.prod(tensor.shape) for last, tensor in self.parts.items() if last != self.form.main)
        block = None if scales in (1, self.parts[self.form.main].shape[0]) else self.form.block
        return f"FP8 in blocks of {block[1]} inputs" if block and block[1] % group else FLOATS_8

    def _lattice_of_floats(self) -> Lattice:
        codes, group = self.parts[self.form.main].stored().view(torch.uint8), OWN_GROUPS[FLOATS_8]
        scales = _spread(self._scale, codes.shape, self.form.block)[:, ::group][self.part].contiguous()
        codes = codes[self.part]
        if not torch.isfinite(scales).all() or ((codes & 127) == 127).any():
            raise CheckpointError(f"{self.path}: weights or scales of '{self.name}' are NaN or infinite. {_ANOTHER}")
        return Lattice(kind=FLOATS_8, codes=codes.numpy(), scales=scales.numpy())

    @property
    def _scale(self) -> torch.Tensor:
        return next(each.stored().float() for last, each in self.parts.items() if last != self.form.main)

    def _integers(self) -> Integers:
        assert self.form.integers is not None
        found = {last: tensor.stored() for last, tensor in self.parts.items()}
        arrays = {last: (each.float() if each.is_floating_point() else each).numpy() for last, each in found.items()}
        return self.form.integers(arrays)


def _are_halves(scales: torch.Tensor) -> bool:
    return torch.equal(scales.half().float(), scales.float())


def read_low_bit(
    entries: Mapping[str, ShardTensor], config: Mapping[str, Any], source: str
) -> tuple[dict[str, StoredTensor], dict[str, int] | None]:
    """The tensors of a checkpoint, each quantized matrix as one under the name of its weight.

    Returns:
        The tensors; and the number of weights by type, most first, or None if config.json says of no quantization.

    Raises:
        UnsupportedModelError: a method or an option of it that is not read.
        CheckpointError: a matrix lacks a tensor, or its tensors contradict each other.
    """
    about = config.get("quantization_config")
    if not about:
        return dict(entries), None
    fields = Fields(table=about, source=f"{source}, quantization_config")
    found: dict[str, StoredTensor] = {}
    if fields.text("quant_method", "") == "mxfp4":
        found |= read_block_floats(entries)
        whole = {name: entry for name, entry in entries.items() if not name.endswith((BLOCKS, SCALES))}
        return found | whole, weights_by_type((found | whole).values())
    form = _form(fields)
    used: set[str] = set()
    for name, entry in entries.items():
        module, _, last = name.rpartition(".")
        if last == form.main and (last != "weight" or entry.dtype in FLOATS_OF_8_BITS):
            parts = {last: entry}
            for other in (*form.needed, *form.possible):
                if (own := entries.get(f"{module}.{other}")) is not None:
                    parts[other] = own
            used |= {f"{module}.{other}" for other in parts}
            found[f"{module}.weight"] = _matrix(form, parts)
    for name, entry in entries.items():
        if name not in used and name.rpartition(".")[2] not in _UNUSED:
            found[name] = entry
    return found, weights_by_type(found.values())


def _matrix(form: Form, parts: Mapping[str, ShardTensor]) -> LowBitTensor:
    main = parts[form.main]
    if absent := [last for last in form.needed if last not in parts]:
        raise CheckpointError(f"{main.path}: '{main.name}' has no '{absent[0]}' beside it ({form.name}). {_ANOTHER}")
    for last, tensor in parts.items():
        known = DTYPES if "scale" in last else FLOATS_OF_8_BITS if last == "weight" else INTEGERS
        if tensor.dtype not in known:
            raise UnsupportedModelError(
                f"{tensor.path}: the tensor '{tensor.name}' is stored as {tensor.dtype} ({form.name} has it as "
                f"{' or '.join(known)}). {_ANOTHER}"
            )
    shapes = {last: tensor.shape for last, tensor in parts.items()}
    shape = form.shape(shapes)
    if shape is None:
        listed = ", ".join(f"{last} {list(each)}" for last, each in shapes.items())
        raise CheckpointError(
            f"{main.path}: the shapes of '{main.name}' and its scales contradict each other or {form.name}: {listed}. "
            f"{_ANOTHER}"
        )
    return LowBitTensor(form=form, parts=parts, shape=shape)


def _form(fields: Fields) -> Form:
    """What `quantization_config` describes; its method is one of `models.families.READ_QUANTIZED`."""
    method = fields.text("quant_method", "")
    if method == "fp8":
        return _floats(_block(fields, fields.table.get("weight_block_size")))
    if method == "compressed-tensors":
        return _compressed(fields)
    bits = fields.integer("bits")
    if method == "awq":
        version = fields.text("version", "gemm").lower()
        if bits != 4 or version != "gemm":
            raise _refused(fields, f"AWQ of {bits} bits in the version '{version}'", "4 bits in the version gemm")
        return Form(
            name="AWQ int4",
            main="qweight",
            needed=("qzeros", "scales"),
            shape=_awq_shape,
            integers=from_awq,
            bits=bits,
        )
    version = fields.text("checkpoint_format", "gptq")
    if bits not in _GPTQ_BITS or version not in ("gptq", "gptq_v2"):
        raise _refused(fields, f"GPTQ of {bits} bits in the format '{version}'", "2, 3, 4 and 8 bits, gptq and gptq_v2")
    return Form(
        name=f"GPTQ int{bits}",
        main="qweight",
        needed=("qzeros", "scales"),
        possible=("g_idx",),
        shape=partial(_gptq_shape, bits=bits),
        integers=partial(from_gptq, bits=bits, less_one=version == "gptq"),
        bits=bits,
    )


def _compressed(fields: Fields) -> Form:
    groups = fields.table.get("config_groups")
    listed = list(groups.values()) if isinstance(groups, dict) else []
    tables = [own for group in listed if isinstance(group, dict) and isinstance(own := group.get("weights"), dict)]
    told = [(own.get("type"), own.get("num_bits")) for own in tables]
    known = all((type(kind), type(bits)) == (str, int) for kind, bits in told)
    if not told or len(told) < len(listed) or not known:
        raise fields.wrong("config_groups", groups, "a table of groups with the type and the bits of their weights")
    kinds = set(told)
    layout = str(tables[0].get("format") or fields.table.get("format"))
    if kinds == {("float", 8)}:
        return _floats(_block(fields, tables[0].get("block_structure")))
    bits = next(iter(kinds))[1]
    if len(kinds) > 1 or kinds != {("int", bits)} or bits not in _PACKED_BITS or layout != "pack-quantized":
        words = ", ".join(f"{kind} of {bits} bits" for kind, bits in sorted(kinds, key=str))
        raise _refused(fields, f"{words} as '{layout}'", "int of 4 or 8 bits as 'pack-quantized', and float of 8 bits")
    return Form(
        name=f"compressed-tensors int{bits}",
        main="weight_packed",
        needed=("weight_scale",),
        possible=("weight_zero_point", "weight_g_idx"),
        shape=partial(_packed_shape, bits=bits),
        integers=partial(from_compressed_tensors, bits=bits),
        bits=bits,
        along=1,
    )


def _floats(block: Shape | None) -> Form:
    """Floating-point numbers of 8 bits, with scales for blocks of so many rows and columns."""
    return Form(
        name="FP8",
        main="weight",
        needed=(),
        possible=("weight_scale_inv", "weight_scale"),
        shape=partial(_float_shape, block=block),
        restore=partial(_scaled, block=block),
        block=block,
    )


def _scaled(parts: Mapping[str, torch.Tensor], block: Shape | None) -> torch.Tensor:
    weight, (scale,) = parts["weight"].float(), [each.float() for last, each in parts.items() if last != "weight"]
    return weight * _spread(scale, weight.shape, block)


def _spread(scale: torch.Tensor, shape: Sequence[int], block: Shape | None) -> torch.Tensor:
    """The scale of every weight of a matrix [N, K]."""
    if scale.numel() == 1:
        return scale.flatten().expand(*shape)
    if block is None or scale.numel() == shape[0]:
        return scale.view(-1, 1).expand(*shape)
    rows, width = (min(side, own) for side, own in zip(block, shape, strict=True))
    return scale.repeat_interleave(rows, 0)[: shape[0]].repeat_interleave(width, 1)[:, : shape[1]]


def _float_shape(shapes: Mapping[str, tuple[int, ...]], block: Shape | None) -> Shape | None:
    weight, scales = shapes["weight"], [shape for last, shape in shapes.items() if last != "weight"]
    if len(weight) != 2 or len(scales) != 1:
        return None
    rows, width = weight
    fits = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if block is not None:
        fits.append((-(-rows // block[0]), -(-width // block[1])))
    return (rows, width) if scales[0] in fits else None


def _awq_shape(shapes: Mapping[str, tuple[int, ...]]) -> Shape | None:
    words, zeros, scales = (shapes[last] for last in ("qweight", "qzeros", "scales"))
    if not len(words) == len(zeros) == len(scales) == 2 or not all((*words, *scales)):
        return None
    width, rows = words[0], 8 * words[1]
    fits = scales == (zeros[0], rows) and zeros[1] == words[1] and width % zeros[0] == 0
    return (rows, width) if fits else None


def _gptq_shape(shapes: Mapping[str, tuple[int, ...]], bits: int) -> Shape | None:
    words, zeros, scales = (shapes[last] for last in ("qweight", "qzeros", "scales"))
    if not len(words) == len(zeros) == len(scales) == 2 or words[0] * _WORD % bits or not all((*words, *scales)):
        return None
    width, rows = words[0] * _WORD // bits, words[1]
    fits = scales == (zeros[0], rows) and zeros[1] == -(-rows * bits // _WORD) and zeros[0] <= width
    return (rows, width) if fits and shapes.get("g_idx", (width,)) == (width,) else None


def _packed_shape(shapes: Mapping[str, tuple[int, ...]], bits: int) -> Shape | None:
    words, scales, side = shapes["weight_packed"], shapes["weight_scale"], _WORD // bits
    if not len(words) == len(scales) == 2 or not all(words) or scales[0] != words[0]:
        return None
    zeros = (-(-words[0] // side), scales[1])
    width = words[1] * side
    fits = 0 < scales[1] <= width and shapes.get("weight_zero_point", zeros) == zeros
    return (words[0], width) if fits and shapes.get("weight_g_idx", (width,)) == (width,) else None


def _block(fields: Fields, sides: object) -> Shape | None:
    """Rows and columns that share a scale; None where config.json does not say."""
    if sides is None:
        return None
    if not isinstance(sides, list) or len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise fields.wrong("weight_block_size", sides, "a list of two numbers of channels")
    return sides[0], sides[1]


def _refused(fields: Fields, found: str, read: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{fields.source}: {found} cannot be read (it can: {read}). {_ANOTHER}")


NAME = FLOATS
BLOCKS, SCALES = "_blocks", "_scales"
"""How the names of the tensors end."""
_BYTES, _LENGTH, _BIAS = 16, 32, 127


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockFloats:
    """A tensor of such numbers. See `models.shard.StoredTensor`."""

    blocks: ShardTensor
    scales: ShardTensor
    shape: tuple[int, ...]
    """[.., rows, 32 G]."""

    @property
    def path(self) -> Path:
        return self.blocks.path

    @property
    def name(self) -> str:
        return self.blocks.name

    @property
    def dtype(self) -> str:
        return NAME

    def check_readable(self) -> None:
        """Nothing: other formats are refused before."""

    def rows(self, first: int, count: int) -> BlockFloats:
        groups = self.scales.shape[-1]
        return replace(
            self,
            blocks=self.blocks.rows(first * groups, count * groups),
            scales=self.scales.rows(first, count),
            shape=(count, self.shape[-1]),
        )

    @property
    def kind(self) -> str:
        return NAME

    def lattice(self) -> Lattice:
        """Codes and exponents as they are stored.

        Raises:
            CheckpointError: the file is gone or was truncated, or a scale is no number.
        """
        pairs, scales = self.blocks.stored().numpy(), self.scales.stored().numpy()
        if (scales == NOT_A_NUMBER).any():
            raise CheckpointError(f"{self.path}: scales of '{self.name}' are no numbers. {_ANOTHER}")
        codes = np.stack((pairs & 15, pairs >> 4), axis=-1)
        rows, width = self.shape
        return Lattice(kind=NAME, codes=codes.reshape(rows, width), scales=scales.reshape(rows, -1))

    def read(self) -> torch.Tensor:
        """Its numbers in bfloat16, which holds them exactly."""
        numbers = torch.from_numpy(HALF_STEPS / np.float32(2))
        codes, exponents = self.blocks.stored(), self.scales.stored().flatten().int() - _BIAS
        both = torch.stack((numbers[(codes & 15).int()], numbers[(codes >> 4).int()]), dim=-1)
        return torch.ldexp(both.view(-1, _LENGTH), exponents[:, None]).to(torch.bfloat16).view(self.shape)


def read_block_floats(entries: Mapping[str, ShardTensor]) -> dict[str, BlockFloats]:
    """The tensors of a checkpoint that are stored so, as `{module}.weight`.

    Raises:
        CheckpointError: one has no scales, or they contradict its shape.
    """
    found = {}
    for name, blocks in entries.items():
        if not name.endswith(BLOCKS):
            continue
        module = name.removesuffix(BLOCKS)
        scales = entries.get(module + SCALES)
        if scales is None or blocks.shape != (*scales.shape, _BYTES) or not math.prod(blocks.shape):
            listed = "missing" if scales is None else f"of shape {list(scales.shape)}"
            raise CheckpointError(
                f"{blocks.path}: '{name}' has shape {list(blocks.shape)}, and its scales are {listed}. "
                "Download the model again."
            )
        if any(each.dtype not in OCTETS for each in (blocks, scales)):
            raise CheckpointError(f"{blocks.path}: '{name}' or its scales are not {NAME}. Download the model again.")
        shape = (*scales.shape[:-1], _LENGTH * scales.shape[-1])
        found[f"{module}.weight"] = BlockFloats(blocks=blocks, scales=scales, shape=shape)
    return found
