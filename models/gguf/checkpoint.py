"""A GGUF file as the files of a checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

from models.checkpoint_files import CONFIG, GENERATION_CONFIG, CheckpointFiles
from models.experts import name_in_checkpoint, separate
from models.families import FAMILIES, family_of, spec_from_config
from models.families.fields import Fields
from models.generation_config import gguf_generation_config
from models.gguf.architectures import ARCHITECTURES, delta_sizes
from models.gguf.config import REMEDY, check_kind, config_of
from models.gguf.parts import read_model
from models.gguf.tensors import Order, name_in_file, tensors_of
from models.gguf.tokenizer import check_tokenizer, tokenizer_files
from models.stored_tensor import weights_by_type


def read_gguf(path: Path) -> CheckpointFiles:
    """Read the description of a GGUF file, or of a model in several; any of them may be given.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not one this program runs.
        CheckpointError: a file is cut off, damaged, missing, or something else.
    """
    header = read_model(path)
    path = header.path
    architecture = check_kind(header)
    check_tokenizer(header)  # fail before hours of work are wasted
    known = ARCHITECTURES[architecture]
    fields = Fields(table=header.metadata, source=str(path), remedy=REMEDY)
    tensors = tensors_of(header, architecture, FAMILIES[known.model_type], _orders(fields, architecture))
    config = config_of(header, tensors)
    family = family_of(config, source=str(path))
    spec = spec_from_config(config, source=str(path), remedy=REMEDY)
    described = Fields(table=config, source=str(path))
    tables = {CONFIG: config, GENERATION_CONFIG: gguf_generation_config(header.metadata)}
    return CheckpointFiles(
        path=path,
        configuration={name: json.dumps(table, indent=2).encode() for name, table in tables.items() if table},
        spec=spec,
        family=family,
        multipliers=family.multipliers(described),
        keys_as_values=bool(family.keys_as_values) and described.flag(family.keys_as_values, False),
        described_in="the metadata",
        remedy=REMEDY,
        entries=separate(tensors, family, spec.mixture),
        weights=header.files,
        own_name=lambda name: name_in_file(name_in_checkpoint(name, spec.mixture), architecture, family),
        tokenizer=partial(tokenizer_files, header),
        types=weights_by_type(tensors.values()),
        decay_made=True,
    )


def _orders(fields: Fields, name: str) -> dict[str, Order]:
    """Modules whose rows llama.cpp puts into another order.

    Where it rotates neighbours (0, 1), Hugging Face rotates halves (0, D / 2). And the value heads of a delta rule are
    those of all key heads in turns, where Hugging Face has those of a key head together.
    """
    if ARCHITECTURES[name].pairs:
        heads = fields.integer(f"{name}.attention.head_count")
        kv_heads = fields.integer(f"{name}.attention.head_count_kv", heads)
        return {"self_attn.q_proj": Order(outer=heads, inner=2), "self_attn.k_proj": Order(outer=kv_heads, inner=2)}
    if not ARCHITECTURES[name].delta:
        return {}
    key_heads, key_dim, value_heads, value_dim = delta_sizes(fields, name)
    if key_heads == value_heads:
        return {}
    values, each = Order(inner=key_heads, width=value_dim), Order(inner=key_heads)
    behind = replace(values, first=2 * key_heads * key_dim)
    orders = {"in_proj_qkv": behind, "conv1d": behind, "in_proj_z": values, "out_proj": replace(values, columns=True)}
    orders |= dict.fromkeys(("in_proj_b", "in_proj_a", "A_log", "dt_bias"), each)
    return {f"linear_attn.{module}": order for module, order in orders.items()}
