"""`Recipe`: everything that decides what a quantized model looks like, apart from the checkpoint and the texts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from models.errors import QuantizationError

METHOD_BITS: Mapping[str, tuple[int, ...]] = {"rtn": (3, 4), "gptq": (3, 4)}
"""Bit widths of every base quantizer; `models.quantizers.quantizer` finds the code by the same name."""
RESIDUAL_BITS = (0, 2, 4, 8, 16)
"""Widths of the residuals; 0 keeps none, 16 keeps them in half precision."""
HEAD_BITS = (3, 4)
"""Widths of the output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a checkpoint becomes a low-bit model."""

    method: str = "rtn"
    """Base quantizer: `rtn` (round-to-nearest with clip search) or `gptq` (the same with error feedback)."""
    bits: int = 4
    """Bits of every linear layer of the blocks."""
    group_size: int = 128
    """Input channels that share a scale and a zero-point; a multiple of 32."""
    residual_bits: int = 4
    """Bits of the residuals W - Ŵ kept in RAM for error compensation: 0 (none), 2, 4, 8 or 16 (half precision)."""
    head_bits: int = 4
    """Bits of the output head, round-to-nearest whatever the method."""

    def __post_init__(self) -> None:
        if self.method not in METHOD_BITS:
            raise QuantizationError(f"unknown method {self.method!r}; choose one of: {', '.join(METHOD_BITS)}")
        for name in ("bits", "group_size", "residual_bits", "head_bits"):
            value = getattr(self, name)
            if type(value) is not int:
                raise QuantizationError(f"{name} must be a whole number, not {value!r}")
        if self.bits not in METHOD_BITS[self.method]:
            choices = _listed(METHOD_BITS[self.method])
            raise QuantizationError(f"{self.method} does not make {self.bits}-bit models; choose one of: {choices}")
        if self.group_size < 32 or self.group_size % 32:
            raise QuantizationError(f"group_size must be a multiple of 32, not {self.group_size}")
        if self.residual_bits not in RESIDUAL_BITS:
            raise QuantizationError(f"residual_bits must be one of {_listed(RESIDUAL_BITS)}, not {self.residual_bits}")
        if self.head_bits not in HEAD_BITS:
            raise QuantizationError(f"head_bits must be one of {_listed(HEAD_BITS)}, not {self.head_bits}")

    def layer_bits(self, name: str) -> int:
        """Bits of the linear layer `name` (`layers.3.qkv`, `head`)."""
        return self.head_bits if name == "head" else self.bits

    def layer_method(self, name: str) -> str:
        """Base quantizer of the linear layer `name`."""
        return "rtn" if name == "head" else self.method

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: object) -> Recipe:
        """Read `to_json`'s object.

        Raises:
            QuantizationError: not an object, a key is missing or unknown, or a value is not acceptable.
        """
        if not isinstance(data, dict):
            raise QuantizationError(f"a recipe is a JSON object, not {type(data).__name__}")
        known = {field.name for field in fields(cls)}
        unknown, missing = sorted(map(str, data.keys() - known)), sorted(known - data.keys())
        if unknown:
            raise QuantizationError(f"unknown recipe keys: {', '.join(unknown)}; known are: {', '.join(sorted(known))}")
        if missing:
            raise QuantizationError(f"recipe keys are missing: {', '.join(missing)}")
        return cls(**data)


def _listed(values: tuple[int, ...]) -> str:
    return ", ".join(map(str, values))
