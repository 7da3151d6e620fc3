"""The tensors of a GGUF file under their names in Hugging Face's format, and in its order of rows."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from models import mtp
from models.errors import CheckpointError, UnsupportedModelError
from models.families.family import Family
from models.gguf.architectures import ARCHITECTURES
from models.gguf.header import DOWNLOAD_AGAIN, WHOLE_TYPES, Header, TensorInfo
from models.packed import NOT_A_NUMBER, Lattice
from models.recipe import FLOATS, GGUF_GROUPS, MINIMUMS, SUPER_GROUP, TWO_LEVELS
from models.spec import QUERIES

if TYPE_CHECKING:
    import torch

    from models.spec import Mixer

_READ_AS = dict(zip(WHOLE_TYPES, ("float32", "float16", "bfloat16"), strict=True))
"""The dtypes of weights that are not low-bit. Others are read as float16, whose rounding error is far below theirs."""
LOW_BIT_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("TQ1_0", "TQ2_0", "MXFP4", "NVFP4"),
)
"""Types that the `gguf` package dequantizes."""

_LINEAR = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_NORMS = {
    "attn_norm": "input_norm",
    "attn_q_norm": "q_norm",
    "attn_k_norm": "k_norm",
    "post_attention_norm": "o_norm",
    "post_ffw_norm": "down_norm",
    "post_norm": "inner.down_norm",
    "laurel_post_norm": "laurel.down_norm",
    "altup_router_norm": "altup_norm",
    "altup_router": "altup_router",
    "altup_predict_coef": "altup_predict",
    "altup_correct_coef": "altup_correct",
    "post_ffw_norm_1": "mlp_norm",
    "pre_ffw_norm_2": "experts_norm",
    "post_ffw_norm_2": "experts_down_norm",
}
"""Norms, and matrices that stay in float32, by the names of `models.architecture`."""
_VECTORS = {
    "attn_sinks.weight": "sinks",
    "layer_output_scale.weight": "scale",
    "ffn_gate_inp.scale": "router_norm",
    "exp_probs_b.bias": "router_correction",
    "ssm_a": "decay",
    "ssm_d": "skip",
    "ssm_dt.bias": "dt",
}
"""Other vectors, likewise, by their whole names."""
_DELTA = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_MIXERS = {
    "conv.conv": {
        "shortconv.conv": "conv.conv",
        "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj",
    },
    "linear_attn.in_proj_qkv": _DELTA,
    "linear_attn.in_proj_qkvz": {
        **_DELTA,
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    "mamba.in_proj": {
        "ssm_in": "mamba.in_proj",
        "ssm_conv1d": "mamba.conv1d",
        "ssm_norm": "mamba.norm",
        "ssm_out": "mamba.out_proj",
    },
}
"""Modules of blocks with another mixer than attention, by one of them. Those of Qwen3-Next are divided or not."""
_COLUMNS = ("ssm_a", "ssm_d", "ssm_norm")
"""Vectors that some architectures store as a matrix."""
_FURTHER_LINEAR = {
    "inp_gate": "inner.gate_up",
    "proj": "inner.down",
    "laurel_l": "laurel.gate_up",
    "laurel_r": "laurel.down",
}
"""Linear layers of blocks with embeddings of their own or several streams, by the names of `models.architecture`."""
_OUTER = {
    "per_layer_token_embd": "tokens",
    "per_layer_model_proj": "tokens.gate_up",
    "per_layer_proj_norm": "tokens.gate_up_norm",
    "altup_proj": "spread1.down",
    "altup_unembd_proj": "merge1.down",
}
"""What these blocks share."""
_FIRST = ".0"
"""How the module ends of the first of several matrices that are one tensor."""
_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
"""Tensors that are not weights but tables, which Hugging Face's format keeps in config.json."""
_NAME = re.compile(
    r"(?:blk\.(?P<layer>0|[1-9]\d{0,4})\.)?(?P<module>[\w.]+?)(?:\.(?P<part>weight|bias|scale))?", re.ASCII
)
_LATENTS = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
"""Modules of latent attention (`models.latent`)."""
_FURTHER = {f"nextn.{module}": module for module in (*mtp.MODULES.values(), "shared_head_norm")}
"""Modules of a block that predicts a further token (`models.mtp`)."""
_CONVOLUTIONS = ("conv.conv", "linear_attn.conv1d", "mamba.conv1d")
_EXPERT = re.compile(r"\.experts\.\d+\.")
"""What the name of an expert's tensor has, and that of all experts has not."""
_PIECE = 1 << 20
"""Number of weights dequantized at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """An order of rows that differs from Hugging Face's: as [outer, ..., inner, width], with two axes swapped there."""

    outer: int = 1
    inner: int
    """Length of the inner one of the axes that are swapped."""
    width: int = 1
    """Rows that stay together."""
    first: int = 0
    """The first row that it concerns."""
    columns: bool = False

    def undone(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        rows = tensor.T if self.columns else tensor
        axes = rows[self.first :].reshape(self.outer, -1, self.inner, self.width, *rows.shape[1:])
        rows = torch.cat((rows[: self.first], axes.transpose(1, 2).reshape(-1, *rows.shape[1:])))
        return rows.T.contiguous() if self.columns else rows


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """A tensor of a GGUF file as a Hugging Face checkpoint holds it."""

    info: TensorInfo
    order: Order | None = None
    """Its order of rows; None: the usual one."""
    convolves: bool = False
    flat: bool = False
    """Whether it is a vector, as which it may be stored as a matrix."""

    @property
    def path(self) -> Path:
        return self.info.path

    @property
    def name(self) -> str:
        return self.info.name

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape; in Hugging Face's format, a convolution's weight has one more axis."""
        shape = (math.prod(self.info.shape),) if self.flat else self.info.shape
        return (shape[0], 1, *shape[1:]) if self.convolves else shape

    @property
    def dtype(self) -> str:
        return self.info.kind

    def check_readable(self) -> None:
        """Check that its type is supported.

        Raises:
            UnsupportedModelError: it is not.
        """
        if self.dtype not in WHOLE_TYPES and self.dtype not in LOW_BIT_TYPES:
            raise UnsupportedModelError(
                f"{self.path}: the tensor '{self.name}' is stored as {self.dtype}, which cannot be read (it can: "
                f"{', '.join((*WHOLE_TYPES, *LOW_BIT_TYPES))}). Take another conversion of the model."
            )

    def rows(self, first: int, count: int) -> GgufTensor:
        row = self.info.size // max(1, math.prod(self.shape[:-1]))
        info = replace(
            self.info, shape=(count, self.shape[-1]), offset=self.info.offset + first * row, size=count * row
        )
        return replace(self, info=info)

    def read(self) -> torch.Tensor:
        """Dequantize the tensor, a piece at a time. The file is mapped while that lasts.

        Returns:
            float32, float16 or bfloat16 where it is stored so, else float16.

        Raises:
            UnsupportedModelError: its type cannot be read.
            CheckpointError: the file is gone, or shorter than it was.
        """
        import torch
        from gguf import GGMLQuantizationType, dequantize

        self.check_readable()
        kind = GGMLQuantizationType[self.dtype]
        width = self.shape[-1]
        rows = math.prod(self.shape[:-1])
        tensor = torch.empty(rows, width, dtype=getattr(torch, _READ_AS.get(self.dtype, "float16")))
        stored = self._mapped().reshape(rows, -1)
        step = max(1, _PIECE // width)
        for start in range(0, rows, step):
            piece = np.require(dequantize(stored[start : start + step], kind), requirements="W")
            tensor[start : start + step] = torch.from_numpy(piece).view(-1, width)
        whole = tensor.view(self.shape)
        return whole if self.order is None else self.order.undone(whole)

    def lattice(self) -> Lattice:
        """Its codes, scales and minimums as they are stored; of a type of `models.recipe.GGUF_GROUPS`, or Q5_K.

        Raises:
            CheckpointError: the file is gone or shorter than it was, or a scale is no number.
        """
        import torch

        rows, width = self.shape
        length = GGUF_GROUPS[self.dtype] if self.dtype in GGUF_GROUPS.keys() - TWO_LEVELS else SUPER_GROUP
        found = _blocks(self.dtype, np.asarray(self._mapped()).reshape(rows, width // length, -1))
        halves = (found[name] for name in ("scales", "minimums") if name in found)
        fine = all(
            np.isfinite(each).all() and not (self.dtype == FLOATS and (each == NOT_A_NUMBER).any()) for each in halves
        )
        if not fine:
            raise CheckpointError(
                f"{self.path}: scales of '{self.name}' are NaN, infinite or too large. {DOWNLOAD_AGAIN}"
            )
        parts = {name: np.ascontiguousarray(part.reshape(rows, -1)) for name, part in found.items()}
        if self.order is not None:
            parts = {name: self.order.undone(torch.from_numpy(part)).numpy() for name, part in parts.items()}
        return Lattice(kind=self.dtype, **parts)

    def _mapped(self) -> np.memmap[tuple[int, ...], np.dtype[np.uint8]]:
        try:
            if self.path.stat().st_size < self.info.offset + self.info.size:
                raise CheckpointError(f"{self.path}: ends within the tensor '{self.name}'. {DOWNLOAD_AGAIN}")
            return np.memmap(self.path, np.uint8, "r", self.info.offset, (self.info.size,))
        except OSError as error:
            raise CheckpointError(f"{self.path} cannot be read ({error.strerror}). {DOWNLOAD_AGAIN}") from error


def _blocks(kind: str, stored: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[Any]]:
    """The parts of a `Lattice`, [N, blocks, ..], of a type's blocks, uint8 [N, blocks, bytes].

    Source: the layouts are those of ggml-common.h, as the `gguf` package reads them.
    """
    blocks = stored.shape[:2]
    codes: npt.NDArray[Any]
    if kind == "Q6_K":
        scales, levels = _halves(stored[..., 208:])[..., 0], stored[..., 192:208].view(np.int8)
        low = stored[..., :128].reshape(*blocks, 2, 1, 64) >> np.array([[0], [4]], np.uint8) & 15
        high = stored[..., 128:192].reshape(*blocks, 2, 1, 32) >> np.array([[0], [2], [4], [6]], np.uint8) & 3
        codes = low.reshape(*blocks, -1) | high.reshape(*blocks, -1) << 4
        with np.errstate(over="ignore"):
            minimums = scales * np.float16(-32)
        return {
            "codes": codes,
            "scales": scales,
            "minimums": minimums,
            "group_scales": levels,
            "group_minimums": levels,
        }
    if kind == FLOATS:
        nibbles = np.stack((stored[..., 1:] & 15, stored[..., 1:] >> 4), axis=-2)
        return {"codes": nibbles, "scales": stored[..., 0]}
    count = 2 if kind in (*MINIMUMS, "Q4_K", "Q5_K") else 1
    halves, octets = _halves(stored[..., : 2 * count]), stored[..., 2 * count :]
    parts: dict[str, npt.NDArray[Any]] = {"scales": halves[..., 0]}
    if count > 1:
        parts["minimums"] = halves[..., 1] if kind in MINIMUMS else -halves[..., 1]
    if kind in ("Q4_K", "Q5_K"):
        # Four scales and four minimums have a byte each; its high two bits belong to one of the last four.
        first, high, last = octets[..., :8] & 63, octets[..., :8] >> 6 << 4, octets[..., 8:12]
        lasts = last & 15 | high[..., :4], last >> 4 | high[..., 4:]
        for name, own, of in zip(("group_scales", "group_minimums"), np.split(first, 2, axis=-1), lasts, strict=True):
            parts[name] = np.concatenate((own, of), axis=-1).view(np.int8)
        tops, octets = octets[..., None, 12:44], octets[..., -128:].reshape(*blocks, 4, 32)
    nibbles = octets[..., 4:] if kind in ("Q5_0", "Q5_1") else octets
    codes = octets ^ 128 if kind == "Q8_0" else np.stack((nibbles & 15, nibbles >> 4), axis=-2)
    if nibbles is not octets:  # a bit for each weight, in order
        codes = codes.reshape(*blocks, -1) | np.unpackbits(octets[..., :4], axis=-1, bitorder="little") << 4
    if kind == "Q5_K":  # the byte of an input channel has its fifth bit in each group
        codes = codes.reshape(*blocks, 8, 32) | (tops >> np.arange(8, dtype=np.uint8)[:, None] & 1) << 4
    return {"codes": codes, **parts}


def _halves(octets: npt.NDArray[np.uint8]) -> npt.NDArray[np.float16]:
    return np.ascontiguousarray(octets).view("<f2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A tensor of one number, which Hugging Face's checkpoints have, and GGUF files among their metadata."""

    path: Path
    name: str
    value: float
    shape: tuple[int, ...] = (1,)
    dtype: str = "F32"

    def check_readable(self) -> None:
        """It has been read."""

    def rows(self, first: int, count: int) -> Number:
        assert (first, count) == (0, 1)
        return self

    def read(self) -> torch.Tensor:
        import torch

        return torch.tensor([self.value])


def further_blocks(header: Header) -> int:
    """Blocks behind the last that predict further tokens (MTP)."""
    count = header.metadata.get(f"{header.metadata.get('general.architecture')}.nextn_predict_layers", 0)
    return count if isinstance(count, int) else 0


def _whole(family: Family) -> dict[str, str]:
    """Vectors of a block whose names in Hugging Face's format do not end like others, by their names in a file."""
    mixers: tuple[Mixer, ...] = ("attention", *family.mixer_sources)
    found: dict[str, str] = {}
    for own, part in _VECTORS.items():
        for mixer in mixers:
            if part in family.norms or part in family.mixer_sources.get(mixer, {}):
                found[own] = family.vector(f"layers.0.{part}", mixer)[0].removeprefix("model.layers.0.")
    if family.model_type == "falcon_h1":
        found["ffn_norm"] = family.vector("layers.0.post_norm")[0].removeprefix("model.layers.0.")
    if "inner.gate_up" in family.input_scales:
        found["altup_correct_scale.weight"] = family.input_scales["inner.gate_up"]
    return found | ({"ffn_down_exps.scale": family.expert_scales} if family.expert_scales else {})


def _block(architecture: str, family: Family) -> dict[str, str]:
    """Modules of a family's blocks in Hugging Face's format, by their names in a file."""
    norms = {own: family.norms[part] for own, part in _NORMS.items() if part in family.norms}
    norms[ARCHITECTURES[architecture].post_norm] = family.norms.get("post_norm", "")
    routers = dict(zip(("ffn_gate_inp", "ffn_gate_inp_shexp"), family.routers, strict=False))
    (o,), (*gate, up), (down,) = (family.linear_sources[kind] for kind in ("o", "gate_up", "down"))
    own = {"attn_output": o, "ffn_down": down, "ffn_up": up}  # with gate, where these are one matrix
    if gate:
        own["ffn_gate"] = gate[0]
    mixing = {module for sources in family.mixer_sources.values() for modules in sources.values() for module in modules}
    mixers = {name: module for own, modules in _MIXERS.items() if own in mixing for name, module in modules.items()}
    linears = family.linear_sources
    tokens = {own: linears[name][0] for own, name in _FURTHER_LINEAR.items() if name in linears}
    fused = {} if family.alternating else {"ffn_gate_up_exps": "mlp.experts.gate_up_proj"}
    latents = _LATENTS if QUERIES in family.linear_sources else {}
    further = _FURTHER if family.predicts_further else {}
    return {**_LINEAR, **norms, **own, **routers, **mixers, **fused, **tokens, **latents, **further}


def _outer(family: Family) -> dict[str, str]:
    """Modules outside of blocks; where the last norm is named for the embedding, it is in a file, too."""
    norm = "token_embd_norm" if family.last_norm.endswith("embedding_norm") else "output_norm"
    others = {own: family.outer[name] for own, name in _OUTER.items() if name in family.outer}
    return {"token_embd": "model.embed_tokens", norm: family.last_norm, "output": "lm_head", **others}


def tensors_of(header: Header, architecture: str, family: Family, orders: Mapping[str, Order]) -> dict[str, GgufTensor]:
    """All tensors of a file under their names in Hugging Face's format; tables of rotary factors under their own.

    Args:
        header: The file's.
        architecture: `general.architecture`.
        family: Its family, which names norms and fuses matrices.
        orders: By module (`self_attn.q_proj`), where rows stand in llama.cpp's order.

    Raises:
        CheckpointError: there is a tensor that the architecture does not know.
    """
    tensors: dict[str, GgufTensor] = {}
    blocks, whole, outer = _block(architecture, family), _whole(family), _outer(family)
    count = header.metadata.get(f"{architecture}.block_count")
    further = count - further_blocks(header) if family.predicts_further and isinstance(count, int) else math.inf
    for name, info in header.tensors.items():
        if name in _FACTORS:
            tensors[name] = GgufTensor(info=info)
            continue
        match = _NAME.fullmatch(name)
        module = own = None
        if match is not None and match["layer"] is not None and (rest := name.split(".", 2)[2]) in whole:
            module = own = whole[rest]
        elif match is not None and match["part"] is not None:
            module = (outer if match["layer"] is None else blocks).get(match["module"])
            own = f"{module}.{match['part']}"
        if module is None and match is not None and match["layer"] is not None and int(match["layer"]) >= further:
            continue  # the head and the embedding table once more
        if match is None or module is None:
            raise CheckpointError(
                f"{header.path}: the tensor '{name}' does not belong in a {architecture} model as this program knows "
                "them. Choose another conversion of the model."
            )
        convolves = module in _CONVOLUTIONS and match["part"] == "weight"
        flat = match["module"] in _COLUMNS
        tensor = GgufTensor(info=info, order=orders.get(module), convolves=convolves, flat=flat)
        if module == "mlp.shared_expert_gate" and len(info.shape) == 1:
            tensor = tensor.rows(0, 1)
        if str(module).endswith(_FIRST) and len(tensor.shape) == 3:
            stem, (count, rows, _) = str(module).removesuffix(_FIRST), tensor.shape
            tensors |= {f"{stem}.{at}.{match['part']}": tensor.rows(at * rows, rows) for at in range(count)}
            continue
        tensors[("" if match["layer"] is None else f"model.layers.{int(match['layer'])}.") + str(own)] = tensor
    return tensors


def name_in_file(name: str, architecture: str, family: Family) -> str:
    """The name in a GGUF file of a tensor with a given name in Hugging Face's format."""
    blocks = _block(architecture, family)
    for own, module in _outer(family).items():
        if name.startswith(f"{module}."):
            return own + name.removeprefix(module)
        if module.endswith(_FIRST) and name.startswith(module.removesuffix("0")):
            return f"{own}.weight"
    _, _, layer, rest = name.split(".", 3)
    for own, vector in _whole(family).items():
        if rest == vector:
            return f"blk.{layer}.{own}"
    module, _, part = _EXPERT.sub(".experts.", rest).rpartition(".")
    return f"blk.{layer}.{next(own for own, theirs in blocks.items() if theirs == module)}.{part}"
