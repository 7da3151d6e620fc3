"""The amount of work of a first look: on a card, and in the dry mode that only shows that the command works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.spec import MixtureSpec, ModelSpec
from runtime.kv.kinds import KVKind
from tests.bench.gpu.sizes import FULL as GPU
from tests.bench.gpu.sizes import SMOKE, Sizes, blocks, llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """How much each part does."""

    bench: Sizes
    """What the benchmark's own functions take: shapes, bytes, rounds."""
    beside: tuple[str, ...]
    """Layer types whose product and compensation run beside each other: one leaves a card room, one fills it."""
    n_tbs: tuple[int, ...]
    """Thread blocks of the compensation beside a product."""
    k_chunk: int
    """Channels of it per 1024."""
    replays: int
    """Of each captured graph."""
    spec: ModelSpec
    """A model of random weights whose tokens are compared with the reference's."""
    prompt: int
    """Tokens of its prompt."""
    decoded: int
    """Tokens decoded after it, over the border of a page."""
    kinds: tuple[KVKind, ...]
    """Caches that it is decoded with."""
    wide: ModelSpec
    """A model of the widths of real ones, of which several numbers of rows and slots are compared."""
    wide_prompt: int
    """Tokens of its prompts."""
    wide_decoded: int
    """Tokens decoded after one."""
    rows: tuple[int, ...]
    """Rows of its further steps."""
    slots: int
    """Sequences that share these."""
    families: Mapping[str, ModelSpec]
    """Blocks of other families than Llama's, compared in the same way."""
    selected: tuple[int, ...]
    """Input channels of the selections that are compared with the oracle's."""
    tuned: ModelSpec
    """A model of random weights that is tuned, loaded and unloaded."""
    context: int
    """Of that model, when it is loaded and unloaded."""
    most_by_longer: float
    """Time of a product and its compensation by the longer of the two, at most."""
    least_of_link: float
    """Speed of the fetch by that of the copy engine, at least."""
    chat_tokens: int
    """Tokens of the bundled model's answer."""


_BLOCKS = {
    "Gemma 4 E2B": 5,
    "Gemma 4 26B-A4B": 1,
    "Qwen3 30B-A3B": 1,
    "gpt-oss 20B": 1,
    "Qwen3.5 4B": 4,
    "Gemma 3 4B": 6,
}
"""Models and how many blocks of each: the first ones have what is special about the family."""

FULL = Amount(
    bench=replace(GPU, rounds=30, tokens=48, turns=3, readings=3, kinds=("qkv", "o", "gate_up", "down")),
    beside=("o", "gate_up"),
    n_tbs=(1, 2, 4, 6, 8, 12, 24),
    k_chunk=16,
    replays=5000,
    spec=llama(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, vocab=512),
    prompt=310,
    decoded=90,
    kinds=("int4", "fp16", "int8", "hierarchical", "gear4"),
    wide=llama(hidden=4096, intermediate=4096, layers=1, heads=32, kv_heads=8, vocab=512),
    wide_prompt=40,
    wide_decoded=2,
    rows=(2, 5, 8, 16),
    slots=3,
    families={title: blocks(title, count) for title, count in _BLOCKS.items()},
    selected=(4096, 14336),
    tuned=llama(hidden=4096, intermediate=14336, layers=6, heads=32, kv_heads=8, vocab=4096),
    context=8192,
    most_by_longer=1.15,
    least_of_link=0.5,
    chat_tokens=60,
)
DRY = Amount(
    bench=SMOKE,
    beside=("o",),
    n_tbs=(1,),
    k_chunk=16,
    replays=1,
    spec=llama(hidden=32, intermediate=32, layers=1, heads=1, kv_heads=1, vocab=64),
    prompt=2,
    decoded=2,
    kinds=("fp16", "int8"),
    wide=llama(hidden=32, intermediate=32, layers=1, heads=1, kv_heads=1, vocab=64),
    wide_prompt=2,
    wide_decoded=1,
    rows=(2,),
    slots=2,
    families={
        "experts": replace(
            llama(hidden=32, intermediate=32, layers=1, heads=1, kv_heads=1, vocab=64),
            mixture=MixtureSpec(experts=4, chosen=2, width=32, normalized=True),
        )
    },
    selected=(96,),
    tuned=llama(hidden=32, intermediate=32, layers=1, heads=1, kv_heads=1, vocab=64),
    context=32,
    most_by_longer=float("inf"),
    least_of_link=0.0,
    chat_tokens=3,
)
