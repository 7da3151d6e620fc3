"""The description of a family, and the parts of config.json that all families share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from models import mtp
from models.errors import CheckpointError, UnsupportedModelError
from models.families.fields import Fields
from models.families.rotary import rope_spec
from models.spec import Activation, Mixer, MixtureSpec, ModelSpec, RopeKind

SEPARATE_LINEAR_SOURCES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Modules of a block that make up each linear layer, in the order they are fused."""
PROJECTIONS: Mapping[str, tuple[str, ...]] = {"gate_up": ("gate_proj", "up_proj"), "down": ("down_proj",)}
"""The same of an expert."""
GATED_ROUTERS = ("mlp.gate", "mlp.shared_expert_gate")
"""Modules of a router where the shared expert has a gate."""
NORMS: Mapping[str, str] = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "sinks": "self_attn.sinks",
    "router_bias": "mlp.router",
    "router_correction": "mlp.gate",
}
"""Modules of a block's norms, and its other vectors, as most families call them."""
NORMS_AFTER: Mapping[str, str] = {
    **NORMS,
    "o_norm": "post_attention_layernorm",
    "post_norm": "pre_feedforward_layernorm",
    "down_norm": "post_feedforward_layernorm",
}
"""The same in families with norms behind attention and MLP."""
CORRECTION = ".e_score_correction_bias"
"""How the tensor of a router's correction is called behind its module."""
_PARTS = {
    "sinks": "",
    "scale": "",
    "router_norm": "",
    "decay": "",
    "dt": "",
    "skip": "",
    "conv_bias": ".bias",
    "rising": ".alpha_p",
    "falling": ".alpha_n",
    "router_bias": ".bias",
    "router_correction": CORRECTION,
}
"""How tensors of vectors are called behind the name of their module, if not `.weight`."""
GATED: Mapping[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
"""Activations of gates, by what config.json calls them."""
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
"""Keys of the number of experts."""
MOST_TAPS = 9
"""Most tokens that a convolution may see: what a slot keeps of recent ones (`runtime.kv.states`)."""
DEEPEST, WIDEST, LARGEST_VOCABULARY, MOST_EXPERTS = 1000, 1 << 20, 1 << 24, 4096
"""Maximum numbers of blocks, channels, tokens and experts of a model: ten times those of the largest known ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of checkpoints, with its reading of config.json and its tensor names."""

    model_type: str
    """`model_type` of config.json, and ModelSpec.family."""
    architecture: str
    """The class that config.json names under `architectures`."""
    read: Callable[[Fields], ModelSpec]
    """Builds the specification, without token ids."""
    linear_sources: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: SEPARATE_LINEAR_SOURCES)
    """Modules of a block that make up each linear layer, in the order they are fused. A fourth of `qkv`, of gates, has
    no bias, and is there if the specification is `gated`."""
    mixer_sources: Mapping[Mixer, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """The same for blocks with other mixers than attention, and the modules of their vectors."""
    norms: Mapping[str, str] = field(default_factory=lambda: NORMS)
    outer: Mapping[str, str] = field(default_factory=dict)
    """Modules that blocks share, by what each calls its part of them, and the table of `tokens`."""
    last_norm: str = "model.norm"
    multipliers: Callable[[Fields], Mapping[str, float]] = lambda _: {}
    """Multipliers of config.json that fold into weights: factors of `q`, `o`, `down`, of norms and others; of all
    blocks, or with its name of one."""
    norm_offset: float = 0.0
    """What is added to the stored weights of all norms: 1 in families that store w and multiply by 1 + w."""
    last_offset: bool = True
    """Whether that holds for the norm before the head, too."""
    made: tuple[str, ...] = ()
    """Norms of a block whose weights are ones, and no tensor."""
    normed_embedding: bool = False
    """Whether rows of the embedding table pass an RMSNorm without weights, with the epsilon of the others."""
    interleaved: bool = False
    """Whether channels 2i and 2i + 1 of a head rotate together. The rows of q and k are then read in another order."""
    centered: bool = False
    """Whether norms of the stream are LayerNorms without a bias. What is added to the stream then has no mean."""
    proportional: bool = False
    """Whether a share of all pairs i and i + D / 2 of a head rotates. Those rows of q and k, and of their norms, are
    then read first."""
    keys_as_values: str = ""
    """The key of config.json that says whether values are made by the weights of keys in blocks without a window."""
    wrapper: str = ""
    """The class of multimodal checkpoints whose text part is of this family."""
    mixture: bool = False
    routers: tuple[str, ...] = ("mlp.gate",)
    """Modules of a block's router: of the experts to choose from, and of the share of shared ones."""
    projections: Mapping[str, tuple[str, ...]] = field(default_factory=lambda: PROJECTIONS)
    """Modules of an expert that make up each of its linear layers."""
    expert_scales: str = ""
    """Vector of a block with a factor of each expert, which folds into its `down`."""
    input_scales: Mapping[str, str] = field(default_factory=dict)
    """Vectors of a block with a factor of each input of a linear layer, which fold into it."""
    alternating: bool = False
    """Whether gate and up alternate in tensors of all experts, which are [E, inputs, outputs] (`models.experts`)."""
    predicts_further: bool = False
    """Whether another block may follow the last, which predicts a further token (`models.mtp`)."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of tensors' names in its checkpoints, and what they are called here (`models.experts`)."""

    places: Callable[[Fields], Mapping[str, str]] = lambda _: {}
    """What else begins tensors' names, behind `renamed`, up to the third point behind `model.layers.`, and how they
    begin here, where blocks have other numbers."""

    def sources(self, name: str, mixer: Mixer = "attention") -> tuple[str, ...]:
        """Modules of the checkpoint whose tensors make up what `models.architecture` calls `name`.

        Several are fused along the output. A tensor is called `{module}.weight` or `{module}.bias`.
        """
        if not name.startswith("layers."):
            return {"embed": ("model.embed_tokens",), "norm": (self.last_norm,), "head": ("lm_head",)}[name]
        _, layer, *expert, part = name.split(".")
        own = ".".join((*expert, part))
        if own in self.outer:
            return (self.outer[own],)
        if expert and expert[0] == "experts":
            return tuple(f"model.layers.{layer}.mlp.experts.{expert[-1]}.{module}" for module in self.projections[part])
        if part == "router":
            return tuple(f"model.layers.{layer}.{module}" for module in self.routers)
        modules = {**self.linear_sources, **self.mixer_sources.get(mixer, {})}
        if own in mtp.MODULES:
            return (f"model.layers.{layer}.{mtp.MODULES[own]}",)
        found = modules[own] if own in modules else (self.norms[own],)
        return tuple(f"model.layers.{layer}.{module}" for module in found)

    def vector(self, name: str, mixer: Mixer = "attention") -> tuple[str, ...]:
        """The tensors of a norm or another vector by its name in `models.architecture`; several of a convolution."""
        part = _PARTS.get(name.rsplit(".", 1)[-1], ".weight")
        return tuple(module + part for module in self.sources(name, mixer))


def read_common(
    fields: Fields,
    *,
    head_dim: int | None = None,
    eps: str = "rms_norm_eps",
    activations: Mapping[str, Activation] = GATED,
) -> dict[str, Any]:
    """The arguments of `ModelSpec` that every family reads alike; `spec_from_config` fills in the family.

    Options that change a block's arithmetic in unsupported ways are refused.

    Args:
        fields: config.json.
        head_dim: What an absent `head_dim` means; None = hidden_size / num_attention_heads.
        eps: The key of the norms' epsilon.
        activations: Those of its MLP by what config.json calls them.
    """
    key = "hidden_activation" if fields.table.get("hidden_activation") is not None else "hidden_act"
    activation = fields.text(key, "silu")
    if activation not in activations:
        raise UnsupportedModelError(
            f"{fields.source}: {key} '{activation}' is not supported (supported: {', '.join(activations)}). "
            "Choose another model."
        )
    hidden = fields.integer("hidden_size", most=WIDEST)
    heads = fields.integer("num_attention_heads", most=WIDEST)
    kv_heads = fields.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise fields.wrong("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads ({heads})")
    width = fields.optional_integer("head_dim", most=WIDEST) or head_dim
    if width is None:
        if hidden % heads:
            raise fields.wrong("hidden_size", hidden, f"a multiple of num_attention_heads ({heads})")
        width = hidden // heads
    return {
        "family": "",
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size", most=WIDEST),
        "num_layers": layers_of(fields),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": width,
        "vocab_size": fields.integer("vocab_size", most=LARGEST_VOCABULARY),
        "max_context": fields.integer("max_position_embeddings"),
        "norm_eps": fields.number(eps),
        "tied": fields.flag("tie_word_embeddings", False),
        "activation": activations[activation],
    }


def read_spec(
    fields: Fields,
    *,
    head_dim: int | None = None,
    eps: str = "rms_norm_eps",
    activations: Mapping[str, Activation] = GATED,
    aliases: Mapping[str, RopeKind] | None = None,
    **own: Any,
) -> ModelSpec:
    """The specification of blocks with one rotary embedding and no windows, but for what a family has of its own.

    Args:
        fields: config.json.
        head_dim: As in `read_common`.
        eps: As in `read_common`.
        activations: As in `read_common`.
        aliases: As in `rope_spec`.
        own: Fields of `ModelSpec`, which win over those that all families read alike.
    """
    common = read_common(fields, head_dim=head_dim, eps=eps, activations=activations)
    if "rope" not in own:
        common["rope"] = rope_spec(fields, common["head_dim"], common["max_context"], aliases=aliases)
    return ModelSpec(**{"windows": (None,) * common["num_layers"], **common, **own})


def attention_biases(fields: Fields, default: bool = False) -> dict[str, Any]:
    """Whether q, k, v and the output projection have biases, where one switch says it."""
    biased = fields.flag("attention_bias", default)
    return {"qkv_bias": biased, "o_bias": biased}


def layers_of(fields: Fields) -> int:
    return fields.integer("num_hidden_layers", most=DEEPEST)


def read_mixture(
    fields: Fields,
    *,
    width: int,
    normalized: bool,
    dense: tuple[int, ...] = (),
    shared: str = "",
    counted: str = "",
    **how: Any,
) -> MixtureSpec:
    """Read the numbers of experts.

    Args:
        fields: config.json.
        width: Of an expert.
        normalized: Whether the shares of a token's experts add up to 1.
        dense: Blocks that have an MLP instead.
        shared: The key of the width of a shared expert, which counts as several if it is wider; "": there is none.
        counted: Instead, the key of the number of shared experts.
        how: How experts are chosen and weighed: fields of `MixtureSpec`.
    """
    key = next((key for key in EXPERTS if fields.table.get(key) is not None), "num_experts")
    per_token = "moe_k" if fields.table.get("moe_k") is not None else "num_experts_per_tok"
    experts, chosen = fields.integer(key, most=MOST_EXPERTS), fields.integer(per_token)
    if chosen > experts:
        raise fields.wrong(per_token, chosen, f"at most {key} ({experts})")
    wide = fields.integer(shared, most=WIDEST) if shared and fields.table.get(shared) != 0 else 0
    if wide % width:
        raise fields.wrong(shared, wide, f"a multiple of the width of the other experts ({width})")
    number = fields.integer(counted, most=MOST_EXPERTS) if counted and fields.table.get(counted) != 0 else 0
    return MixtureSpec(
        experts=experts,
        chosen=chosen,
        width=width,
        normalized=normalized,
        dense=dense,
        shared=number or wide // width,
        **how,
    )


def blocks_with_mlps(fields: Fields, layers: int) -> tuple[int, ...]:
    """Blocks of Qwen's mixtures with an MLP.

    Those that `mlp_only_layers` lists, and all but every `decoder_sparse_step`-th one.
    """
    listed, step = fields.table.get("mlp_only_layers") or [], fields.integer("decoder_sparse_step", 1)
    if not isinstance(listed, list) or any(type(each) is not int or not 0 <= each < layers for each in listed):
        raise fields.wrong("mlp_only_layers", listed, f"a list of numbers from 0 to {layers - 1}")
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


def refuse_attention_bias(fields: Fields) -> None:
    """Refuse `attention_bias` in a family whose attention has no biases.

    Raises:
        UnsupportedModelError: The config asks for them.
    """
    if fields.flag("attention_bias", False):
        raise UnsupportedModelError(
            f"{fields.source}: 'attention_bias' is true, which {fields.table.get('model_type')} models do not have. "
            "Choose another model."
        )


def every(interval: int, num_layers: int, window: int | None) -> tuple[int | None, ...]:
    """Sliding windows of blocks of which every so many have none."""
    return tuple(None if (layer + 1) % interval == 0 else window for layer in range(num_layers))


def listed_mixers(fields: Fields, known: Mapping[str, Mixer], absent: Callable[[int], list[str]]) -> tuple[Mixer, ...]:
    """What mixes the tokens of each block by `layer_types`, whose values are `known`.

    Args:
        fields: config.json.
        known: Mixers by what config.json calls them.
        absent: The list for so many blocks where config.json has none.
    """
    layers, types = layers_of(fields), fields.table.get("layer_types")
    if types is None:
        types = absent(layers)
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {layers} times one of {' or '.join(known)}")
    return tuple(known[kind] for kind in types)


def listed_windows(fields: Fields, num_layers: int, window: int | None) -> tuple[int | None, ...] | None:
    """Sliding windows by `layer_types`; None where config.json has no such list.

    Raises:
        CheckpointError: The list is wrong, or asks for windows where there is none.
    """
    types = fields.table.get("layer_types")
    if types is None:
        return None
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in known for kind in types):
        raise fields.wrong("layer_types", types, f"a list of {num_layers} times one of {' or '.join(known)}")
    if window is None and "sliding_attention" in types:
        raise CheckpointError(
            f"{fields.source}: 'layer_types' has sliding_attention, but neither 'sliding_window' nor "
            f"'use_sliding_window' gives a width. {fields.remedy}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def shared_mixers(fields: Fields, windows: tuple[int | None, ...]) -> tuple[Mixer, ...]:
    """Mixers of blocks of which the last `num_kv_shared_layers` read the cache of an earlier one; () where none do.

    Raises:
        CheckpointError: No block is left whose cache one with, or one without, a window reads.
    """
    shared = fields.count("num_kv_shared_layers", len(windows))
    own = [window is None for window in windows[: len(windows) - shared]]
    if not {window is None for window in windows} <= set(own):
        why = "so few that a block of each kind is left whose cache is read"
        raise fields.wrong("num_kv_shared_layers", shared, why)
    mixers: tuple[tuple[Mixer, int], ...] = (("attention", len(own)), ("shared", shared))
    return tuple(mixer for mixer, count in mixers for _ in range(count)) if shared else ()


def used_window(fields: Fields) -> int | None:
    return fields.integer("sliding_window", 4096) if fields.flag("use_sliding_window", False) else None


def layer_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Sliding windows of Qwen2 and Qwen3: off unless asked for, and then on some blocks.

    `layer_types` says which blocks; without it the blocks from `max_window_layers` on have a window.
    """
    window = used_window(fields)
    listed = listed_windows(fields, num_layers, window)
    if listed is not None:
        return listed
    first = fields.table.get("max_window_layers", 28)
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise fields.wrong("max_window_layers", first, "a number of layers")
    return tuple(window if layer >= first else None for layer in range(num_layers))
