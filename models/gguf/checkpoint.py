"""A GGUF file as the files of a checkpoint, and its architecture metadata as a config.json in Hugging Face's format.

From there on a GGUF checkpoint is like any other: `models.families` reads it, and the stored model keeps it.

Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp's
convert_hf_to_gguf.py makes of each architecture.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from models.checkpoint_files import CONFIG, GENERATION_CONFIG, CheckpointFiles
from models.errors import CheckpointError, UnsupportedModelError
from models.experts import name_in_checkpoint, separate
from models.families import FAMILIES, family_of, nearest, spec_from_config
from models.families.family import DEEPEST
from models.families.fields import Fields
from models.generation_config import gguf_generation_config
from models.gguf.architectures import ARCHITECTURES, CAPS, MULTIPLIERS, delta_sizes, each_block, shortest
from models.gguf.header import Header, read_model
from models.gguf.tensors import GgufTensor, Number, Order, further_blocks, name_in_file, tensors_of
from models.gguf.tokenizer import check_tokenizer, ends_of_generation, read_vocabulary, tokenizer_files
from models.shard import StoredTensor, weights_by_type


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
    slopes = _slopes(fields, architecture) if architecture == "apertus" else {}
    config = config_of(header, tensors)
    family = family_of(config, source=str(path))
    spec = spec_from_config(config, source=str(path), remedy=REMEDY)
    described = Fields(table=config, source=str(path))
    places = family.places(described)
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
        entries=separate({**tensors, **slopes}, family, spec.mixture, places),
        weights=header.files,
        own_name=lambda name: name_in_file(name_in_checkpoint(name, spec.mixture, places), architecture, family),
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
        kv_heads = _kv_heads(fields, name, heads)
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


def _slopes(fields: Fields, name: str) -> dict[str, StoredTensor]:
    """Slopes of xIELU by what a checkpoint calls them: lists of the metadata, with a number for each block."""
    blocks, found = fields.integer(f"{name}.block_count", most=DEEPEST), dict[str, StoredTensor]()
    for key in ("alpha_p", "alpha_n"):
        listed = fields.table.get(f"xielu.{key}")
        numbers: list[Any] = list(listed) if isinstance(listed, list | memoryview) else [listed] * blocks
        if len(numbers) != blocks or not all(isinstance(each, float) and math.isfinite(each) for each in numbers):
            raise fields.wrong(f"xielu.{key}", listed, f"a number, or a list of {blocks}")
        for block, each in enumerate(numbers):
            own = f"model.layers.{block}.mlp.act_fn.{key}"
            found[own] = Number(path=Path(fields.source), name=f"xielu.{key}", value=each)
    return found


REMEDY = "Take the file from the model's publisher, or another conversion of the model."
"""Advice for invalid metadata."""

_FOREIGN = ("attention.clamp_kqv", "attention.max_alibi_bias", "expert_group_count", "use_parallel_residual")
"""Keys of an architecture that change a block's arithmetic in unsupported ways unless they are 0."""
_USUAL_HEADS = ("llama", "qwen2", "phi3", "granite", "granitemoe", "smollm3", "arcee", "apertus", "granitehybrid")
"""Architectures whose heads are as wide as the hidden size says where config.json doesn't."""
_MAX_FACTORS = 1 << 16
_NEVER = 1e20
"""Divisor of a frequency that makes it nothing."""
_SCALINGS = ("none", "linear", "yarn")
"""Kinds of rotary scaling that metadata alone describe; longrope and llama3 come as tensors of factors."""


def check_kind(header: Header) -> str:
    """Check that a file is one complete language model of a known architecture. Returns the architecture.

    Raises:
        UnsupportedModelError: it is a part of a model, something else, or of another architecture.
        CheckpointError: the architecture is missing.
    """
    fields = Fields(table=header.metadata, source=str(header.path), remedy=REMEDY)
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{header.path} holds no model, but '{kind}' (general.type). Give a model's file.")
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path}: the architecture '{architecture}' is not supported (supported: "
            f"{', '.join(ARCHITECTURES)}; Mistral models come as llama).{nearest(architecture)} Choose another model."
        )
    known = ARCHITECTURES[architecture]
    caps = (cap for cap in CAPS if cap not in known.caps)
    experts = [*(() if known.experts else ("expert_count",)), *(() if known.shared else ("expert_shared_count",))]
    multipliers = (key for key in MULTIPLIERS if key not in known.multipliers)
    for name in (*_FOREIGN, *multipliers, *caps, *experts):
        value = header.metadata.get(f"{architecture}.{name}")
        if value and not (name == "expert_group_count" and value == 1):
            raise UnsupportedModelError(
                f"{header.path}: '{architecture}.{name}' is {value!r}, which {architecture} models as this program "
                "runs them do not have. Choose another model."
            )
    return architecture


