"""SmoothAttention: outlier channels of keys, and the gain of equalizing them for each kind of cache."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from models.checkpoint import Checkpoint
from models.spec import ModelSpec
from runtime.kv.kinds import KVKind
from tests.bench.caches.full import keys_and_values
from tests.bench.caches.laboratory import Laboratory
from tests.bench.caches.perplexity import LOW, point
from tests.bench.reporting.results import digest

KINDS_TRIED: tuple[KVKind, ...] = ("fp16", "int8", "int4", "kivi2")
"""Kinds whose loss is measured with and without."""
TOKENS = 2048
"""Tokens whose keys are looked at."""
PLANTED = "english3m-planted"
"""What the report calls the model with outlier channels put in."""
FACTOR, PAIRS = 16, 2
"""What planted key channels are multiplied by, and how many pairs of each head."""


def measure(laboratory: Laboratory, scratch: Path) -> None:
    """Measure what is missing for one model, and for its planted double where it is `english3m`.

    Args:
        laboratory: The model.
        scratch: Folder for the planted checkpoint.
    """
    _one(laboratory)
    if laboratory.case.name == "english3m":
        folder = scratch / f"planted-{laboratory.source}"
        if not folder.is_dir():
            plant(laboratory.checkpoint.spec, laboratory.case.folder, folder)
        _one(laboratory.elsewhere(PLANTED, folder))


def _one(laboratory: Laboratory) -> None:
    identity = {"source": laboratory.source, "text": digest(laboratory.tokens[:TOKENS])}
    codes = laboratory.notebook.codes
    laboratory.notebook.known("channels", identity, codes.reference, lambda: _channels(laboratory))
    for smooth in (False, True):
        for kind in KINDS_TRIED:
            what = f"{laboratory.case.name}, {kind}, SmoothAttention {'on' if smooth else 'off'}"
            laboratory.notebook.attempt(
                what,
                lambda k=kind, s=smooth: point(laboratory, LOW, "reference", k, smooth=s),  # type: ignore[misc]
            )


def _channels(laboratory: Laboratory) -> dict[str, Any]:
    """The largest magnitude of a key channel over the median channel's, by layer: of the most uneven head."""
    laboratory.notebook.tell(f"{laboratory.case.name}: magnitudes of key channels")
    length = laboratory.checkpoint.spec.max_context
    magnitudes = []
    tokens = laboratory.tokens[:TOKENS]
    for start in range(0, max(1, len(tokens) - length + 1), length):
        keys = keys_and_values(laboratory.checkpoint, tokens[start : start + length])["keys"]
        magnitudes.append(keys.abs().amax(1))  # [layers, H_kv, D]
    largest = torch.stack(magnitudes).amax(0)
    ratio = largest.amax(-1) / largest.median(-1).values
    return {
        "model": laboratory.case.name,
        "ratio": [round(float(layer.max()), 2) for layer in ratio],
        "median": [round(float(layer.median()), 2) for layer in ratio],
    }


def plant(spec: ModelSpec, source: Path, target: Path) -> None:
    """A checkpoint whose keys have outlier channels, and whose logits are those of its source.

    Some pairs of channels that rotate together are multiplied in the keys and divided in the queries that read them,
    by a power of two, so that nothing is rounded.

    Args:
        spec: The architecture.
        source: A checkpoint in one file.
        target: Folder to make.
    """
    rng = np.random.default_rng(0)
    D, share = spec.head_dim, spec.num_heads // spec.num_kv_heads
    tensors = load_file(source / "model.safetensors")
    for layer in range(spec.num_layers):
        scale = torch.ones(spec.num_kv_heads, D)
        for head in range(spec.num_kv_heads):
            pairs = rng.choice(D // 2, PAIRS, replace=False)
            scale[head, np.concatenate([pairs, pairs + D // 2])] = FACTOR
        for name, factor in (("k", scale), ("q", 1 / scale.repeat_interleave(share, 0))):
            key = f"model.layers.{layer}.self_attn.{name}_proj.weight"
            tensors[key] = (tensors[key] * factor.reshape(-1, 1)).to(tensors[key].dtype).contiguous()
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.glob("*.json"):
        shutil.copy(file, partial / file.name)
    save_file(tensors, partial / "model.safetensors")
    Checkpoint.open(partial)
    partial.rename(target)
