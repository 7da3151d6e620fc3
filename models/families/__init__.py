"""Model families, which translate a Hugging Face config.json into a `ModelSpec`. No torch, no file access."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from string import digits
from typing import Any

from models.errors import UnsupportedModelError
from models.families.cohere import COHERE, COHERE2
from models.families.deepseek import DEEPSEEK_V2, GLM4_MOE_LITE
from models.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from models.families.exaone4 import EXAONE4
from models.families.falcon_h1 import FALCON_H1
from models.families.family import EXPERTS, Family
from models.families.fields import PUBLISHED, Fields
from models.families.gemma import GEMMA, GEMMA2, GEMMA3
from models.families.gemma3n import GEMMA3N
from models.families.gemma4 import GEMMA4, GEMMA4_UNIFIED
from models.families.glm4 import GLM4, GLM4_MOE
from models.families.gpt_oss import GPT_OSS
from models.families.granite import GRANITE, GRANITE_FOURTH, GRANITE_MOE, GRANITE_MOE_SHARED
from models.families.hunyuan import HUNYUAN, HUNYUAN_MOE
from models.families.laguna import LAGUNA
from models.families.lfm2 import LFM2, LFM2_MOE
from models.families.lfm3 import LFM3
from models.families.llama import LLAMA, PHI3, SEED_OSS, SMOLLM3
from models.families.mistral import MINISTRAL, MINISTRAL3, MISTRAL, MIXTRAL
from models.families.muse_glimmer import MUSE_GLIMMER
from models.families.nemotron import NEMOTRON_H
from models.families.olmo import OLMO2, OLMO3, OLMO_HYBRID, OLMOE
from models.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE
from models.families.qwen3_5 import QWEN3_NEXT, QWEN35, QWEN35_MOE
from models.families.ungated import APERTUS, ARCEE
from models.spec import ModelSpec

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *(LLAMA, MISTRAL, MINISTRAL, MINISTRAL3, QWEN2, QWEN3, PHI3, SMOLLM3, GRANITE, GRANITE_FOURTH, SEED_OSS),
        *(GEMMA, GEMMA2, GEMMA3, GEMMA4, GEMMA4_UNIFIED, OLMO2, OLMO3, EXAONE4, GLM4, HUNYUAN, ERNIE4_5, LFM2, QWEN35),
        *(GEMMA3N, ARCEE, APERTUS, COHERE, COHERE2, FALCON_H1, OLMO_HYBRID, MUSE_GLIMMER, LFM3),
        *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, QWEN35_MOE, GRANITE_MOE, GRANITE_MOE_SHARED, OLMOE, GPT_OSS),
        *(GLM4_MOE, ERNIE4_5_MOE, LFM2_MOE, QWEN3_NEXT, HUNYUAN_MOE, DEEPSEEK_V2, GLM4_MOE_LITE, NEMOTRON_H, LAGUNA),
    )
}
"""Every supported family by its `model_type`."""

SUPPORTED = (
    "Llama 2/3/3.1/3.2, Mistral, Ministral 8B and 3, Qwen2/2.5, Qwen3, Qwen3.5, Phi-3/3.5, SmolLM3, Granite 3 and "
    "4 (dense), Seed-OSS, Gemma 1 to 4 and 3n, OLMo 2, 3 and hybrid, EXAONE 4, GLM-4, Hunyuan, ERNIE 4.5, LFM2 and 3, "
    "Arcee, Apertus, Cohere (Command R7B), Falcon-H1 and Muse Glimmer"
)
"""The families as an error message names them."""
MIXTURES = (
    "gpt-oss, Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, Gemma 4, GLM-4.5, GLM-4.7-Flash, "
    "DeepSeek-V2-Lite, ERNIE 4.5, OLMoE, Granite-MoE, LFM2-MoE, Hunyuan-MoE, Nemotron-H and Laguna"
)
"""Those with experts."""

READ_QUANTIZED = ("fp8", "mxfp4", "awq", "gptq", "compressed-tensors")
"""Methods of `quantization_config` whose weights can be read (`models.low_bit_source`)."""
_EXPERT_KEYS = (*EXPERTS, "moe_intermediate_size")


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the language model; the whole, unless there are others (`text_config`).

    What the whole says of tokens and quantization holds for the part too, unless that says something else. The head is
    tied if either says so: an own head among the tensors overrides that.
    """
    part, names = config.get("text_config"), config.get("architectures")
    wrappers = {family.wrapper for family in FAMILIES.values()} - {""}
    if not isinstance(part, dict) or not isinstance(names, list) or not wrappers.intersection(map(str, names)):
        return config
    shared = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
    above = {key: config[key] for key in shared if config.get(key) is not None}
    own = {key: value for key, value in part.items() if value is not None}
    tied = {"tie_word_embeddings": True} if above.get("tie_word_embeddings") else {}
    return {**above, **own, **tied, "architectures": None}