def config_of(header: Header, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The config.json of a file whose kind has been checked.

    Raises:
        UnsupportedModelError: an option of the architecture is not one this program runs.
        CheckpointError: a value or a tensor that is needed is missing, or not acceptable.
    """
    fields = Fields(table=header.metadata, source=str(header.path), remedy=REMEDY)
    name = fields.text("general.architecture")
    known = ARCHITECTURES[name]
    heads, blocks = fields.integer(f"{name}.attention.head_count"), fields.integer(f"{name}.block_count")
    blocks -= further_blocks(header)
    width = fields.optional_integer(f"{name}.expert_feed_forward_length")
    eps = f"{name}.attention.layer_norm_epsilon"  # of LayerNorms
    if blocks > len(tensors):  # the following code would allocate memory for all of them
        raise fields.wrong(f"{name}.block_count", blocks, f"the number of blocks that {len(tensors)} tensors make up")
    config: dict[str, Any] = {
        "architectures": [FAMILIES[known.model_type].architecture],
        "model_type": known.model_type,
        "hidden_size": fields.integer(f"{name}.embedding_length"),
        "intermediate_size": _width(fields, name, blocks, width if known.experts else None),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": _kv_heads(fields, name, heads),
        "vocab_size": _rows(tensors, "model.embed_tokens.weight") or fields.integer(f"{name}.vocab_size"),
        "max_position_embeddings": fields.integer(f"{name}.context_length"),
        "rms_norm_eps": shortest(
            fields.number(eps if eps in fields.table else f"{name}.attention.layer_norm_rms_epsilon")
        ),
        "rope_theta": shortest(fields.number(f"{name}.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    config |= {} if known.latent else _heads(fields, name, config)
    config |= _window(fields, name, config["max_position_embeddings"])
    config |= _share(tensors) if known.wide else _rope_scaling(fields, name, tensors)
    if known.wide:
        fields = fields.with_defaults({f"{name}.attention.head_count_kv": heads})
    config |= known.options(fields, name, config, frozenset(tensors))
    vocabulary = read_vocabulary(header)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise CheckpointError(
            f"{header.path} has {len(vocabulary.tokens)} tokens and embeddings for {config['vocab_size']}. They do "
            f"not belong together. {REMEDY}"
        )
    begin, end = fields.token_ids("tokenizer.ggml.bos_token_id"), ends_of_generation(header, vocabulary)
    if begin:
        config["bos_token_id"] = begin[0]
    if end:
        config["eos_token_id"] = list(end)
    return config


def _width(fields: Fields, name: str, blocks: int, absent: int | None) -> int:
    key = f"{name}.feed_forward_length"
    if ARCHITECTURES[name].wide or ARCHITECTURES[name].widths:
        return each_block(fields, key, blocks)[0]
    return _only(fields, key, "an MLP").integer(key, absent)


def _share(tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The share of pairs that rotate in blocks without a window: the others' frequencies are divided to nothing."""
    divided = tensors.get("rope_freqs.weight")
    factors = [1.0] if divided is None else _factors(divided)
    turning = [factor for factor in factors if factor < _NEVER]
    if divided is not None and (set(turning) != {1.0} or factors[: len(turning)] != turning):
        raise UnsupportedModelError(
            f"{divided.path}: '{divided.name}' has other rotary factors than 1 for the first pairs and so much for the "
            f"rest that they never turn, which is not supported. {REMEDY}"
        )
    share = len(turning) / len(factors)
    exact = int(share * 2 * len(factors) // 2) == len(turning)  # readers truncate
    return {"partial_rotary_factor": share if exact else math.nextafter(share, 1.0)}


def _kv_heads(fields: Fields, name: str, heads: int) -> int:
    """Key-value heads; a list has those of every block, 0 where there is no attention."""
    key = f"{name}.attention.head_count_kv"
    listed = fields.table.get(key)
    if isinstance(listed, list | memoryview) and ARCHITECTURES[name].wide:
        return replace(fields, table={key: listed[0] if len(listed) else None}).integer(key)
    return _only(fields, key, "attention").integer(key, heads)


def _only(fields: Fields, key: str, what: str) -> Fields:
    """The metadata with the number that is the same in all blocks that have it, where a list has 0 for the others."""
    listed = fields.table.get(key)
    if not isinstance(listed, list | memoryview):
        return fields
    counts = set(listed) - {0} if all(type(count) is int for count in listed) else set[int]()
    if len(counts) != 1:
        raise fields.wrong(key, listed, f"the same in all blocks that have {what}")
    return replace(fields, table={key: counts.pop()})


def _factors(tensor: GgufTensor) -> list[float]:
    """The numbers of a table of rotary factors."""
    if math.prod(tensor.shape) > _MAX_FACTORS:
        raise CheckpointError(
            f"{tensor.path}: the tensor '{tensor.name}' has {math.prod(tensor.shape):,} numbers, and a head has fewer "
            f"channels. {REMEDY}"
        )
    return [shortest(x) for x in tensor.read().flatten().tolist()]


def _rows(tensors: Mapping[str, GgufTensor], name: str) -> int | None:
    return tensors[name].shape[0] if name in tensors else None


def _heads(fields: Fields, name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Width of a head, and how much of it rotates, where they are not the usual."""
    usual = config["hidden_size"] // config["num_attention_heads"]
    width = fields.integer(f"{name}.attention.key_length", usual)
    values = fields.integer(f"{name}.attention.value_length", width)
    if values != width:
        raise UnsupportedModelError(
            f"{fields.source}: keys of {width} and values of {values} channels a head are not supported. "
            "Choose another model."
        )
    rotated = fields.integer(f"{name}.rope.dimension_count", width)
    found: dict[str, Any] = {}
    if width != usual or name not in _USUAL_HEADS:
        found["head_dim"] = width
    if rotated != width:
        if ARCHITECTURES[name].pairs:
            raise UnsupportedModelError(
                f"{fields.source}: heads of {width} channels of which {rotated} rotate are not supported in {name} "
                "models. Choose another model."
            )
        share = rotated / width
        # Readers multiply and truncate: 30 of 44 channels would come back as 29.
        found["partial_rotary_factor"] = share if int(share * width) == rotated else math.nextafter(share, 1.0)
    return found


def _window(fields: Fields, name: str, context: int) -> dict[str, Any]:
    """The sliding window of all blocks; 0 means none. A Llama model that has one is a Mistral."""
    value = fields.table.get(f"{name}.attention.sliding_window") or None
    if value is None or (isinstance(value, int) and value >= context):
        return {}
    if not ARCHITECTURES[name].windows:
        raise UnsupportedModelError(
            f"{fields.source}: '{name}.attention.sliding_window' is {value!r}; windows of {name} models are not read "
            "from GGUF files. Take the model's Hugging Face checkpoint."
        )
    window = {"sliding_window": fields.integer(f"{name}.attention.sliding_window")}
    return window if name != "llama" else window | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def _rope_scaling(fields: Fields, name: str, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The rescaling of rotary frequencies.

    Tensors of factors divide them: two for longrope (by context length), one for Llama 3.1, whose smoothing is already
    included. So that one is written as a longrope with two equal tables.
    """
    short, long, always = (tensors.get(f"rope_{key}.weight") for key in ("factors_short", "factors_long", "freqs"))
    original = fields.integer(f"{name}.rope.scaling.original_context_length", fields.integer(f"{name}.context_length"))
    if always is not None:
        short = long = always
    if short is not None and long is not None:
        return {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": _factors(short),
                "long_factor": _factors(long),
                "attention_factor": shortest(fields.number(f"{name}.rope.scaling.attn_factor", 1.0)),
                "original_max_position_embeddings": original,
            }
        }
    kind = fields.text(f"{name}.rope.scaling.type", "linear")
    if kind not in _SCALINGS:
        raise UnsupportedModelError(
            f"{fields.source}: rotary scaling '{kind}' is not supported (supported: {', '.join(_SCALINGS)}, and tables "
            "of factors). Choose another model."
        )
    factor = fields.number(f"{name}.rope.scaling.factor", fields.number(f"{name}.rope.scale_linear", 1.0))
    if kind == "none" or factor == 1.0:
        return {}
    if kind == "yarn":
        return {"rope_scaling": _yarn(fields, f"{name}.rope.scaling", factor, original)}
    return {"rope_scaling": {"rope_type": "linear", "factor": shortest(factor)}}


def _yarn(fields: Fields, prefix: str, factor: float, original: int) -> dict[str, Any]:
    """YaRN's parameters. A logarithmic multiplier undoes the sharpening of attention."""
    found = {
        "rope_type": "yarn",
        "factor": shortest(factor),
        "original_max_position_embeddings": original,
        "beta_fast": shortest(fields.number(f"{prefix}.yarn_beta_fast", 32.0)),
        "beta_slow": shortest(fields.number(f"{prefix}.yarn_beta_slow", 1.0)),
    }
    multiplier = fields.table.get(f"{prefix}.yarn_log_multiplier")
    if multiplier:
        found |= {"mscale": 1.0, "mscale_all_dim": shortest(fields.number(f"{prefix}.yarn_log_multiplier"))}
    return found
