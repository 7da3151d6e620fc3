"""Shapes and counts of a run on a card, and of one that only shows that everything works."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from models.catalogue import CATALOGUE
from models.spec import MixtureSpec, ModelSpec
from runtime.kv.kinds import KVKind
from tests.lab.models import llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How large everything is."""

    spec: ModelSpec
    """The model whose matrices are measured, and that decodes."""
    kinds: tuple[str, ...]
    """Layer types whose products are measured one by one."""
    bits: tuple[int, ...]
    copy_bytes: int
    """Bytes of one copy within the device's memory."""
    host_bytes: int
    """Bytes of one transfer from the host's memory."""
    rotated_bytes: int
    """Bytes of operands between two uses of the same one: several times the largest cache of a GPU, 50 to 130 MB."""
    rounds: int
    """Replays of each contestant."""
    prefill_rows: tuple[int, ...]
    batches: tuple[int, ...]
    """Rows of W4A8 products (M)."""
    attention_contexts: tuple[int, ...]
    """Tokens in the cache when attention alone is timed, what matters most first."""
    knee_k_chunks: tuple[int, ...]
    knee_n_tbs: tuple[int, ...]
    """Thread blocks of the compensation kernel: one knee curve each."""
    reading_n_tbs: tuple[int, ...]
    """Thread blocks that read host memory."""
    budgets: tuple[float, ...]
    """Slowdown budgets in percent; 0 = no compensation."""
    families: Mapping[str, ModelSpec]
    """Blocks of models of several families, whose steps are timed."""
    family_k_chunks: tuple[int, ...]
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
    beside: tuple[str, ...]
    """Layer types whose product and compensation run beside each other: one leaves a card room, one fills it."""
    n_tbs: tuple[int, ...]
    """Thread blocks of the compensation beside a product."""
    k_chunk: int
    """Channels of it per 1024."""
    replays: int
    """Of each captured graph."""
    small: ModelSpec
    """A model of random weights whose tokens are compared with the reference's."""
    prompt: int
    """Tokens of its prompt."""
    decoded: int
    """Tokens decoded after it, over the border of a page."""
    caches: tuple[KVKind, ...]
    """Caches that it is decoded with."""
    wide: ModelSpec
    """A model of the widths of real ones, of which several numbers of rows and slots are compared."""
    wide_prompt: int
    wide_decoded: int
    rows: tuple[int, ...]
    """Rows of its further steps."""
    slots: int
    """Sequences that share these."""
    compared: Mapping[str, ModelSpec]
    """Blocks of other families than Llama's, compared in the same way."""
    selected: tuple[int, ...]
    """Input channels of the selections that are compared with the oracle's."""
    tuned: ModelSpec
    """A model of random weights that is tuned, loaded and unloaded."""
    load_context: int
    most_by_longer: float
    """Time of a product and its compensation by the longer of the two, at most."""
    least_of_link: float
    """Speed of the fetch by that of the copy engine, at least."""
    chat_tokens: int
    """Tokens of the bundled model's answer."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """(N, K) of these layer types."""
        return {kind: self.spec.linear_shape(kind) for kind in self.kinds}


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
        nope_layers=tuple(layer for layer in whole.nope_layers if layer < count),
        mixture=mixture,
    )


_TIMED = {"Qwen3 30B-A3B": 6, "gpt-oss 20B": 6, "Qwen3.5 4B": 8, "Gemma 3 4B": 12, "Gemma 4 E2B": 35}
_COMPARED = {
    "Gemma 4 E2B": 5,
    "Gemma 4 26B-A4B": 1,
    "Qwen3 30B-A3B": 1,
    "gpt-oss 20B": 1,
    "Qwen3.5 4B": 4,
    "Gemma 3 4B": 6,
}
"""Models and how many blocks of each: the first ones have what is special about the family."""

FULL = Sizes(
    spec=llama(hidden=4096, intermediate=14336, layers=32, heads=32, kv_heads=8, vocab=128256),
    kinds=("qkv", "o", "gate_up", "down"),
    bits=(3, 4),
    copy_bytes=1 << 30,
    host_bytes=256 << 20,
    rotated_bytes=512 << 20,
    rounds=40,
    prefill_rows=(16, 128, 512),
    batches=(1, 16, 64, 512, 4, 8, 32, 128, 256, 2),
    attention_contexts=(65536, 262144, 8192),
    knee_k_chunks=(2, 4, 8, 12, 16, 24, 32, 48, 64),
    knee_n_tbs=(2, 4, 8, 16),
    reading_n_tbs=(1, 2, 4, 8, 16, 32, 64, 128),
    budgets=(0.0, 2.5, 5.0, 10.0, 20.0),
    families={title: blocks(title, count) for title, count in _TIMED.items()},
    family_k_chunks=(0, 16),
    family_rows=512,
    resident=(0.75, 0.5, 0.25),
    context=2048,
    tokens=64,
    turns=5,
    readings=3,
    beside=("o", "gate_up"),
    n_tbs=(1, 2, 4, 6, 8, 12, 24),
    k_chunk=16,
    replays=5000,
    small=llama(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, vocab=512),
    prompt=310,
    decoded=90,
    caches=("int4", "fp16", "int8", "hierarchical", "gear4"),
    wide=llama(hidden=4096, intermediate=4096, layers=1, heads=32, kv_heads=8, vocab=512),
    wide_prompt=40,
    wide_decoded=2,
    rows=(2, 5, 8, 16),
    slots=3,
    compared={title: blocks(title, count) for title, count in _COMPARED.items()},
    selected=(4096, 14336),
    tuned=llama(hidden=4096, intermediate=14336, layers=6, heads=32, kv_heads=8, vocab=4096),
    load_context=8192,
    most_by_longer=1.15,
    least_of_link=0.5,
    chat_tokens=60,
)
"""Llama 3 8B, and models beside it."""

_TINY = llama(hidden=32, intermediate=32, layers=1, heads=1, kv_heads=1, vocab=64)
_EXPERTS = {"experts": replace(_TINY, mixture=MixtureSpec(experts=4, chosen=2, width=32, normalized=True))}
DRY = replace(
    FULL,
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
    knee_k_chunks=(8,),
    knee_n_tbs=(1,),
    reading_n_tbs=(1, 2),
    budgets=(0.0, 50.0),
    families=_EXPERTS,
    family_k_chunks=(0,),
    family_rows=4,
    resident=(0.5,),
    context=32,
    tokens=1,
    turns=1,
    readings=1,
    beside=("o",),
    n_tbs=(1,),
    replays=1,
    small=_TINY,
    prompt=2,
    decoded=2,
    caches=("fp16", "int8"),
    wide=_TINY,
    wide_prompt=2,
    wide_decoded=1,
    rows=(2,),
    slots=2,
    compared=_EXPERTS,
    selected=(96,),
    tuned=_TINY,
    load_context=32,
    most_by_longer=float("inf"),
    least_of_link=0.0,
    chat_tokens=3,
)
"""For the interpreter on a processor: numbers mean nothing."""
