"""`ModelSpec`: everything needed to run an architecture, independent of any checkpoint's naming."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

RopeKind = Literal["default", "linear", "llama3", "longrope", "yarn"]
Activation = Literal["silu", "gelu_tanh", "clamped_silu", "relu2", "xielu"]
"""`clamped_silu` is gpt-oss's: (up + 1) * g * sigmoid(1.702 g), with g and up within limits (`ModelSpec.gate_limit`).
The last two are of one number, in an MLP without a gate: max(x, 0)², and Apertus's, which has two slopes."""
UNGATED: tuple[Activation, ...] = ("relu2", "xielu")
XIELU_LINEAR, XIELU_MOST = 0.5, -1e-6
XIELU_SLOPES = ("rising", "falling")
"""Vectors a and b of xIELU, the factor of x, and where the exponential ends: of x > 0 it is a x² + x / 2, else
b (exp(min(x, -1e-6)) - 1 - x) + x / 2 (Huang and Schlag 2024)."""
CLAMPED_GAIN = 1.702
"""Of its sigmoid."""
NormForm = Literal["head", "all", "after_rope"]
GateForm = Literal["sigmoid", "softplus"]
Scoring = Literal["softmax", "sigmoid"]
Mixer = Literal["attention", "shared", "convolution", "delta", "both"]
"""What mixes the tokens of a block: attention, with a cache, or over an earlier block's, which is `shared`; the others
have a state instead, or one `delta` beside attention."""
_STATES = ("convolution", "delta")

