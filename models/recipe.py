"""`Recipe`: everything that decides what a quantized model looks like, apart from the checkpoint and the texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args

from models.errors import QuantizationError

Method = Literal["rtn", "gptq", "awq", "awq-gptq", "squeezellm"]
"""Base quantizers; `models.quantizers.quantizer` finds the code by the same name."""
METHODS: tuple[Method, ...] = get_args(Method)
"""All of them."""
DEFAULT_METHOD: Method = "gptq"
"""What a model is quantized by unless another is asked for."""
DEFAULT_GROUP_SIZE = 64
"""Input channels that share a scale unless another number is asked for."""
GOOD_FOR: Mapping[Method, str] = {
    "rtn": "plain rounding, fast",
    "gptq": "errors made up for, best",
    "awq": "spares salient channels",
    "awq-gptq": "both, slower",
    "squeezellm": "levels to fit each row, slowest",
}
"""What each is good for, in a few words."""
CODEBOOK_METHODS = frozenset({"squeezellm"})
"""The methods whose matrices have a codebook for each output channel instead of scales and zero-points of groups."""
SMALLEST_BITS, LARGEST_BITS = 3, 4
"""Range of `Recipe.bits`; a number between is an average over blocks."""
RESIDUAL_BITS = (0, 2, 4, 8, 16)
"""Widths of the residuals; 0 keeps none, 16 keeps them in half precision."""
LARGEST_K_CHUNK = 512
"""The most salient channels of 1024 that can be expected to be restored: the quantizer needs others to look at."""
HEAD_BITS = (3, 4)
"""Widths of the output head."""
EXPECTED_K_CHUNK = 64
"""The most that a model is made for unless the recipe says otherwise: a budget of some percent buys a quarter of it on
a processor, all of it on the GPUs this is made for."""
_LATER = frozenset({"block_bits", "smooth_attention"})
"""Keys that a recipe's JSON object leaves out at their defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a checkpoint becomes a low-bit model."""

    method: str = DEFAULT_METHOD
    """Base quantizer: `rtn` (round-to-nearest with clip search), `gptq` (the same with error feedback), `awq`
    (activation-aware scales and clipping), `awq-gptq` (error feedback after AWQ's scales) or `squeezellm` (a codebook
    for each output channel)."""
    bits: float = 4
    """Bits of the linear layers of the blocks: 3, 4, or a number between, the average over blocks of 3 and of 4."""
    block_bits: tuple[int, ...] | None = None
    """Bits of every block, 3 or 4, where `bits` is a number between; None until they are allocated."""
    group_size: int = DEFAULT_GROUP_SIZE
    """Input channels that share a scale and a zero-point; a multiple of 32. With a codebook, those of an activation."""
    residual_bits: int = 4
    """Bits of the residuals W - Ŵ kept in RAM for error compensation: 0 (none), 2, 4, 8 or 16 (half precision)."""
    head_bits: int = 4
    """Bits of the output head."""
    expected_k_chunk: int = EXPECTED_K_CHUNK
    """The most salient channels per 1024 that error compensation is expected to restore when the model runs: base
    quantizers that work with second moments minimize the error with none, a quarter and all of these restored (see
    `models.salience`), and residuals are scaled for what is restored. Without residuals it counts as 0."""
    smooth_attention: bool = False
    """Whether key channels are evened out for a KV cache of few bits, at no cost when the model runs."""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise QuantizationError(f"unknown method {self.method!r}; choose one of: {', '.join(METHODS)}")
        for name in ("group_size", "residual_bits", "head_bits", "expected_k_chunk"):
            value = getattr(self, name)
            if type(value) is not int:
                raise QuantizationError(f"{name} must be a whole number, not {value!r}")
        if type(self.smooth_attention) is not bool:
            raise QuantizationError(f"smooth_attention must be true or false, not {self.smooth_attention!r}")
        self._check_bits()
        if self.group_size < 32 or self.group_size % 32:
            raise QuantizationError(f"group_size must be a multiple of 32, not {self.group_size}")
        if self.residual_bits not in RESIDUAL_BITS:
            raise QuantizationError(f"residual_bits must be one of {_listed(RESIDUAL_BITS)}, not {self.residual_bits}")
        if not 0 <= self.expected_k_chunk <= LARGEST_K_CHUNK:
            raise QuantizationError(
                f"expected_k_chunk must be from 0 to {LARGEST_K_CHUNK}, not {self.expected_k_chunk}"
            )
        if self.head_bits not in HEAD_BITS:
            raise QuantizationError(f"head_bits must be one of {_listed(HEAD_BITS)}, not {self.head_bits}")

    def _check_bits(self) -> None:
        number = isinstance(self.bits, int | float) and not isinstance(self.bits, bool)
        if not number or not SMALLEST_BITS <= self.bits <= LARGEST_BITS:
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

    @property
    def mixed(self) -> bool:
        """Whether some blocks have 3 bits and others 4."""
        return not isinstance(self.bits, int)

    def layer_bits(self, name: str) -> int:
        """Bits of the linear layer `name` (`layers.3.qkv`, `head`).

        Raises:
            QuantizationError: the recipe is mixed and says nothing of that block.
        """
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
    def codebook(self) -> bool:
        """Whether matrices have a codebook for each output channel."""
        return self.method in CODEBOOK_METHODS

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
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
            raise QuantizationError(f"unknown recipe keys: {', '.join(unknown)}; known are: {', '.join(sorted(known))}")
        if missing:
            raise QuantizationError(f"recipe keys are missing: {', '.join(missing)}")
        if not isinstance(data.get("block_bits", []), list):
            raise QuantizationError(f"block_bits must be a list, not {data['block_bits']!r}")
        return cls(**data)


_DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Recipe)}


def _shown(value: object) -> str:
    """A number as a person writes it; anything else as Python does."""
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
