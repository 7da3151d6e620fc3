"""Shapes and counts of a real run, and of one that only shows that the benchmark works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.catalogue import CATALOGUE
from models.spec import DeltaSpec, MixtureSpec, ModelSpec, RopeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is."""

    spec: ModelSpec
    """The model whose matrices are measured, and that decodes."""
    kinds: tuple[str, ...]
    """Layer types whose products are measured one by one."""
    bits: tuple[int, ...]
    """Bits of a weight."""
    copy_bytes: int
    """Bytes of one copy within the device's memory."""
    host_bytes: int
    """Bytes of one transfer from the host's memory."""
    rotated_bytes: int
    """Bytes of operands between two uses of the same one: several times the largest cache of a GPU, 50 to 130 MB."""
    rounds: int
    """Replays of each contestant."""
    prefill_rows: tuple[int, ...]
    """Rows of activations in a prefill step (M)."""
    delta: DeltaSpec
    """Heads of the delta rule that is measured."""
    delta_rows: tuple[int, ...]
    """Rows of a prompt's step that it reads."""
    batches: tuple[int, ...]
    """Rows of W4A8 products (M)."""
    attention_contexts: tuple[int, ...]
    """Tokens in the cache when attention alone is timed, what matters most first."""
    attention_launches: tuple[tuple[int, int], ...]
    """Splits and pipeline stages of other ways to launch it, timed at the first of these lengths."""
    knee_k_chunks: tuple[int, ...]
    """k_chunk along a knee curve."""
    knee_n_tbs: tuple[int, ...]
    """Thread blocks of the compensation kernel: one curve each."""
    reading_n_tbs: tuple[int, ...]
    """Thread blocks that read host memory."""
    budgets: tuple[float, ...]
    """Slowdown budgets in percent; 0 = no compensation."""
    families: Mapping[str, ModelSpec]
    """Blocks of models of several families, whose steps are timed."""
    family_k_chunks: tuple[int, ...]
    """k_chunk of their decoded tokens."""
    family_rows: int
    """Rows of a step of their prompts."""
    resident: tuple[float, ...]
    """Shares of experts on the device, where others are read over the bus."""
    context: int
    """Positions of the KV cache while decoding."""
    tokens: int
    """Tokens decoded for one measurement."""
    turns: int
    """Such measurements with compensation, and as many without, in turns."""
    readings: int
    """Measurements of the slowdown, of which the median has to keep the budget; odd."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of these layer types."""
        return {kind: self.spec.linear_shape(kind) for kind in self.kinds}


def llama(*, hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocab: int) -> ModelSpec:
    """A Llama 3 of some size."""
    return ModelSpec(
        family="llama",
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=hidden // heads,
        vocab_size=vocab,
        max_context=8192,
        norm_eps=1e-5,
        rope=RopeSpec(theta=500000.0, rotary_dim=hidden // heads),
        windows=(None,) * layers,
        bos_token_id=1,
        eos_token_ids=(2,),
    )


def blocks(title: str, count: int) -> ModelSpec:
    """The first blocks of a model of the catalogue, with a small vocabulary, so that they are all that takes time."""
    whole = next(model.spec for model in CATALOGUE if model.title == title)
    mixture = whole.mixture
    if mixture is not None:
        mixture = replace(mixture, dense=tuple(layer for layer in mixture.dense if layer < count))
    return replace(
        whole,
        num_layers=count,
        vocab_size=4096,
        windows=whole.windows[:count],
        mixers=whole.mixers[:count],
        unrotated=tuple(layer for layer in whole.unrotated if layer < count),
        mixture=mixture,
    )


FULL = Sizes(
    spec=llama(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    kinds=("qkv", "o", "gate_up", "down"),
    bits=(3, 4),
    copy_bytes=1 << 30,
    host_bytes=256 << 20,
    rotated_bytes=512 << 20,
    rounds=60,
    prefill_rows=(16, 128, 512),
    delta=DeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128),
    delta_rows=(512, 128),
    batches=(1, 16, 64, 512, 4, 8, 32, 128, 256, 2),
    attention_contexts=(65536, 262144, 8192),
    attention_launches=((16, 7), (32, 4), (32, 5), (32, 7), (32, 9), (64, 5), (64, 7), (64, 9)),
    knee_k_chunks=(2, 4, 8, 12, 16, 24, 32, 48, 64),
    knee_n_tbs=(2, 4, 8, 16),
    reading_n_tbs=(1, 2, 4, 8, 16, 32, 64, 128),
    budgets=(0.0, 2.5, 5.0, 10.0, 20.0),
    families={
        title: blocks(title, count)
        for title, count in {
            "Qwen3 30B-A3B": 6,
            "gpt-oss 20B": 6,
            "Qwen3.5 4B": 8,
            "Gemma 3 4B": 12,
            "Gemma 4 E2B": 35,
        }.items()
    },
    family_k_chunks=(0, 16),
    family_rows=512,
    resident=(0.75, 0.5, 0.25),
    context=2048,
    tokens=64,
    turns=5,
    readings=3,
)
"""Llama-3-8B, and the delta rule of Qwen3.5 4B and 9B."""

SMOKE = Sizes(
    spec=llama(hidden=64, intermediate=96, layers=1, heads=2, kv_heads=1, vocab=64),
    kinds=("o", "down"),
    bits=(3,),
    copy_bytes=1 << 16,
    host_bytes=1 << 16,
    rotated_bytes=1,
    rounds=1,
    prefill_rows=(4,),
    delta=DeltaSpec(key_heads=1, value_heads=2, key_dim=16, value_dim=16),
    delta_rows=(20,),
    batches=(2,),
    attention_contexts=(256,),
    attention_launches=((2, 5),),
    knee_k_chunks=(8,),
    knee_n_tbs=(1,),
    reading_n_tbs=(1, 2),
    budgets=(0.0, 50.0),
    families={
        "experts": replace(
            llama(hidden=32, intermediate=32, layers=1, heads=1, kv_heads=1, vocab=64),
            mixture=MixtureSpec(experts=4, chosen=2, width=32, normalized=True),
        )
    },
    family_k_chunks=(0,),
    family_rows=4,
    resident=(0.5,),
    context=32,
    tokens=1,
    turns=1,
    readings=1,
)
"""For the interpreter on a CPU: numbers mean nothing."""
