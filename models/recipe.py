"""`Recipe`: all settings of a quantization, apart from the checkpoint and the texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from models.errors import QuantizationError

Method = Literal["rtn", "gptq", "trellis", "awq", "awq-gptq", "squeezellm", "qoq"]
"""Base quantizers; `models.quantizers.quantizer` finds the code by the same name."""
METHODS: tuple[Method, ...] = get_args(Method)
"""All methods."""
KEPT = "kept"
"""In place of a method: weights that are low-bit already stay as they are (`models.quantize.kept`)."""
INTEGERS: Mapping[str, int] = {"int3": 3, "int4": 4}
"""Integers of AWQ, GPTQ and compressed-tensors that are kept, by their bits; their groups are the checkpoint's."""
ZERO_POINTS: Mapping[str, int] = {"Q4_0": 8, "Q5_0": 16}
"""Types of GGUF files with one zero-point for all weights, which is stored; Q8_0's is not."""
MINIMUMS = frozenset({"Q4_1", "Q5_1"})
"""Types with a minimum in half precision for each group, in place of a zero-point."""
GGUF_GROUPS: Mapping[str, int] = {
    **dict.fromkeys((*ZERO_POINTS, *sorted(MINIMUMS), "Q8_0", "Q4_K", "MXFP4"), 32),
    "Q6_K": 16,
}
"""Types of GGUF files that are kept, by the input channels that share a scale."""
KEPT_BITS: Mapping[str, int] = {
    "Q4_0": 4,
    "Q4_1": 4,
    "Q5_0": 5,
    "Q5_1": 5,
    "Q8_0": 8,
    "Q4_K": 4,
    "Q6_K": 6,
    "MXFP4": 4,
    **INTEGERS,
    "FP8": 8,
}
"""All types that are kept, by the bits of their codes."""
KEPT_UNASKED = 5
"""The most bits of weights that are kept unless asked for otherwise: codes of more are rounded to 4 bits."""
TWO_LEVELS = frozenset({"Q4_K", "Q6_K"})
"""Types whose groups have factors in whole numbers, and share half-precision ones in `SUPER_GROUP`."""
FLOATS, FLOATS_8 = "MXFP4", "FP8"
"""The types of floating-point numbers of 4 bits, which folders have, too, and of 8 bits, which they alone have."""
OWN_GROUPS: Mapping[str, int] = {**GGUF_GROUPS, FLOATS_8: 128}
"""Types whose groups are the same in every checkpoint; FP8's blocks, rows and matrices consist of such."""
SUPER_GROUP = 256
LARGEST_KEPT_GROUP = 256
"""Larger groups of integers are not kept: activations of 8 bits share a scale in a group, too."""
KEEPS = "weights of few bits as they are: of GGUF files, AWQ, GPTQ, FP8 and MXFP4"
"""Its short description."""
AskedMethod = Literal["auto", "kept", Method]
"""A method, what `chosen_method` takes, or `KEPT`."""
WEIGHT_ONLY_METHODS = tuple(method for method in METHODS if method != "qoq")
"""The methods whose products take activations of any precision; `qoq` rounds activations itself."""
DEFAULT_METHOD: Method = "gptq"
"""The default method where codes are to be uniform."""
DEFAULT_GROUP_SIZE = 64
"""The default number of input channels that share a scale."""
GOOD_FOR: Mapping[AskedMethod, str] = {
    "auto": "best for the model: trellis or gptq",
    "rtn": "plain rounding, fast",
    "gptq": "compensates rounding errors",
    "trellis": "codes that share bits, loses least",
    "awq": "protects salient channels",
    "awq-gptq": "awq and gptq together, slower",
    "squeezellm": "a codebook for each row, slowest",
    "qoq": "integer arithmetic throughout, W4A8",
}
"""A short description of each method."""
CODEBOOK_METHODS = frozenset({"squeezellm"})
"""The methods whose matrices have a codebook for each output channel instead of scales and zero-points of groups."""
SMALLEST_BITS, LARGEST_BITS = 3, 4
"""Range of `Recipe.bits`; a number between is an average over blocks."""
TRELLIS_BITS = 2
"""Bits that only a trellis goes down to."""
RESIDUAL_BITS = (0, 2, 4, 8, 16)
"""Widths of the residuals; 0 keeps none, 16 keeps them in half precision."""
LARGEST_K_CHUNK = 512
"""Maximum of `Recipe.expected_k_chunk`; the quantizer needs other channels to work with."""
HEAD_BITS = (3, 4)
"""Widths of the output head."""
EXPECTED_K_CHUNK = 64
"""Default of `Recipe.expected_k_chunk`: a budget of a few percent allows a quarter of it on a processor, and all of it
on the supported GPUs."""
QOQ_GROUP_SIZE = 128
"""`DEFAULT_GROUP_SIZE` of `qoq`."""
QOQ_STEPS = ("rotate", "reorder", "smooth_attention", "smooth_outputs", "clip")
"""The steps of `qoq` before rounding a block, in order; fields of `Recipe`."""
QOQ_USUAL = frozenset(QOQ_STEPS) - {"rotate"}
"""The default steps. Rotation raises SmolLM2's perplexity by a tenth: see docs/decisions/models.md."""
_OF_QOQ = frozenset(QOQ_STEPS) - {"smooth_attention"}
_LATER = frozenset({"block_bits", "types", *QOQ_STEPS})
"""Keys that a recipe's JSON object leaves out at their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The settings that turn a checkpoint into a low-bit model."""

    method: str = DEFAULT_METHOD
    """Base quantizer: `rtn` (round-to-nearest with clip search), `gptq` (the same with error feedback), `trellis`
    (codes along a trellis, of rotated weights, with error feedback and one scale for each output channel), `awq`
    (activation-aware scales and clipping), `awq-gptq` (error feedback after AWQ's scales), `squeezellm` (a codebook
    for each output channel) or `qoq` (progressive groups or one scale for each output channel, products in whole
    numbers with activations of 8 bits)."""
    bits: float = 4
    """Bits of the linear layers of the blocks: 3, 4, or a number between, the average over blocks of 3 and of 4. 2 with
    a trellis."""
    block_bits: tuple[int, ...] | None = None
    """Bits of every block, 3 or 4, where `bits` is a number between; None until they are allocated."""
    types: Mapping[str, str] | None = None
    """`KEPT`: the type of every linear layer, of `KEPT_BITS`; `bits` are then those of most weights."""
    group_size: int = DEFAULT_GROUP_SIZE
    """Input channels that share a scale and a zero-point; a multiple of 32. With a codebook, those of an activation.
    0, for `qoq`: all that an output channel has."""
    residual_bits: int = 4
    """Bits of the residuals W - Ŵ kept in RAM for error compensation: 0 (none), 2, 4, 8 or 16 (half precision)."""
    head_bits: int = 4
    expected_k_chunk: int = EXPECTED_K_CHUNK
    """The most salient channels per 1024 that error compensation is expected to restore when the model runs: base
    quantizers that work with second moments minimize the error with none, a quarter and all of these restored (see
    `models.quantize.calibration`), and residuals are scaled for what is restored. Without residuals it counts as 0."""
    smooth_attention: bool = False
    """Whether key channels are smoothed for a low-bit KV cache, at no cost when the model runs."""
    rotate: bool = False
    """`qoq`: whether the residual stream is rotated by a Hadamard matrix (`models.quantize.rotated`)."""
    reorder: bool = False
    """`qoq`: whether channels of the MLP are sorted by their salience, so that similar ones share a group."""
    smooth_outputs: bool = False
    """`qoq`: whether the inputs of `o` and `down` are smoothed (`models.quantize.qoq`)."""
    clip: bool = False
    """`qoq`: whether ranges are clipped by a grid search, for the error of outputs rather than of weights."""

    def __post_init__(self) -> None:
        if self.method not in (*METHODS, KEPT) or self.kept != (self.types is not None):
            raise QuantizationError(f"unknown method {self.method!r}; choose one of: {', '.join(METHODS)}")
        for name in ("group_size", "residual_bits", "head_bits", "expected_k_chunk"):
            value = getattr(self, name)
            if type(value) is not int:
                raise QuantizationError(f"{name} must be a whole number, not {value!r}")
        for name in QOQ_STEPS:
            if type(getattr(self, name)) is not bool:
                raise QuantizationError(f"{name} must be true or false, not {getattr(self, name)!r}")
        self._check_bits()
        self._check_qoq()
        if (self.group_size < 32 and not (self.per_token and self.group_size == 0)) or self.group_size % 32:
            also = ", or 0 for a whole output channel" if self.per_token else ""
            raise QuantizationError(f"group_size must be a multiple of 32{also}, not {self.group_size}")
        if self.trellis and self.group_size != DEFAULT_GROUP_SIZE:
            raise QuantizationError(
                f"a trellis has one scale for each output channel; leave group_size at {DEFAULT_GROUP_SIZE}, the "
                f"channels that are rotated together, instead of {self.group_size}"
            )
        if self.residual_bits not in RESIDUAL_BITS:
            raise QuantizationError(f"residual_bits must be one of {_listed(RESIDUAL_BITS)}, not {self.residual_bits}")
        if not 0 <= self.expected_k_chunk <= LARGEST_K_CHUNK:
            raise QuantizationError(
                f"expected_k_chunk must be from 0 to {LARGEST_K_CHUNK}, not {self.expected_k_chunk}"
            )
        if self.head_bits not in HEAD_BITS:
            raise QuantizationError(f"head_bits must be one of {_listed(HEAD_BITS)}, not {self.head_bits}")

    def _check_bits(self) -> None:
        if self.types is not None:
            own = {*self.types.values()}
            if not own <= KEPT_BITS.keys() or self.bits not in KEPT_BITS.values() or self.residual_bits:
                raise QuantizationError(
                    f"types must be among {_listed(tuple(KEPT_BITS))}, without residuals, not {own}"
                )
            return
        number = isinstance(self.bits, int | float) and not isinstance(self.bits, bool)
        if number and self.bits == TRELLIS_BITS:
            if not self.trellis:
                raise QuantizationError(f"{self.method} has no 2 bits; choose the method trellis, or 3 bits")
        elif not number or not SMALLEST_BITS <= self.bits <= LARGEST_BITS:
            raise QuantizationError(
                f"bits must be {SMALLEST_BITS}, {LARGEST_BITS} or a number between, not {_shown(self.bits)}"
            )
        if self.bits == int(self.bits):
            object.__setattr__(self, "bits", int(self.bits))
        if self.block_bits is None:
            return
        object.__setattr__(self, "block_bits", tuple(self.block_bits))
        if not self.mixed or any(type(bits) is not int or bits not in (3, 4) for bits in self.block_bits):
            raise QuantizationError(
                f"block_bits must hold 3 or 4 for every block of a model of mixed bits, not {self.block_bits!r}"
            )

    def _check_qoq(self) -> None:
        if self.per_token:
            if self.bits != LARGEST_BITS or self.head_bits != LARGEST_BITS:
                raise QuantizationError(
                    f"qoq supports only {LARGEST_BITS} bits, not {_shown(self.bits)} and {self.head_bits}"
                )
            return
        steps = sorted(name for name in _OF_QOQ if getattr(self, name))
        if steps:
            raise QuantizationError(f"{', '.join(steps)}: only for the method qoq, not for {self.method}")

    @classmethod
    def usual(cls, method: str, **changes: Any) -> Recipe:
        """A method's default recipe.

        Args:
            method: One of `METHODS`. `qoq` has `QOQ_USUAL`, groups of its own size and no residuals.
            changes: Fields that differ from it. Without groups channels are not reordered.

        Raises:
            QuantizationError: the recipe is invalid.
        """
        if method != "qoq":
            return cls(method=method, **changes)
        steps = {step: step in QOQ_USUAL for step in QOQ_STEPS} | {"reorder": changes.get("group_size") != 0}
        usual: dict[str, Any] = {"group_size": QOQ_GROUP_SIZE, "residual_bits": 0, **steps}
        return cls(method=method, **{**usual, **changes})

    @property
    def per_token(self) -> bool:
        """Whether matrices are multiplied in whole numbers with activations of one scale a token."""
        return self.method == "qoq"

    @property
    def progressive(self) -> bool:
        """Whether matrices have two levels of scales: of an output channel, and of its groups."""
        return self.per_token and self.group_size > 0

    def group_of(self, width: int, name: str = "") -> int:
        """Input channels that share a scale in the linear layer `name` with so many; a multiple of 32, or 16."""
        return OWN_GROUPS.get((self.types or {}).get(name, ""), self.group_size) or -(-width // 32) * 32

    @property
    def mixed(self) -> bool:
        """Whether some blocks have 3 bits and others 4."""
        return not isinstance(self.bits, int)

    def layer_bits(self, name: str) -> int:
        """Bits of the linear layer `name` (`layers.3.qkv`, `head`).

        Raises:
            QuantizationError: the recipe is mixed and says nothing of that block.
        """
        if self.types is not None:
            return KEPT_BITS[self.types[name]]
        if name == "head":
            return self.head_bits
        if not self.mixed:
            return int(self.bits)
        layer = int(name.split(".")[1])
        if self.block_bits is None or layer >= len(self.block_bits):
            raise QuantizationError(f"the recipe has {self.bits} bits on average, and none for the block of {name}")
        return self.block_bits[layer]

    @property
    def left_out(self) -> int:
        """The most salient channels per 1024 that quantizers leave to compensation."""
        return self.expected_k_chunk if self.residual_bits else 0

    @property
    def kept(self) -> bool:
        """Whether matrices are those of the source, bit for bit."""
        return self.method == KEPT

    @property
    def trellis(self) -> bool:
        """Whether matrices are code streams of a trellis (`models.trellis`)."""
        return self.method == "trellis"

    @property
    def uniform(self) -> bool:
        """Whether codes are evenly spaced numbers, with scales and zeros of groups."""
        return not self.codebook and not self.trellis

    @property
    def codebook(self) -> bool:
        return self.method in CODEBOOK_METHODS

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        return {key: value for key, value in data.items() if key not in _LATER or value != _DEFAULTS[key]}

    @classmethod
    def from_json(cls, data: object) -> Recipe:
        """Read `to_json`'s object.

        Raises:
            QuantizationError: not an object, a key is missing or unknown, or a value is not acceptable.
        """
        if not isinstance(data, dict):
            raise QuantizationError(f"a recipe is a JSON object, not {type(data).__name__}")
        data = {"expected_k_chunk": 0, **data}  # recipes written before there was one
        known = _DEFAULTS.keys()
        unknown, missing = sorted(map(str, data.keys() - known)), sorted(known - data.keys() - _LATER)
        if unknown:
            raise QuantizationError(f"unknown recipe keys: {', '.join(unknown)}; known: {', '.join(sorted(known))}")
        if missing:
            raise QuantizationError(f"recipe keys are missing: {', '.join(missing)}")
        if not isinstance(data.get("block_bits", []), list):
            raise QuantizationError(f"block_bits must be a list, not {data['block_bits']!r}")
        return cls(**data)


def chosen_method(asked: AskedMethod, group_size: int | None = None, *, latent: bool = False) -> Method:
    """The method that was asked for; for `auto`, the one that loses least.

    A trellis loses a third of what uniform codes do, in fewer bytes (docs/decisions/models.md). Models with latent
    attention, and groups of another size than the default, have uniform codes.
    """
    if asked == "kept":
        raise QuantizationError("weights that are kept have the bits of their file; no method is chosen by bits")
    if asked != "auto":
        return asked
    return DEFAULT_METHOD if latent or group_size not in (None, DEFAULT_GROUP_SIZE) else "trellis"


_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Recipe)}


def _shown(value: object) -> str:
    """A number without trailing zeros; anything else as Python shows it."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _listed(values: tuple[object, ...]) -> str:
    return ", ".join(map(str, values))
