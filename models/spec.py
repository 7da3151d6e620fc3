"""`ModelSpec`: everything needed to run an architecture, independent of any checkpoint's naming."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "longrope"]

LAYER_TYPES = ("qkv", "o", "gate_up", "down")
"""The linear layers of a block, by the names of QDEC §4.4."""
LAYER_KINDS = (*LAYER_TYPES, "head")
"""All kinds of linear layers: those of a block, and the output head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding, half-split convention (dimension i pairs with i + rotary_dim / 2)."""

    theta: float = 10000.0
    """Base of the geometric frequency progression."""
    rotary_dim: int = 0
    """Leading dimensions of a head that rotate; the rest passes through (Phi's partial rotary factor)."""
    kind: RopeKind = "default"
    """The rescaling of the frequencies."""
    factor: float = 1.0
    """Context extension factor of `linear` and `llama3`."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above original_context / low_freq_factor are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths under original_context / high_freq_factor are left alone."""
    original_context: int = 0
    """Context length of pre-training, for `llama3` and `longrope`; 0 where it does not apply."""
    short_factor: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency while the context fits original_context."""
    long_factor: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency beyond it."""
    attention_factor: float = 1.0
    """Multiplier of cos and sin (`longrope`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: pre-norm blocks of grouped-query attention and a gated MLP."""

    family: str
    """`model_type` of its family, see `models.families`."""
    hidden_size: int
    """C."""
    intermediate_size: int
    """Width of the MLP."""
    num_layers: int
    """Number of blocks."""
    num_heads: int
    """H, query heads."""
    num_kv_heads: int
    """H_kv, key-value heads; divides H."""
    head_dim: int
    """D."""
    vocab_size: int
    """V."""
    max_context: int
    """Longest context in tokens."""
    norm_eps: float
    """Epsilon of every RMSNorm."""
    rope: RopeSpec
    """Rotary embedding."""
    windows: tuple[int | None, ...]
    """Per block: sliding window in tokens (a query sees itself and the window - 1 tokens before it), or None."""
    unrotated: tuple[int, ...] = ()
    """Blocks without a rotary embedding (SmolLM3)."""
    qkv_bias: bool = False
    """Whether q, k and v have biases (Qwen2)."""
    o_bias: bool = False
    """Whether the output projection has a bias."""
    mlp_bias: bool = False
    """Whether gate, up and down have biases."""
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm per head before the rotation (Qwen3)."""
    tied: bool = False
    """Whether the output head is the embedding table."""
    bos_token_id: int | None = None
    """Beginning-of-sequence token."""
    eos_token_ids: tuple[int, ...] = field(default=())
    """Every token that ends a generation, from config.json and generation_config.json."""

    @property
    def q_width(self) -> int:
        """Channels of all query heads, H * D."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key (or value) heads, H_kv * D."""
        return self.num_kv_heads * self.head_dim

    @property
    def parameters(self) -> int:
        """Weights of the full-precision model; a tied embedding counts once."""
        count = self.vocab_size * self.hidden_size * (1 if self.tied else 2) + self.hidden_size
        for name in self.linear_names()[:-1]:
            rows, width = self.linear_shape(name.rsplit(".", 1)[-1])
            count += rows * width + (rows if self.has_bias(name) else 0)
        return count + sum(sum(self.block_norms(layer).values()) for layer in range(self.num_layers))

    def block_norms(self, layer: int) -> dict[str, int]:
        """Widths of a block's norms by their names, `layers.3.input_norm`."""
        norms = {"input_norm": self.hidden_size, "post_norm": self.hidden_size}
        if self.qk_norm:
            norms |= {"q_norm": self.head_dim, "k_norm": self.head_dim}
        return {f"layers.{layer}.{norm}": width for norm, width in norms.items()}

    def norm_names(self) -> tuple[str, ...]:
        """Names of all norms, the one before the head last."""
        return (*(name for layer in range(self.num_layers) for name in self.block_norms(layer)), "norm")

    def has_bias(self, name: str) -> bool:
        """Whether a linear layer, `layers.3.qkv`, has a bias."""
        kind = name.rsplit(".", 1)[-1]
        biased = {"qkv": self.qkv_bias, "o": self.o_bias, "gate_up": self.mlp_bias, "down": self.mlp_bias}
        return biased.get(kind, False)

    def linear_shape(self, layer_type: str) -> tuple[int, int]:
        """Shape [N, K] of a linear layer by type: `qkv`, `o`, `gate_up`, `down` or `head` (fused, as stored)."""
        shapes = {
            "qkv": (self.q_width + 2 * self.kv_width, self.hidden_size),
            "o": (self.hidden_size, self.q_width),
            "gate_up": (2 * self.intermediate_size, self.hidden_size),
            "down": (self.hidden_size, self.intermediate_size),
            "head": (self.vocab_size, self.hidden_size),
        }
        return shapes[layer_type]

    def linear_names(self) -> tuple[str, ...]:
        """Names of all linear layers in the order they run, `layers.0.qkv` to `head`."""
        blocks = tuple(f"layers.{i}.{kind}" for i in range(self.num_layers) for kind in LAYER_TYPES)
        return (*blocks, "head")
