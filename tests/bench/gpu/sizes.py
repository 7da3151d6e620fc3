"""Shapes and counts of a real run, and of one that only shows that the benchmark works."""

from __future__ import annotations

from dataclasses import dataclass

from models.spec import ModelSpec, RopeSpec


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


FULL = Sizes(
    spec=llama(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    kinds=("qkv", "o", "gate_up", "down"),
    bits=(3, 4),
    copy_bytes=1 << 30,
    host_bytes=256 << 20,
    rotated_bytes=512 << 20,
    rounds=60,
    prefill_rows=(16, 128, 512),
    batches=(1, 16, 64, 512, 4, 8, 32, 128, 256, 2),
    attention_contexts=(65536, 262144, 8192),
    attention_launches=((16, 7), (32, 4), (32, 5), (32, 7), (32, 9), (64, 5), (64, 7), (64, 9)),
    knee_k_chunks=(2, 4, 8, 12, 16, 24, 32, 48, 64),
    knee_n_tbs=(2, 4, 8, 16),
    reading_n_tbs=(1, 2, 4, 8, 16, 32, 64, 128),
    budgets=(0.0, 2.5, 5.0, 10.0, 20.0),
    context=2048,
    tokens=64,
    turns=5,
    readings=3,
)
"""Llama-3-8B."""

SMOKE = Sizes(
    spec=llama(hidden=64, intermediate=96, layers=1, heads=2, kv_heads=1, vocab=64),
    kinds=("o", "down"),
    bits=(3,),
    copy_bytes=1 << 16,
    host_bytes=1 << 16,
    rotated_bytes=1,
    rounds=1,
    prefill_rows=(4,),
    batches=(2,),
    attention_contexts=(256,),
    attention_launches=((2, 5),),
    knee_k_chunks=(8,),
    knee_n_tbs=(1,),
    reading_n_tbs=(1, 2),
    budgets=(0.0, 50.0),
    context=32,
    tokens=1,
    turns=1,
    readings=1,
)
"""For the interpreter on a CPU: numbers mean nothing."""
