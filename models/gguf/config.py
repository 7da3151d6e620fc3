"""What a GGUF file's metadata says of the architecture, as the config.json of the same model in Hugging Face's format.

From there on a GGUF checkpoint is like any other: `models.families` reads it, and the stored model keeps it.

Source: the keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and what llama.cpp's
convert_hf_to_gguf.py makes of each architecture.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.errors import CheckpointError, UnsupportedModelError
from models.families.fields import Fields
from models.gguf.header import Header
from models.gguf.tensors import GgufTensor
from models.gguf.vocabulary import ends_of_generation, read_vocabulary

ARCHITECTURES: Mapping[str, tuple[str, str]] = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
"""Supported values of `general.architecture`, with `model_type` and class of config.json. Mistral models call
themselves llama."""

REMEDY = "Take the file from the model's publisher, or another conversion of the model."
"""What to do about metadata that is not acceptable."""

_FOREIGN = (
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.scale",
    "attn_logit_softcapping",
    "embedding_scale",
    "expert_count",
    "final_logit_softcapping",
    "logit_scale",
    "residual_scale",
    "use_parallel_residual",
)
"""Keys of an architecture which, unless they are 0, change the arithmetic of a block into one that is not run here."""
_WITH_WINDOW = ("llama", "phi3")
"""Architectures in which a sliding window means one for all blocks."""
_SCALINGS = ("none", "linear")
"""Kinds of rotary scaling that metadata alone describe; longrope and llama3 come as tensors of factors."""


def check_kind(header: Header) -> str:
    """See that a file is one whole language model of a known architecture. Returns the architecture.

    Raises:
        UnsupportedModelError: it is a part of one, something else, or of another architecture.
        CheckpointError: it does not say.
    """
    fields = Fields(table=header.metadata, source=str(header.path), remedy=REMEDY)
    parts = header.metadata.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise UnsupportedModelError(
            f"{header.path}: is one of {parts} parts of a split model. Join them with llama.cpp's "
            f"`llama-gguf-split --merge FIRST-PART.gguf WHOLE.gguf`, and give the whole."
        )
    kind = fields.text("general.type", "model")
    if kind != "model":
        raise UnsupportedModelError(f"{header.path}: holds no model, but '{kind}' (general.type). Give a model's file.")
    architecture = fields.text("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{header.path}: the architecture '{architecture}' is not supported (supported: "
            f"{', '.join(ARCHITECTURES)}; Mistral models come as llama). Choose another model."
        )
    for name in _FOREIGN:
        value = header.metadata.get(f"{architecture}.{name}")
        if value:
            raise UnsupportedModelError(
                f"{header.path}: '{architecture}.{name}' is {value!r}, which {architecture} models as this program "
                "runs them do not have. Choose another model."
            )
    return architecture


def config_of(header: Header, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """The config.json of a file whose kind has been checked.

    Args:
        header: The file's.
        tensors: Its tensors under their names in Hugging Face's format.

    Raises:
        UnsupportedModelError: an option of the architecture is not one this program runs.
        CheckpointError: a value or a tensor that is needed is missing, or not acceptable.
    """
    fields = Fields(table=header.metadata, source=str(header.path), remedy=REMEDY)
    name = fields.text("general.architecture")
    model_type, architecture = ARCHITECTURES[name]
    heads, blocks = fields.integer(f"{name}.attention.head_count"), fields.integer(f"{name}.block_count")
    if blocks > len(tensors):  # what follows would take the memory of so many
        raise fields.wrong(f"{name}.block_count", blocks, f"the number of blocks that {len(tensors)} tensors make up")
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": fields.integer(f"{name}.embedding_length"),
        "intermediate_size": fields.integer(f"{name}.feed_forward_length"),
        "num_hidden_layers": blocks,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.integer(f"{name}.attention.head_count_kv", heads),
        "vocab_size": _rows(tensors, "model.embed_tokens.weight") or fields.integer(f"{name}.vocab_size"),
        "max_position_embeddings": fields.integer(f"{name}.context_length"),
        "rms_norm_eps": _short(fields.number(f"{name}.attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(fields.number(f"{name}.rope.freq_base", 10000.0)),
        "hidden_act": "silu",
        "tie_word_embeddings": "lm_head.weight" not in tensors,
    }
    config |= _biases(model_type, tensors)
    config |= _heads(fields, name, config)
    config |= _window(fields, name, config["max_position_embeddings"])
    config |= _rope_scaling(fields, name, tensors)
    vocabulary = read_vocabulary(header)
    if len(vocabulary.tokens) > config["vocab_size"]:
        raise CheckpointError(
            f"{header.path}: has {len(vocabulary.tokens)} tokens and embeddings for {config['vocab_size']}. They do "
            f"not belong together. {REMEDY}"
        )
    begin, end = fields.token_ids("tokenizer.ggml.bos_token_id"), ends_of_generation(header, vocabulary)
    if begin:
        config["bos_token_id"] = begin[0]
    if end:
        config["eos_token_id"] = list(end)
    return config


def _rows(tensors: Mapping[str, GgufTensor], name: str) -> int | None:
    return tensors[name].shape[0] if name in tensors else None


def _short(value: float) -> float:
    """The shortest decimal number that is the same in 32 bits: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _biases(model_type: str, tensors: Mapping[str, GgufTensor]) -> dict[str, bool]:
    """Which biases a Llama model has; others have none, or always the same."""
    if model_type != "llama":
        return {}
    layer = "model.layers.0"
    return {
        "attention_bias": f"{layer}.self_attn.q_proj.bias" in tensors,
        "mlp_bias": f"{layer}.mlp.gate_proj.bias" in tensors,
    }


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
    if width != usual or name == "qwen3":  # a Qwen3 config that says nothing means 128
        found["head_dim"] = width
    if rotated != width:
        if name == "llama":
            raise UnsupportedModelError(
                f"{fields.source}: heads of {width} channels of which {rotated} rotate are not supported in llama "
                "models. Choose another model."
            )
        share = rotated / width
        # Whoever reads it multiplies and cuts: 30 of 44 channels would come back as 29.
        found["partial_rotary_factor"] = share if int(share * width) == rotated else math.nextafter(share, 1.0)
    return found