def family_of(config: Mapping[str, Any], *, source: str = "config.json") -> Family:
    """The family of a checkpoint.

    Raises:
        UnsupportedModelError: Another architecture, or weights that are quantized in a way that is not read.
    """
    model_type, architectures = config.get("model_type"), config.get("architectures") or []
    names = [str(name) for name in architectures] if isinstance(architectures, list) else [str(architectures)]
    whole = [f"{name.removesuffix('Model')}ForCausalLM" if name.endswith("Model") else name for name in names]
    candidates = [
        family
        for family in FAMILIES.values()
        if (family.architecture in whole or not names) and model_type in (family.model_type, None)
    ]
    if len(candidates) != 1:
        found = f"model_type '{model_type}', architectures {', '.join(names) or 'not given'}"
        near = nearest(str(model_type or "".join(names)))
        raise UnsupportedModelError(
            f"{source}: the architecture is not supported ({found}).{near} Supported are {SUPPORTED}: "
            f"{', '.join(family.architecture for family in FAMILIES.values())}."
        )
    if config.get("quantization_config"):
        method = config["quantization_config"]
        name = method.get("quant_method", "unknown") if isinstance(method, dict) else "unknown"
        if name not in READ_QUANTIZED:
            raise UnsupportedModelError(
                f"{source}: the weights are quantized by the method '{name}' (quantization_config), which is not read "
                f"({', '.join(READ_QUANTIZED)} are). Take the model's original checkpoint in 16 or 32 bits."
            )
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):  # tokens of pictures alone
        raise UnsupportedModelError(
            f"{source}: use_bidirectional_attention is set: this model makes embeddings, and its tokens see those "
            "behind them. Take one that generates text."
        )
    expert_keys = [key for key in _EXPERT_KEYS if isinstance(config.get(key), int) and config[key] > 1]
    if expert_keys and not candidates[0].mixture:
        raise UnsupportedModelError(
            f"{source}: {candidates[0].model_type} models with experts are not supported ({expert_keys[0]} = "
            f"{config[expert_keys[0]]}). Supported are dense ones, and mixtures of {MIXTURES}."
        )
    return candidates[0]


def nearest(name: str) -> str:
    """A sentence about the supported family whose name is most like that of an unsupported one; "" if none is.

    Where names differ in their numbers alone, that is the last: of gemma4 gemma3, although gemma is more like it.
    """
    known = [family.removesuffix("_text") for family in FAMILIES]
    asked = name.lower().removesuffix("_text")[:64]
    alike = [family for family in known if family.rstrip(digits) == asked.rstrip(digits)]
    found = [max(alike)] if alike and asked not in known else get_close_matches(asked, known, n=1, cutoff=0.7)
    return f" The nearest that is supported is {found[0]}." if found else ""


def spec_from_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    source: str = "config.json",
    remedy: str = PUBLISHED,
) -> ModelSpec:
    """Translate a checkpoint's config.json.

    Args:
        config: Parsed config.json.
        generation_config: Parsed generation_config.json, or None; its end-of-sequence tokens join the config's.
        source: What errors call config.json, for example its path.
        remedy: What to do about a value that is not acceptable.

    Raises:
        UnsupportedModelError: The architecture, or an option of it, is not one this program runs.
        CheckpointError: A value is missing or not acceptable.
    """
    config = text_part(config)
    fields = Fields(table=config, source=source, remedy=remedy)
    family = family_of(config, source=source)
    spec = family.read(fields)
    tables = [
        fields,
        Fields(table=generation_config or {}, source=source.replace("config.json", "generation_config.json")),
    ]
    begin = [token for table in tables for token in table.token_ids("bos_token_id")]
    end = [token for table in tables for token in table.token_ids("eos_token_id")]
    return replace(
        spec,
        family=family.model_type,
        bos_token_id=begin[0] if begin else None,
        eos_token_ids=tuple(dict.fromkeys(end)),
    )