LAYER_TYPES = ("qkv", "o", "gate_up", "down")
"""The linear layers of a block, by the names of QDEC §4.4: `qkv` is what a block's mixer reads the stream by, `o` what
it writes by, also where it is no attention."""
LAYER_KINDS = (*LAYER_TYPES, "head")
"""All kinds of linear layers: those of a block, and the output head."""
MLP_TYPES = ("gate_up", "down")
"""Those of an MLP, and of an expert."""
QUERIES = "queries.qkv"
"""A further linear layer of a block whose queries have a latent, of which it makes them."""
TOKEN_LINEARS = ("inner.gate_up", "tokens.gate_up", "inner.down")
"""Further linear layers of a block with embeddings of its own: of the stream, of the tokens' first embeddings, and back
to the stream."""
STATE_QKV, STATE_O = "state.qkv", "state.o"
"""Further linear layers of a block with a state beside attention, as `qkv` and `o` are of one that has no attention."""
LAUREL_LINEARS = ("laurel.gate_up", "laurel.down")
"""Further linear layers of a block of several streams, in front of attention: to the rank of LAuReL, and back."""
_OF_STATES = ("conv", "conv_bias", "decay", "dt", "skip", "gain")
"""Vectors of a delta rule."""
JOIN = "join.down"
"""The linear layer in front of a block that predicts a further token: of an embedding and of what the model left, side
by side, to the stream."""
_EXPERT_PARTS = 5
"""Parts of the name of an expert's layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding, half-split convention (dimension i pairs with i + rotary_dim / 2)."""

    theta: float = 10000.0
    """Base of the geometric frequency progression."""
    rotary_dim: int = 0
    """Leading dimensions of a head that rotate; the rest passes through (Phi's partial rotary factor)."""
    kind: RopeKind = "default"
    factor: float = 1.0
    """Context extension factor of `linear`, `llama3` and `yarn`."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above original_context / low_freq_factor are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths under original_context / high_freq_factor are left alone."""
    original_context: int = 0
    """Context length of pre-training, for `llama3`, `longrope` and `yarn`; 0 where it does not apply."""
    beta_fast: float = 32.0
    """`yarn`: pairs that turn more often than this in the original context are left alone."""
    beta_slow: float = 1.0
    """`yarn`: pairs that turn less often than this are stretched by `factor`."""
    truncate: bool = True
    """`yarn`: whether the blend between the two begins and ends at whole pairs."""
    short_factor: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency while the context fits original_context."""
    long_factor: tuple[float, ...] = ()
    """`longrope`: divisor of each frequency beyond it."""
    attention_factor: float = 1.0
    """Multiplier of cos and sin (`longrope`, `yarn`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaSpec:
    """Heads of a gated delta rule, or of Mamba-2; several value heads share a query and a key.

    Mamba-2's C, B and x are queries, keys and values: it is the rule without what a state forgets for a new value.
    """

    key_heads: int
    value_heads: int
    """Value heads, a multiple of that; each has a matrix."""
    key_dim: int
    """Dk, width of a query or key, and rows of a matrix."""
    value_dim: int
    """Dv, width of a value, and columns of a matrix."""
    mamba: bool = False
    """Whether it is Mamba-2. Beta is its step then, which makes the decay, too, and whose rows are there twice."""
    biased: bool = False
    """Whether its projections have biases."""
    normed: bool = True
    """Whether outputs pass a norm."""
    eps: float | None = None
    """Epsilon of that norm, where it is one of its own."""
    most: float = 1.0
    """Of a delta rule's beta; 2 lets what a state holds for a key turn into its negative (OLMo hybrid)."""

    @property
    def gain_width(self) -> int:
        """Weights of the norm of outputs: of a head, or of all, where heads that share a key have a norm."""
        return self.value_width if self.mamba else self.value_dim

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of queries, keys and values, which pass a short convolution."""
        return 2 * self.key_width + self.value_width

    @property
    def inputs(self) -> int:
        """What enters the state of each token: these channels, and two numbers a value head, beta's and the decay's."""
        return self.channels + 2 * self.value_heads


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentSpec:
    """Multi-head latent attention, as what it comes to: all query heads read one key-value head.

    Its keys are the channels that rotate, then a token's latent, normalized; its values are that latent, then zeros.
    What made keys and values of each head of it is in the weights of queries and of `o` (`models.latent`).
    """

    rank: int
    """R, channels of a latent, and of what each head gives `o`."""
    key_dim: int
    """In the checkpoint, channels of a head's keys that do not rotate."""
    value_dim: int
    """In the checkpoint, channels of a head's values."""
    query_rank: int = 0
    """Channels of the latent, with a norm of its own, that `queries.qkv` makes queries of; 0: `qkv` does."""

    def weights(self, heads: int, hidden: int, rotating: int) -> int:
        """Matrices of a block's attention in the checkpoint, whose heads are apart."""
        queries = heads * (self.key_dim + rotating)
        found = self.query_rank * (hidden + queries) if self.query_rank else hidden * queries
        found += (self.rank + rotating) * hidden + self.rank  # the last are the weights of the latent's norm
        return found + heads * (self.rank * (self.key_dim + self.value_dim) + self.value_dim * hidden)


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """Experts, gated MLPs of which a router chooses a few for each token, in place of a block's MLP."""

    experts: int
    """E, experts of a block of which a token's are chosen."""
    chosen: int
    width: int
    normalized: bool
    """Whether the shares of a token's experts add up to 1 (Mixtral); else they are those of a softmax over all experts
    (OLMoE)."""
    dense: tuple[int, ...] = ()
    """Blocks that have an MLP instead."""
    shared: int = 0
    """Experts that every token goes to, numbered behind the others (Qwen2-MoE)."""

    bias: bool = False
    """Whether the router and the experts' layers have biases (gpt-oss)."""
    scoring: Scoring = "softmax"
    """What makes scores of the router's logits: a softmax over all, or the sigmoid of each (DeepSeek-V3, GLM-4.5)."""
    corrected: bool = False
    """Whether a vector is added to the scores for the choice, but not to the shares (DeepSeek-V3, §2.1.2)."""
    scale: float = 1.0
    """Factor of the shares of the experts that are chosen."""
    parallel_mlp: bool = False
    """Whether they are beside the MLP, which stays, and not in its place: each has norms of its own (Gemma 4)."""
    gated: bool = True
    """Whether the share of shared experts is the sigmoid of another logit of the router; else it is 1."""

    @property
    def num_experts(self) -> int:
        """Experts of a block, shared ones included."""
        return self.experts + self.shared

    @property
    def experts_per_token(self) -> int:
        """Experts that a token goes to, shared ones included."""
        return self.chosen + self.shared

    @property
    def scores(self) -> int:
        """Rows of the router: one for each expert to choose from, and one for a gated share of shared ones."""
        return self.experts + (self.shared > 0 and self.gated)


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUpSpec:
    """A residual stream that is several, of which blocks read and write the first (Baykal et al. 2023, AltUp).

    What a block reads is in front predicted from all streams, by numbers that the first one chooses; what it made of
    the first corrects all of them. Source of the form: Gemma 3n.
    """

    streams: int
    """S, of C channels each."""
    rank: int
    """R, of LAuReL: the norm of a low-rank product, and what it reads, are added to the stream beside attention, and
    the sum is divided by √2 (Menghani et al. 2024)."""

    def matrices(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Shapes of those of a block that stay in float32, by name."""
        S = self.streams
        return {"altup_router": (S, hidden), "altup_predict": (S * S, S), "altup_correct": (S, S)}

    def ends(self, end: Literal["spread", "merge"]) -> tuple[str, ...]:
        """Linear layers, C to C, of all streams but the first: in front of the first block, or behind the last."""
        return tuple(f"{end}{stream}.down" for stream in range(1, self.streams))


def router_of(layer: int) -> str:
    """Name of the router of a block. It may have `layers.3.router_bias` and `layers.3.router_correction`."""
    return f"layers.{layer}.router"


def expert_of(name: str) -> int | None:
    """The expert that a linear layer, `layers.3.experts.17.down`, belongs to; None if it belongs to none."""
    parts = name.split(".")
    return int(parts[3]) if len(parts) == _EXPERT_PARTS else None


def is_of_tokens(name: str) -> bool:
    return name.endswith(TOKEN_LINEARS)


def first_expert(name: str) -> str:
    """The linear layer that stands for an expert's in a choice of channels: that of the block's first expert."""
    parts = name.split(".")
    return name if len(parts) != _EXPERT_PARTS else ".".join((*parts[:3], "0", parts[4]))


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Heads of a block with attention."""

    heads: int
    """H, query heads."""
    kv_heads: int
    """H_kv, key-value heads; divides H."""
    dim: int
    """D."""

    @property
    def q_width(self) -> int:
        """Channels of all query heads, H * D."""
        return self.heads * self.dim

    @property
    def kv_width(self) -> int:
        """Channels of all key (or value) heads, H_kv * D."""
        return self.kv_heads * self.dim


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer: blocks of a mixer, mostly grouped-query attention, and a gated MLP or several."""

    family: str
    """`model_type` of its family, see `models.families`."""
    hidden_size: int
    """C."""
    intermediate_size: int
    num_layers: int
    num_heads: int
    """H, query heads."""
    num_kv_heads: int
    """H_kv, key-value heads; divides H."""
    head_dim: int
    """D."""
    wide_heads: HeadShape | None = None
    """Heads of the blocks without a window, where they are others (Gemma 4)."""
    vocab_size: int
    """V."""
    max_context: int
    """Longest context in tokens."""
    norm_eps: float
    """Epsilon of every RMSNorm, or of those that read the residual stream."""
    rope: RopeSpec
    window_rope: RopeSpec | None = None
    """Rotary embedding of the blocks with a window, where it is another one (Gemma 3)."""
    windows: tuple[int | None, ...]
    """Per block: sliding window in tokens (a query sees itself and the window - 1 tokens before it), or None."""
    nope_layers: tuple[int, ...] = ()
    """Blocks without a rotary embedding (SmolLM3)."""
    mixers: tuple[Mixer, ...] = ()
    """Per block: what mixes its tokens; empty: attention in all of them. One that is `shared` reads the cache of the
    last block before the first such one that has a window, or has none, as it does."""
    bare: tuple[int, ...] = ()
    """Blocks without an MLP or experts (Nemotron-H)."""
    conv_kernel_size: int = 0
    """Tokens that a short convolution sees, its own included."""
    delta: DeltaSpec | None = None
    latent: LatentSpec | None = None
    """Whether attention reads latents, in all blocks (DeepSeek-V2). Heads are what `LatentSpec` says."""
    gated: bool = False
    """Whether what attention gives is multiplied by the sigmoid of a gate, channel by channel (Qwen3.5)."""
    gate_form: GateForm = "sigmoid"
    """Or by another function of it (Laguna)."""
    head_gates: bool = False
    """Whether there is a gate for each head instead of each channel (Laguna)."""
    query_heads: tuple[int, ...] = ()
    """H of each block, where blocks differ (Laguna)."""
    conv_bias: bool = False
    norm_before: bool = True
    """Whether attention and MLP read the residual stream through an RMSNorm (not in OLMo 2)."""
    norm_after: bool = False
    """Whether what they add to the residual stream passes an RMSNorm first (Gemma 2, OLMo 2)."""
    states_normed_before: bool = False
    """Whether blocks with a state have the norms before instead of those behind (OLMo hybrid)."""
    parallel: bool = False
    """Whether attention and MLP read the same stream, to which both are added (Cohere)."""
    after_eps: float | None = None
    """Epsilon of the norms behind attention and MLP, where it is another one."""
    inner_eps: float | None = None
    """Epsilon of the norms that do not read the residual stream, where it is another one."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys pass an RMSNorm, each head by itself and before the rotation (Qwen3)."""
    v_norm: bool = False
    """Whether values pass one without a weight, each head by itself (Gemma 4)."""
    qk_norm_form: NormForm = "head"
    """Whether that is so, or it is over `all` heads together (OLMo 2), or over each `after_rope` (Hunyuan)."""
    query_growth: float = 0.0
    """Queries at position p are multiplied by 1 + this * ln(1 + p // query_growth_context) (Ministral 3)."""
    query_growth_context: int = 1
    sinks: bool = False
    """Whether each query head has a score of its own that takes a share of attention and adds nothing (gpt-oss)."""
    score_cap: float | None = None
    """Attention scores s become c * tanh(s / c) (Gemma 2)."""
    logit_cap: float | None = None
    activation: Activation = "silu"
    gate_limit: float = 0.0
    """`clamped_silu`: most of g and of up, whose least is its negative."""
    mlp_widths: tuple[int, ...] = ()
    """Width of each block's MLP, where blocks differ (Gemma 4)."""
    sparsity: tuple[float, ...] = ()
    """Of each block the share of its MLP's gates, if they are normally distributed, that is cut to 0 (Gemma 3n)."""
    token_width: int = 0
    """P, width of a token's embeddings for each block, which it adds behind its MLP (Gemma 4); 0: there are none."""
    token_vocab: int | None = None
    """Tokens that have such embeddings, where these are fewer than V: the others have the first's (Gemma 3n)."""
    altup: AltUpSpec | None = None
    """Whether the residual stream is several; then blocks have embeddings of their own, and norms behind."""
    scaled: bool = False
    """Whether the residual stream is multiplied by a number of each block at its end (Gemma 4)."""
    mixture: MixtureSpec | None = None
    """The experts of its blocks; None: every block has an MLP."""
    embeds: bool = True
    """Whether it begins with the tokens' embeddings; else with the residual stream that earlier blocks left: see
    `models.part`."""
    joins: bool = False
    """Whether its stream begins with the tokens' embeddings joined with rows of another stream (`models.mtp`)."""
    has_head: bool = True
    """Whether final norm and head follow its blocks."""
    tied: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = field(default=())
    """Every token that ends a generation, from config.json and generation_config.json."""

    @property
    def q_width(self) -> int:
        """Channels of all query heads, H * D, where blocks do not differ."""
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Channels of all key (or value) heads, H_kv * D, where blocks do not differ."""
        return self.num_kv_heads * self.head_dim

    def heads_of(self, layer: int) -> HeadShape:
        if self.wide_heads is not None and self.windows[layer] is None:
            return self.wide_heads
        heads = self.query_heads[layer] if self.query_heads else self.num_heads
        return HeadShape(heads, self.num_kv_heads, self.head_dim)

    @property
    def mlp_parts(self) -> int:
        """How often as many rows as an MLP is wide `gate_up` has: gate and up, or up alone."""
        return 1 if self.activation in UNGATED else 2

    def norms(self, layer: int) -> tuple[bool, bool]:
        """Whether a block has norms before attention and MLP, and behind them."""
        before = self.states_normed_before and self.mixer(layer) in _STATES
        return self.norm_before or before, self.norm_after and not before

    def mlp_width(self, layer: int) -> int:
        return self.mlp_widths[layer] if self.mlp_widths else self.intermediate_size

    def cut(self, layer: int) -> float | None:
        """Where a block's gates end, in standard deviations above their mean; None: they don't."""
        share = self.sparsity[layer] if self.sparsity else 0.0
        return NormalDist().inv_cdf(share) if share > 0 else None

    @property
    def stream_width(self) -> int:
        """Channels of the residual stream between two blocks."""
        return self.hidden_size * (1 if self.altup is None else self.altup.streams)

    def spreads(self, layer: int) -> bool:
        """Whether the stream becomes several in front of a block."""
        return self.altup is not None and self.embeds and layer == 0

    def merges(self, layer: int) -> bool:
        """Whether it becomes one again behind a block."""
        return self.altup is not None and self.has_head and layer == self.num_layers - 1

    def mixer_of(self, name: str) -> Mixer:
        """The mixer that a linear layer or a vector belongs to, `layers.3.state.o`; of two, one of them."""
        _, layer, *own = name.split(".")
        mixer = self.mixer(int(layer))
        if mixer != "both":
            return mixer
        return "delta" if own[0] in ("state", *_OF_STATES) else "attention"

    def state_linear(self, layer: int) -> str:
        """The linear layer that a state reads the stream by."""
        return f"layers.{layer}.{STATE_QKV if self.mixer(layer) == 'both' else 'qkv'}"

    def mixer(self, layer: int) -> Mixer:
        return self.mixers[layer] if self.mixers else "attention"

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Blocks that have a cache: those with attention of their own."""
        return tuple(layer for layer in range(self.num_layers) if self.mixer(layer) in ("attention", "both"))

    @property
    def state_layers(self) -> tuple[int, ...]:
        return tuple(layer for layer in range(self.num_layers) if self.mixer(layer) in (*_STATES, "both"))

    def cache_of(self, layer: int) -> int:
        """The block whose cache a block with attention reads: itself, or where that is shared, an earlier one."""
        if self.mixer(layer) != "shared":
            return layer
        alike = (own for own in self.attention_layers if (self.windows[own] is None) == (self.windows[layer] is None))
        return max(alike)

    @property
    def lent_layers(self) -> tuple[int, ...]:
        """Blocks whose cache others read, in their order."""
        shared = (layer for layer in range(self.num_layers) if self.mixer(layer) == "shared")
        return tuple(sorted({self.cache_of(layer) for layer in shared}))

    @property
    def parameters(self) -> int:
        """Weights of the full-precision model; a tied embedding and what is stored here twice count once."""
        count = self.vocab_size * self.hidden_size * (1 if self.tied else 2) + self.hidden_size
        count += self.token_weights
        if self.latent is not None:
            each = self.latent.weights(self.num_heads, self.hidden_size, self.rope.rotary_dim)
            count += self.num_layers * each
        for name in (name for layer in range(self.num_layers) for name in self.block_linears(layer)):
            if self.latent is not None and name.endswith(("qkv", ".o")):
                continue
            rows, width = self.linear_shape(name)
            count += rows * width + (rows if self.has_bias(name) else 0)
        for layer in range(self.num_layers):
            count += sum(self.block_vectors(layer).values())
            count += sum(rows * width for rows, width in self.routers(layer).values())
        if self.delta is not None and self.delta.mamba:
            twice = self.delta.value_heads * (self.hidden_size + self.delta.biased)
            count -= twice * len(self.state_layers)
        if self.token_width:  # the norm of what blocks share
            count -= (self.num_layers - 1) * self.token_width
        if self.altup is not None:  # a factor of each channel that `inner.gate_up` reads, for one that is no tensor
            count += self.num_layers * (self.hidden_size - 1)
        return count - self.hidden_size * self.num_layers * self.parallel

    @property
    def token_count(self) -> int:
        """Tokens that have embeddings of the blocks' own."""
        return self.token_vocab or self.vocab_size

    @property
    def token_weights(self) -> int:
        """Of these, the embeddings of blocks' own, of which a token reads a row."""
        return self.token_count * self.num_layers * self.token_width

    def has_experts(self, layer: int) -> bool:
        """Whether a block has a mixture of experts in place of an MLP."""
        return self.mixture is not None and layer not in self.mixture.dense and layer not in self.bare

    def products(self, layer_type: str) -> int:
        """Linear layers of a type that a token passes: `head` is one, `down` one of each block or chosen expert."""
        if layer_type == "head":
            return int(self.has_head)
        if layer_type not in MLP_TYPES:
            return self.num_layers + self.mixers.count("both")
        mlps = self.num_layers - len(self.bare)
        if self.mixture is None:
            return mlps
        mixtures = sum(map(self.has_experts, range(self.num_layers)))
        return mlps + mixtures * (self.mixture.experts_per_token - (not self.mixture.parallel_mlp))

    def share_read(self, name: str) -> float:
        """The share of tokens that read a linear layer or an expert's tensor, if all experts are alike."""
        expert, mixture = expert_of(name), self.mixture
        if expert is None or mixture is None or expert >= mixture.experts:
            return 1.0
        return mixture.chosen / mixture.experts

    def block_vectors(self, layer: int) -> dict[str, int]:
        """Widths of a block's norms and of what else its mixer has, by their names, `layers.3.input_norm`.

        A convolution's `conv` is [taps, C], tap by tap, and `conv_bias` [C]. A delta rule's `conv` is [taps, channels];
        `decay` and `dt` have a number for each value head, -exp(A) and the step's bias; `gain` [Dv] is the weight of
        the norm of each head's output. Mamba-2 has a `conv_bias`, too, `skip` with a factor of each head's values, and
        a `gain` of all heads. `scale` is what the stream is multiplied by, `laurel_scale` what it is before the MLP;
        `rising` and `falling` are the slopes of xIELU on either side. Of several streams `altup_norm` [C] and
        `altup_router` [S, C] make S numbers of a stream, `altup_predict` [S², S] and `altup_correct` [S, S] what
        streams take from each other and from a block.
        """
        before, after = self.norms(layer)
        vectors = {"input_norm": self.hidden_size, "post_norm": self.hidden_size} if before else {}
        if layer in self.bare:
            vectors.pop("post_norm", None)
        if self.mixer(layer) not in _STATES:
            vectors |= self._attention_vectors(layer)
        if self.mixer(layer) == "convolution":
            vectors["conv"] = self.conv_kernel_size * self.hidden_size
            if self.conv_bias:
                vectors["conv_bias"] = self.hidden_size
        elif self.mixer(layer) in ("delta", "both") and self.delta is not None:
            vectors["conv"] = self.conv_kernel_size * self.delta.channels
            if self.conv_bias:
                vectors["conv_bias"] = self.delta.channels
            of_heads = ("decay", "dt", "skip") if self.delta.mamba else ("decay", "dt")
            vectors |= dict.fromkeys(of_heads, self.delta.value_heads)
            if self.delta.normed:
                vectors["gain"] = self.delta.gain_width
        if self.mixture is not None and self.mixture.bias and self.has_experts(layer):
            vectors["router_bias"] = self.mixture.scores
        if self.mixture is not None and self.mixture.corrected and self.has_experts(layer):
            vectors["router_correction"] = self.mixture.experts
        if after:
            vectors |= {"o_norm": self.hidden_size, "down_norm": self.hidden_size}
        if self.mixture is not None and self.mixture.parallel_mlp and self.has_experts(layer):
            vectors |= dict.fromkeys(("router_norm", "mlp_norm", "experts_norm", "experts_down_norm"), self.hidden_size)
        if self.token_width:
            vectors |= {"tokens.gate_up_norm": self.token_width, "inner.down_norm": self.hidden_size}
        if self.scaled:
            vectors["scale"] = 1
        if self.altup is not None:
            C = self.hidden_size
            vectors |= {"altup_norm": C, "laurel.down_norm": C, "laurel_scale": 1}
            vectors |= {name: math.prod(shape) for name, shape in self.altup.matrices(C).items()}
        if self.activation == "xielu":
            vectors |= dict.fromkeys(XIELU_SLOPES, 1)
        if self.joins:
            vectors |= dict.fromkeys(("embed_norm", "hidden_norm"), self.hidden_size)
        return {f"layers.{layer}.{name}": width for name, width in vectors.items()}

    def _attention_vectors(self, layer: int) -> dict[str, int]:
        vectors: dict[str, int] = {}
        if self.qk_norm:
            all_together, heads = self.qk_norm_form == "all", self.heads_of(layer)
            vectors["q_norm"] = heads.q_width if all_together else heads.dim
            if self.mixer(layer) != "shared":
                vectors["k_norm"] = heads.kv_width if all_together else heads.dim
        if self.sinks:
            vectors["sinks"] = self.num_heads
        if self.latent is not None and self.latent.query_rank:
            vectors["queries_norm"] = self.latent.query_rank
        return vectors

    def vector_names(self) -> tuple[str, ...]:
        """Names of all vectors, the norm before the head last."""
        of_blocks = (name for layer in range(self.num_layers) for name in self.block_vectors(layer))
        return (*of_blocks, *(("norm",) if self.has_head else ()))

    def routers(self, layer: int) -> dict[str, tuple[int, int]]:
        """Shape [scores, C] of a block's router by its name, `layers.3.router`; empty where it has an MLP."""
        if self.mixture is None or not self.has_experts(layer):
            return {}
        return {router_of(layer): (self.mixture.scores, self.hidden_size)}

    def router_names(self) -> tuple[str, ...]:
        return tuple(name for layer in range(self.num_layers) for name in self.routers(layer))

    def read_width(self, norm: str) -> int:
        """Channels that a `read` with a norm of this name has; "" is of the stream as it is."""
        return self.latent.query_rank if self.latent and norm.endswith("queries_norm") else self.hidden_size

    def eps_of(self, name: str) -> float:
        kinds = ("q_norm", "k_norm", "v_norm", "o_norm", "down_norm", "gate_up_norm", "mlp_norm", "queries_norm")
        inner = name.endswith(kinds)
        if self.after_eps is not None and name.endswith(("o_norm", "down_norm")):
            return self.after_eps
        return self.norm_eps if self.inner_eps is None or not inner else self.inner_eps

    @property
    def gain_eps(self) -> float:
        """Epsilon of the norm of what a state gives."""
        if self.delta is not None and self.delta.eps is not None:
            return self.delta.eps
        return self.norm_eps if self.inner_eps is None else self.inner_eps

    def rope_of(self, layer: int) -> RopeSpec | None:
        """Rotary embedding of a block; None where it has none."""
        if layer in self.nope_layers:
            return None
        return self.rope if self.window_rope is None or self.windows[layer] is None else self.window_rope

    @property
    def ropes(self) -> tuple[RopeSpec, ...]:
        return tuple(dict.fromkeys(rope for rope in map(self.rope_of, range(self.num_layers)) if rope is not None))

    @property
    def state_shape(self) -> tuple[int, int, tuple[int, int, int]]:
        """State of a block that has one.

        Channels of its convolution; tokens that this reads before its own; heads, rows and columns of its matrix, zeros
        if it has none.
        """
        if self.delta is not None:
            return (
                self.delta.inputs,
                self.conv_kernel_size - 1,
                (self.delta.value_heads, self.delta.key_dim, self.delta.value_dim),
            )
        return self.hidden_size, self.conv_kernel_size - 1, (0, 0, 0)

    def has_bias(self, name: str) -> bool:
        if expert_of(name) is not None:
            return self.mixture is not None and self.mixture.bias
        kind = name.rsplit(".", 1)[-1]
        biased = {"qkv": self.qkv_bias, "o": self.o_bias, "gate_up": self.mlp_bias, "down": self.mlp_bias}
        state = kind in ("qkv", "o") and self.mixer_of(name) in _STATES
        if state:
            return self.conv_bias if self.delta is None else self.delta.biased
        return biased.get(kind, False) and not is_of_tokens(name) and not name.endswith(JOIN)

    def linear_shape(self, name: str) -> tuple[int, int]:
        """Shape [N, K] of a linear layer (fused, as stored).

        Args:
            name: Its name, or its type: `qkv`, `o`, `gate_up`, `down` or `head`. In a mixture, `gate_up` and
                `down` alone are those of an expert. Where blocks differ, `qkv` and `o` alone are the average.
        """
        width, kind = self.intermediate_size, name.rsplit(".", 1)[-1]
        if name.endswith(JOIN):
            return self.hidden_size, 2 * self.hidden_size
        if name != kind and kind in MLP_TYPES:
            width = self.mlp_width(int(name.split(".")[1]))
        if is_of_tokens(name):
            inside = (self.token_width, self.hidden_size)
            return inside if kind == "gate_up" else inside[::-1]
        if name.endswith(QUERIES) and self.latent is not None:
            return self.q_width, self.latent.query_rank
        if self.altup is not None and name.endswith(
            (*LAUREL_LINEARS, *self.altup.ends("spread"), *self.altup.ends("merge"))
        ):
            width = self.altup.rank if name.endswith(LAUREL_LINEARS) else self.hidden_size
            return (width, self.hidden_size) if kind == "gate_up" else (self.hidden_size, width)
        if self.mixture is not None and (
            expert_of(name) is not None or (name == kind and not self.mixture.parallel_mlp)
        ):
            width = self.mixture.width
        shapes = {
            "gate_up": (self.mlp_parts * width, self.hidden_size),
            "down": (self.hidden_size, width),
            "head": (self.vocab_size, self.hidden_size),
        }
        if kind in shapes:
            return shapes[kind]
        names = [name] if name != kind else [own for own in self._mixing() if own.endswith(f".{kind}")]
        inner = [self._mixer_widths(int(own.split(".")[1]), self.mixer_of(own))[kind == "o"] for own in names]
        mean = round(sum(inner) / len(inner))
        return (mean, self.hidden_size) if kind == "qkv" else (self.hidden_size, mean)

    def attention_widths(self, layer: int) -> tuple[int, ...]:
        """Channels of what a block's `qkv` gives attention: queries, keys and values if it has its own, and gates.

        Of queries that have a latent that, from the first channel on.
        """
        heads = self.heads_of(layer)
        own = () if self.mixer(layer) == "shared" else (heads.kv_width, heads.kv_width)
        first = self.latent.query_rank if self.latent is not None else 0
        gates = (heads.heads if self.head_gates else heads.q_width,) if self.gated else ()
        return (first or heads.q_width, *own, *gates)

    def attended_dim(self, layer: int) -> int:
        """Channels of each head, the first ones, that attention gives `o`."""
        return self.heads_of(layer).dim if self.latent is None else self.latent.rank

    def _mixing(self) -> Iterator[str]:
        """Names of the linear layers that mixers read and write by, but for further ones."""
        for layer in range(self.num_layers):
            kinds = (STATE_QKV, STATE_O, "qkv", "o") if self.mixer(layer) == "both" else ("qkv", "o")
            yield from (f"layers.{layer}.{kind}" for kind in kinds)

    def _mixer_widths(self, layer: int, mixer: Mixer) -> tuple[int, int]:
        """Output channels of a mixer's `qkv`, and input channels of its `o`."""
        if mixer == "convolution":
            return 3 * self.hidden_size, self.hidden_size
        if mixer == "delta" and self.delta is not None:
            return self.delta.inputs + self.delta.value_width, self.delta.value_width
        return sum(self.attention_widths(layer)), self.heads_of(layer).heads * self.attended_dim(layer)

    def block_linears(self, layer: int, *, experts: int | None = None) -> tuple[str, ...]:
        """Names of a block's linear layers in the order they run; of so many experts, in that of their numbers."""
        prefix = f"layers.{layer}"
        kinds: tuple[str, ...] = (
            ("qkv", QUERIES, *LAYER_TYPES[1:]) if self.latent and self.latent.query_rank else LAYER_TYPES
        )
        if self.parallel:
            kinds = ("gate_up", "qkv", "o", "down")
        if self.mixer(layer) == "both":
            kinds = (STATE_QKV, "qkv", STATE_O, *kinds[1:])
        if layer in self.bare:
            kinds = kinds[:-2]
        if self.altup is not None:
            kinds = (*(self.altup.ends("spread") if self.spreads(layer) else ()), "qkv", *LAUREL_LINEARS, *kinds[1:])
        behind: tuple[str, ...] = TOKEN_LINEARS if self.token_width else ()
        behind += self.altup.ends("merge") if self.altup is not None and self.merges(layer) else ()
        plain = tuple(f"{prefix}.{kind}" for kind in ((JOIN, *kinds) if self.joins else kinds))
        last = tuple(f"{prefix}.{kind}" for kind in behind)
        if self.mixture is None or not self.has_experts(layer):
            return (*plain, *last)
        named = range(self.mixture.num_experts if experts is None else experts)
        of_experts = (f"{prefix}.experts.{expert}.{kind}" for expert in named for kind in MLP_TYPES)
        return (*(plain if self.mixture.parallel_mlp else plain[:-2]), *of_experts, *last)

    def linear_names(self, *, experts: int | None = None) -> tuple[str, ...]:
        """Names of all linear layers in the order they run, `layers.0.qkv` to `head`; of so many experts of a block."""
        of_blocks = (name for layer in range(self.num_layers) for name in self.block_linears(layer, experts=experts))
        return (*of_blocks, *(("head",) if self.has_head else ()))

    def alike(self, name: str) -> int:
        """How many linear layers `linear_names(experts=1)` stands for by a name: a block's experts have one shape."""
        return self.mixture.num_experts if self.mixture is not None and expert_of(name) is not None else 1
