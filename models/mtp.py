"""Multi-token prediction: the block behind a model's last one that predicts a further token, as a model of its own.

From the embedding of token t + 1 and what the model left for token t, it predicts token t + 2. Embedding table and
output head are the model's.

Source: DeepSeek-V3 (arXiv 2412.19437), §2.2, whose M is `layers.0.join.down` here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from models.recipe import DEFAULT_GROUP_SIZE, Recipe
from models.spec import JOIN, ModelSpec

T = TypeVar("T")

_EH_PROJ = "eh_proj"
"""Module of M; a checkpoint has such a block if it has this one."""
MODULES: Mapping[str, str] = {JOIN: _EH_PROJ, "embed_norm": "enorm", "hidden_norm": "hnorm"}
"""Modules of the block, beside those of any other, by the names of `models.architecture`."""
_LAST_NORM = "shared_head.norm"
"""Module of the norm before the head; `shared_head_norm` in GGUF files."""
_QWEN = (
    (re.compile(r"(?:.*\.)?mtp\.layers\.0\."), ""),
    (re.compile(r"(?:.*\.)?mtp\.fc\."), f"{_EH_PROJ}."),
    (re.compile(r"(?:.*\.)?mtp\.pre_fc_norm_embedding\."), "enorm."),
    (re.compile(r"(?:.*\.)?mtp\.pre_fc_norm_hidden\."), "hnorm."),
    (re.compile(r"(?:.*\.)?mtp\.norm\."), f"{_LAST_NORM}."),
)
"""How Qwen's checkpoints call what GLM's and DeepSeek's number as another block."""


def mtp_spec(spec: ModelSpec) -> ModelSpec:
    """The block as a model of one block, with attention over the whole context."""
    mixture = None if spec.mixture is None else replace(spec.mixture, dense=())
    return replace(
        spec,
        num_layers=1,
        windows=(None,),
        nope_layers=(0,) if {*spec.attention_layers} <= {*spec.nope_layers} else (),
        bare=(),
        mixers=(),
        conv_kernel_size=0,
        delta=None,
        mixture=mixture,
        joins=True,
    )


def mtp_recipe(recipe: Recipe) -> Recipe:
    """How the block is quantized beside a model: to nearest and without residuals, for drafts are not compensated."""
    group_size = recipe.group_size if recipe.uniform and recipe.group_size else DEFAULT_GROUP_SIZE
    return Recipe(method="rtn", bits=4, group_size=group_size, residual_bits=0, expected_k_chunk=0)


def numbered(tensors: Mapping[str, T], layers: int) -> dict[str, T]:
    """The block's tensors in a checkpoint of Qwen's kind, named as if it were the next one of the model's blocks."""
    if not any(name.endswith("mtp.fc.weight") for name in tensors):
        return {}  # Nemotron's have places of their own
    return {
        f"model.layers.{layers}.{to}{name[match.end() :]}": tensor
        for name, tensor in tensors.items()
        for of, to in _QWEN
        if (match := of.match(name))
    }


def own_tensors(tensors: Mapping[str, T], layers: int, last_norm: str) -> dict[str, T] | None:
    """The block's tensors as of a model of one block, and what it shares with the model; None: there is no such block.

    Args:
        tensors: Of the checkpoint; those of the block are named as the next one's (`numbered`).
        layers: The model's blocks.
        last_norm: Module of the norm before the head.
    """
    prefix = f"model.layers.{layers}."
    if f"{prefix}{_EH_PROJ}.weight" not in tensors:
        return None
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.layers.")}
    for name, tensor in tensors.items():
        part = name.removeprefix(prefix)
        if part.replace("_norm", ".norm") == f"{_LAST_NORM}.weight":
            found[f"{last_norm}.weight"] = tensor
        elif part != name and not part.startswith(("shared_head", "embed_tokens.")):  # the model's own once more
            found[f"model.layers.0.{part}"] = tensor
    return found