def _window(fields: Fields, name: str, context: int) -> dict[str, Any]:
    """The sliding window; 0 means none. A Llama model that has one is a Mistral."""
    value = fields.table.get(f"{name}.attention.sliding_window") or None
    if value is None or (isinstance(value, int) and value >= context):
        return {}
    if name not in _WITH_WINDOW:
        raise UnsupportedModelError(
            f"{fields.source}: '{name}.attention.sliding_window' is {value!r}; windows of {name} models are not read "
            "from GGUF files. Take the model's Hugging Face checkpoint."
        )
    window = {"sliding_window": fields.integer(f"{name}.attention.sliding_window")}
    return window if name != "llama" else window | {"model_type": "mistral", "architectures": ["MistralForCausalLM"]}


def _rope_scaling(fields: Fields, name: str, tensors: Mapping[str, GgufTensor]) -> dict[str, Any]:
    """How rotary frequencies are rescaled.

    Tensors of factors divide them: two for longrope (by the length of the context), one for Llama 3.1, whose
    smoothing has been worked into it. So that one is written as a longrope whose two tables are the same.
    """
    short, long, always = (tensors.get(f"rope_{key}.weight") for key in ("factors_short", "factors_long", "freqs"))
    original = fields.integer(f"{name}.rope.scaling.original_context_length", fields.integer(f"{name}.context_length"))
    if always is not None:
        short = long = always
    if short is not None and long is not None:
        return {
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [_short(x) for x in short.read().flatten().tolist()],
                "long_factor": [_short(x) for x in long.read().flatten().tolist()],
                "attention_factor": _short(fields.number(f"{name}.rope.scaling.attn_factor", 1.0)),
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
    return {"rope_scaling": {"rope_type": "linear", "factor": _short(factor)}}
