"""A full-precision checkpoint: the weights of a Hugging Face folder or GGUF file under this program's names.

Opening one reads its description and checks the names, shapes and formats of all tensors; weights are read on demand.
A GGUF file's low-bit weights are dequantized as they are read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch.nn import functional

from models import latent, mtp
from models.checkpoint_files import CheckpointFiles, read_folder
from models.errors import CheckpointError
from models.gguf.checkpoint import read_gguf
from models.gguf.tensors import GgufTensor
from models.shard import StoredTensor
from models.spec import STATE_QKV, XIELU_LINEAR, XIELU_SLOPES, DeltaSpec, Mixer, ModelSpec, expert_of

_TABLE_ROWS = 8192
"""Rows of an embedding table that are read at a time."""
_APART = 3
"""Modules of q, k and v. If there are no more, gates are each behind its head's q (`Checkpoint._gates_last`)."""
_BY_HEADS = (2, 3)
"""Numbers of modules of what a delta rule reads, where some have all key heads' (`Checkpoint._heads_apart`)."""
_OWN_KEYS = re.compile(r"model\.layers\.(\d{1,5})\.self_attn\.[kv]_(?:proj|norm)\.")


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """The weights of a checkpoint under the names of `models.architecture`."""

    files: CheckpointFiles
    spec: ModelSpec
    _token_rows: dict[int, torch.Tensor] = field(default_factory=dict, repr=False)
    _expert_scales: dict[str, list[float]] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a checkpoint and check that it is complete.

        Args:
            path: A folder with config.json and model.safetensors, or shards with their index; or a GGUF file.

        Raises:
            UnsupportedModelError: The architecture, or an option of it, is not one this program runs.
            CheckpointError: A file is missing, damaged or foreign, or a tensor is missing or has a wrong shape.
        """
        path = Path(path)
        files = read_gguf(path) if path.is_file() else read_folder(path)
        checkpoint = cls(files=files, spec=files.spec)
        checkpoint._check_tie()
        checkpoint._check_tensors()
        return checkpoint

    def mtp(self) -> Checkpoint | None:
        """The block that predicts a further token as a model of its own (`models.mtp`); None: there is none.

        Raises:
            CheckpointError: A tensor of it is missing or has a wrong shape.
        """
        files = self.files
        last_norm = files.family.last_norm
        entries = mtp.own_tensors(files.entries, self.spec.num_layers, last_norm)
        if entries is None or not files.family.predicts_further:
            return None
        spec = mtp.mtp_spec(self.spec)
        found = Checkpoint(files=replace(files, entries=entries, spec=spec), spec=spec)
        found._check_tensors()
        return found

    @property
    def path(self) -> Path:
        """The checkpoint's folder, or its GGUF file."""
        return self.files.path

    def vector(self, name: str) -> torch.Tensor:
        """A weight that stays in float32: a router's [scores, C], or a vector [width] of `ModelSpec.block_vectors`."""
        kind = name.rsplit(".", 1)[-1]
        if kind == "router":
            return torch.cat([self.files.entries[key].read().to(torch.float32) for key in self._router_keys(name)])
        if kind in self.files.family.made:
            width = self.spec.block_vectors(int(name.split(".")[1]))[name]
            return torch.full((width,), self._multiplier(name))
        weight = torch.cat([self.files.entries[key].read().to(torch.float32) for key in self._vector_keys(name)])
        if kind == "conv":
            weight = weight.squeeze(1)
        if kind in ("conv", "conv_bias") and self._is_mamba(name):
            weight = weight[self._channels_turned()]
        if kind == "conv":
            weight = weight.T.flatten()
        if kind in XIELU_SLOPES:
            weight = functional.softplus(weight) + (XIELU_LINEAR if kind == "falling" else 0)
        if kind == "decay" and not self.files.decay_made:
            weight = -weight.exp()
        if kind.endswith("norm") and (kind != "norm" or self.files.family.last_offset):
            weight = weight + self.files.norm_offset
        if kind in ("q_norm", "k_norm") and self.files.family.proportional:
            weight = weight[self._turning_first(int(name.split(".")[1]))]
        return weight.flatten() * self._multiplier(name)

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer by its name in `ModelSpec.linear_names()`; q, k, v and gate, up are fused.

        Returns:
            The weight [N, K] in the checkpoint's own dtype, float32 where something is folded in, and the bias
            float32 [N] or None.
        """
        if name == "head":
            return self.head_rows(0, self.spec.vocab_size), None
        if self._is_of_latents(name):
            files, apart = self.files, latent.is_apart(self.files.entries, int(name.split(".")[1]))
            read, scale = (lambda key: files.entries[key].read()), files.multipliers["q"]
            return latent.linear(self.spec, name, scale, read, apart=apart), None
        entries = [self.files.entries[f"{module}.weight"] for module in self._sources(name)]
        if name.endswith("tokens.gate_up"):
            width = self.spec.token_width
            entries = [entry.rows(int(name.split(".")[1]) * width, width) for entry in entries]
        weights = [entry.read() for entry in entries]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if (factors := self._input_scale(name)) is not None:
            weight = weight.to(torch.float32) * self.files.entries[factors].read().to(torch.float32)
        return self._centered(name, self._multiplied(name, weight)), self.bias(name)

    def bias(self, name: str) -> torch.Tensor | None:
        """The bias of a linear layer, float32 [N], or None."""
        if not self.spec.has_bias(name):
            return None
        modules = self._sources(name)
        biases = [self.files.entries[f"{module}.bias"].read() for module in modules[:_APART]]
        if len(modules) > _APART:  # gates have none
            biases.append(torch.zeros(self.spec.attention_widths(int(name.split(".")[1]))[-1]))
        return self._centered(name, self._multiplied(name, torch.cat([each.to(torch.float32) for each in biases])))

    def lattices(self, name: str) -> list[StoredTensor] | None:
        """The parts of a linear layer, low-bit or not, if their numbers are all that the checkpoint says of it."""
        if self._is_of_latents(name):
            return None
        modules = [self._embedding_module()] if name == "head" and self.spec.tied else self._sources(name)
        parts = [self.files.entries[f"{module}.weight"] for module in modules]
        turned = any(isinstance(part, GgufTensor) and part.order and part.order.columns for part in parts)
        multipliers = self.files.multipliers
        part = multipliers.get("q" if name.endswith("qkv") else "gate" if name.endswith("gate_up") else "", 1.0)
        if name.endswith(STATE_QKV) or (self.files.family.centered and name.endswith((".o", ".down"))):
            return None
        if self._input_scale(name) is not None or self._expert_scale(name) != 1:
            return None
        whole = self._multiplier(name) == part == 1 and not turned and ".tokens." not in f".{name}"
        return parts if whole else None

    def in_order(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """The rows [N, ...] of `lattices` side by side in the order that the architecture wants."""
        return rows if name == "head" else self._multiplied(name, rows)

    def _multiplied(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """A linear layer's weight or bias, multiplied and in the order that the configuration asks for."""
        kind = name.rsplit(".", 1)[-1]
        if kind == "qkv" and self.files.family.interleaved and self.spec.rope_of(int(name.split(".")[1])) is not None:
            rows = rows[self._halves()]
        attends = kind == "qkv" and self._mixer(name) in ("attention", "shared")
        if attends and self.files.family.proportional:
            rows = rows[self._turning_rows(int(name.split(".")[1]))]
        if kind == "qkv" and (parts := len(self._sources(name))) in _BY_HEADS and self._mixer(name) == "delta":
            rows = rows[self._heads_apart(parts)]
        if name.endswith(STATE_QKV):
            rows = rows.to(torch.float32) * self._state_factors().view(-1, *(1,) * (rows.ndim - 1))
        if kind == "qkv" and self._is_mamba(name):
            rows = rows[self._states_first()]
        if (
            kind == "qkv"
            and self.spec.gated
            and self._mixer(name) == "attention"
            and len(self._sources(name)) == _APART
        ):
            rows = rows[self._gates_last()]
        of_all = self._multiplier(name) * self._expert_scale(name)
        of_queries = self.files.multipliers.get("q", 1.0) if attends else 1.0
        of_gates = self.files.multipliers.get("gate", 1.0) if kind == "gate_up" else 1.0
        if of_all == of_queries == of_gates == 1:
            return rows
        rows = rows.to(torch.float32) * of_all
        rows[: len(rows) // 2] *= of_gates
        rows[: self.spec.q_width if kind == "qkv" else 0] *= of_queries
        return rows

    def _centered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """A linear layer's weight or bias; what adds to a stream that LayerNorms read, less its mean over outputs."""
        if not self.files.family.centered or not name.endswith((".o", ".down")):
            return rows
        rows = rows.to(torch.float32)
        return rows - rows.mean(0)

    def _multiplier(self, name: str) -> float:
        own, factors = name.split(".", 2)[-1], self.files.multipliers
        return factors.get(name, factors.get(own, factors.get(own.rsplit(".", 1)[-1], 1.0)))

    def _input_scale(self, name: str) -> str | None:
        """The tensor with factors of a linear layer's inputs; None: it has none."""
        _, layer, own = name.split(".", 2) if name.startswith("layers.") else ("", "", "")
        found = self.files.family.input_scales.get(own)
        return None if found is None else f"model.layers.{layer}.{found}"

    def _expert_scale(self, name: str) -> float:
        """The factor of an expert's `down`. Those of a block are read together, and stay in memory."""
        expert = expert_of(name)
        if expert is None or not name.endswith("down") or not self.files.family.expert_scales:
            return 1.0
        key = f"model.layers.{name.split('.')[1]}.{self.files.family.expert_scales}"
        if key not in self._expert_scales:
            self._expert_scales[key] = self.files.entries[key].read().tolist()
        return self._expert_scales[key][expert]

    def _turning_first(self, layer: int) -> torch.Tensor:
        """Channels of a head, those that rotate first where they are a share of all pairs. int64 [D]."""
        rope, D = self.spec.rope_of(layer), self.spec.heads_of(layer).dim
        pairs = torch.arange(D).view(2, -1)  # the first and the second of each
        turning = (D if rope is None else rope.rotary_dim) // 2
        return torch.cat((pairs[:, :turning].flatten(), pairs[:, turning:].flatten()))

    def _turning_rows(self, layer: int) -> torch.Tensor:
        """Rows of q, k and v in that order; values keep theirs. int64 [N]."""
        heads, rows = self.spec.heads_of(layer), self.spec.linear_shape(f"layers.{layer}.qkv")[0]
        turning = heads.q_width + (heads.kv_width if rows > heads.q_width else 0)
        first = torch.arange(0, turning, heads.dim)[:, None]
        return torch.cat(((first + self._turning_first(layer)).flatten(), torch.arange(turning, rows)))

    def _gates_last(self) -> torch.Tensor:
        """Rows of q, k, v and gates, by the places at which each head's q is followed by its gate. int64 [N]."""
        spec = self.spec
        q = torch.arange(2 * spec.q_width).view(spec.num_heads, 2, spec.head_dim)
        rest = torch.arange(2 * spec.q_width, 2 * spec.q_width + 2 * spec.kv_width)
        return torch.cat((q[:, 0].flatten(), rest, q[:, 1].flatten()))

    def _heads_apart(self, parts: int) -> torch.Tensor:
        """Rows of a delta rule's q, k, v, beta, decay and gates, by the places at which each key head's are together.

        First q, k, v and gates of each, then its betas and decays; of three modules only these, before gates.
        int64 [N].
        """
        delta = self.spec.delta
        assert delta is not None
        each = delta.value_heads // delta.key_heads
        both = torch.arange(2 * delta.value_heads).view(delta.key_heads, 2, each).transpose(0, 1).flatten()
        if parts > min(_BY_HEADS):
            gates = torch.arange(delta.inputs, delta.inputs + delta.value_width)
            return torch.cat((torch.arange(delta.channels), delta.channels + both, gates))
        sizes = [delta.key_dim, delta.key_dim, each * delta.value_dim, each * delta.value_dim]
        first = torch.arange(delta.key_heads * sum(sizes)).view(delta.key_heads, -1)
        q, k, v, gates = (part.flatten() for part in torch.split(first, sizes, dim=1))
        return torch.cat((q, k, v, first.numel() + both, gates))

    def _is_of_latents(self, name: str) -> bool:
        """Whether a linear layer is one of latent attention, which several tensors are multiplied into."""
        return self.spec.latent is not None and name.endswith(("qkv", ".o"))

    def _is_mamba(self, name: str) -> bool:
        return self._mixer(name) == "delta" and self.spec.delta is not None and self.spec.delta.mamba

    def _channels_turned(self) -> torch.Tensor:
        """Channels C, B and x of Mamba-2, by their places where they are x, B and C. int64 [channels]."""
        delta = self.spec.delta
        assert delta is not None
        sizes = [delta.value_width, delta.key_width, delta.key_width]
        return torch.cat(torch.split(torch.arange(delta.channels), sizes)[::-1])

    def _state_factors(self) -> torch.Tensor:
        """Factors of what Mamba-2 reads, in the checkpoint's order. float32 [rows]."""
        delta, factors = self.spec.delta, self.files.multipliers
        assert delta is not None
        widths = {"gates": delta.value_width, "x": delta.value_width, "B": delta.key_width, "C": delta.key_width}
        widths["steps"] = delta.value_heads
        own = (torch.full((width,), factors.get(f"{STATE_QKV}.{part}", 1.0)) for part, width in widths.items())
        return torch.cat(list(own))

    def _states_first(self) -> torch.Tensor:
        """Rows of Mamba-2's C, B, x, steps, steps and gates, by their places behind gates, x, B and C. int64 [N]."""
        delta = self.spec.delta
        assert delta is not None
        gates, channels = torch.arange(delta.value_width), delta.value_width + self._channels_turned()
        steps = delta.value_width + delta.channels + torch.arange(delta.value_heads)
        return torch.cat((channels, steps, steps, gates))

    def _halves(self) -> torch.Tensor:
        """Rows of q, k and v, by the places at which channel i of a head rotates with i + rotary_dim / 2. int64 [N]."""
        spec = self.spec
        turning = spec.rope.rotary_dim
        order = torch.arange(spec.head_dim)
        order[:turning] = torch.cat((torch.arange(0, turning, 2), torch.arange(1, turning, 2)))
        heads = torch.arange(spec.num_heads + spec.num_kv_heads)[:, None] * spec.head_dim
        values = torch.arange(spec.q_width + spec.kv_width, spec.q_width + 2 * spec.kv_width)
        return torch.cat(((heads + order).flatten(), values))

    def embedding(self) -> torch.Tensor:
        """The embedding table [V, C] in the checkpoint's own dtype; if its rows change, not in bfloat16."""
        return self.embedded(torch.arange(self.spec.vocab_size))

    def embedding_rows(self, first: int, count: int) -> torch.Tensor:
        """Rows of the embedding table, [count, C]."""
        rows, family = self._table_rows(first, count), self.files.family
        if not family.centered and not family.normed_embedding:
            return rows
        wide = rows.to(torch.float32)
        scale = torch.rsqrt(wide.square().mean(1, keepdim=True) + self.spec.norm_eps)
        wide = wide - wide.mean(1, keepdim=True) if family.centered else wide * scale
        return wide.to(torch.float16 if rows.dtype == torch.bfloat16 else rows.dtype)

    def embedded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding table by tokens, int64 [...] -> [..., C]; the table is never in memory as a whole."""
        places, vocabulary = tokens.flatten(), self.spec.vocab_size
        found = torch.empty(len(places), self.spec.hidden_size, dtype=self.embedding_rows(0, 1).dtype)
        for first in range(0, vocabulary, _TABLE_ROWS):
            count = min(_TABLE_ROWS, vocabulary - first)
            here = (places >= first) & (places < first + count)
            if here.any():
                found[here] = self.embedding_rows(first, count)[places[here] - first]
        return found.view(*tokens.shape, -1)

    def head_rows(self, first: int, count: int) -> torch.Tensor:
        """Rows of the head's weight, [count, C], as those of other layers in `linear`."""
        if self.spec.tied:
            return self._table_rows(first, count)
        (module,) = self._sources("head")
        return self._multiplied("head", self.files.entries[f"{module}.weight"].rows(first, count).read())

    def token_rows(self, tokens: torch.Tensor, layer: int) -> torch.Tensor:
        """Rows of a block's own embedding table, float32. int64 [...] -> [..., P].

        A row of the file's table has the embeddings of all blocks. Those that were asked for stay in memory.
        """
        width, known = self.spec.token_width, self.spec.token_count
        wanted = [token if token < known else 0 for token in tokens.flatten().tolist()]
        table = self.files.entries[self._token_table()]
        for token in set(wanted) - self._token_rows.keys():
            self._token_rows[token] = table.rows(token, 1).read()[0]
        own = slice(layer * width, (layer + 1) * width)
        rows = torch.stack([self._token_rows[token][own] for token in wanted]).to(torch.float32)
        return rows.view(*tokens.shape, width) * self.files.multipliers.get("tokens", 1.0)

    def token_table(self, first: int, count: int) -> torch.Tensor:
        """Rows of the table of all blocks' own embeddings, float32 [count, blocks * P]."""
        table, known = self.files.entries[self._token_table()], self.spec.token_count
        parts = [table.rows(first, held).read()] if (held := min(count, known - first)) > 0 else []
        parts += [table.rows(0, 1).read()] * (count - max(held, 0))
        rows = torch.cat(parts)
        return rows.to(torch.float32) * self.files.multipliers.get("tokens", 1.0)

    def _token_table(self) -> str:
        return f"{self.files.family.outer['tokens']}.weight"

    def _sources(self, name: str) -> tuple[str, ...]:
        found = self.files.family.sources(name, self._mixer(name))
        if self.files.keys_as_values and name.endswith("qkv") and self.spec.windows[int(name.split(".")[1])] is None:
            return (*found[:2], *found[1:2])
        whole = found[0].endswith("in_proj_qkvz") and f"{found[0]}.weight" not in self.files.entries
        if whole:  # what llama.cpp divides
            return found[0].removesuffix("z"), found[1], found[0].replace("qkvz", "z")
        attends = name.endswith("qkv") and self._mixer(name) == "attention"
        return found[:_APART] if attends and not self.spec.gated else found

    def _vector_keys(self, name: str) -> tuple[str, ...]:
        return self.files.family.vector(name, self._mixer(name))

    def _router_keys(self, name: str) -> tuple[str, ...]:
        return tuple(f"{module}.weight" for module in self._sources(name))

    def _mixer(self, name: str) -> Mixer:
        return self.spec.mixer_of(name) if name.startswith("layers.") else "attention"

    def _table_rows(self, first: int, count: int) -> torch.Tensor:
        return self.files.entries[f"{self._embedding_module()}.weight"].rows(first, count).read()

    def _embedding_module(self) -> str:
        """The module with the embedding table; a tied one may be stored only as the head."""
        entries, family = self.files.entries, self.files.family
        (embed,), (head,) = family.sources("embed"), family.sources("head")
        stored_as_head = self.spec.tied and f"{embed}.weight" not in entries and f"{head}.weight" in entries
        return head if stored_as_head else embed

    def _check_tie(self) -> None:
        """Override `tie_word_embeddings` if a stored head differs from the embedding table."""
        (embed,), (head,) = self.files.family.sources("embed"), self.files.family.sources("head")
        keys = (f"{embed}.weight", f"{head}.weight")
        if not self.spec.tied or any(key not in self.files.entries for key in keys):
            return
        table, stored_head = (self.files.entries[key] for key in keys)
        same_format = (table.shape, table.dtype) == (stored_head.shape, stored_head.dtype)
        if not same_format or not torch.equal(table.read(), stored_head.read()):
            self.spec = replace(self.spec, tied=False)

    def _check_tensors(self) -> None:
        """Check that every needed tensor exists with the right shape, and that no block has others."""
        files, expected = self.files, self._expected_shapes()
        for key, shape in expected.items():
            entry = files.entries.get(key)
            if entry is None:
                hint = " (or set tie_word_embeddings, if the head is the embedding table)" if "lm_head" in key else ""
                raise CheckpointError(
                    f"{files.path}: the tensor '{files.own_name(key)}' is missing from {_names(files.weights)}. "
                    f"Download the model again{hint}."
                )
            if entry.shape != shape:
                raise CheckpointError(
                    f"{entry.path}: the tensor '{entry.name}' has shape {list(entry.shape)}, but {files.described_in} "
                    f"asks for {list(shape)}. {files.remedy}"
                )
            entry.check_readable()
        further = f"model.layers.{self.spec.num_layers}."
        for key, entry in files.entries.items():
            # Old Llama checkpoints store the rotary frequencies, which follow from config.json, Apertus's constants.
            needless = key.endswith(("rotary_emb.inv_freq", "act_fn.beta", "act_fn.eps"))
            needless = needless or (files.family.predicts_further and key.startswith(further))
            needless = needless or self._shared_away(key)
            if key.startswith("model.layers.") and key not in expected and not needless:
                raise CheckpointError(
                    f"{entry.path}: the tensor '{entry.name}' does not belong in a {self.spec.family} model of "
                    f"{self.spec.num_layers} layers as {files.described_in} describes it. {files.remedy}"
                )

    def _shared_away(self, key: str) -> bool:
        """Whether a tensor makes keys or values of a block that reads another's."""
        found = _OWN_KEYS.match(key)
        layer = int(found[1]) if found else self.spec.num_layers
        return layer < self.spec.num_layers and self.spec.mixer(layer) == "shared"

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the architecture needs, by its name in the file."""
        spec = self.spec
        shapes: dict[str, tuple[int, ...]] = {
            f"{self._embedding_module()}.weight": (spec.vocab_size, spec.hidden_size),
            self._vector_keys("norm")[0]: (spec.hidden_size,),
        }
        if spec.token_width:
            shapes[self._token_table()] = (spec.token_count, spec.num_layers * spec.token_width)
        if not spec.tied:
            shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
        matrices = {} if spec.altup is None else spec.altup.matrices(spec.hidden_size)
        for layer in range(spec.num_layers):
            for vector, width in spec.block_vectors(layer).items():
                if vector.endswith(self.files.family.made or "/"):
                    continue
                keys = self._vector_keys(vector)
                if vector.endswith(".conv"):
                    taps = spec.conv_kernel_size
                    found = [self.files.entries[key].shape[0] for key in keys if key in self.files.entries]
                    parts: tuple[int, ...] = (width // taps,)
                    if len(keys) > 1 and spec.delta is not None:  # transformers saves it in equal parts
                        parts = tuple(found) if sum(found) == width // taps else _parts(spec.delta)[: len(keys)]
                    shapes |= {key: (rows, 1, taps) for key, rows in zip(keys, parts, strict=True)}
                else:
                    shapes[keys[0]] = matrices.get(vector.rpartition(".")[2], (width,))
            for name, scale in self.files.family.input_scales.items():
                shapes[f"model.layers.{layer}.{scale}"] = spec.linear_shape(f"layers.{layer}.{name}")[1:]
            if spec.has_experts(layer) and spec.mixture is not None and self.files.family.expert_scales:
                shapes[f"model.layers.{layer}.{self.files.family.expert_scales}"] = (spec.mixture.num_experts,)
            for router, (scores, width) in spec.routers(layer).items():
                first, *others = self._router_keys(router)
                shapes |= {first: (scores - len(others), width)} | dict.fromkeys(others, (1, width))
            if spec.latent is not None:
                shapes |= latent.tensors(spec, layer, apart=latent.is_apart(self.files.entries, layer))
            for name in spec.block_linears(layer):
                if self._is_of_latents(name):
                    continue
                modules = self._sources(name)
                for module, rows in zip(modules, _rows(spec, name, len(modules)), strict=True):
                    every = spec.num_layers if name.endswith("tokens.gate_up") else 1
                    shapes[f"{module}.weight"] = (every * rows, spec.linear_shape(name)[1])
                    if spec.has_bias(name) and module in modules[:_APART]:
                        shapes[f"{module}.bias"] = (rows,)
        return shapes


def _parts(delta: DeltaSpec) -> tuple[int, ...]:
    """Output channels of q, k, v, beta, decay and gates, where all are modules of their own."""
    return delta.key_width, delta.key_width, delta.value_width, delta.value_heads, delta.value_heads, delta.value_width


def _rows(spec: ModelSpec, name: str, parts: int) -> tuple[int, ...]:
    """Output channels of each of the modules that a linear layer is fused from."""
    rows, delta = spec.linear_shape(name)[0], spec.delta
    if name.endswith("qkv") and delta is not None and delta.mamba and spec.mixer_of(name) == "delta":
        return (rows - delta.value_heads,)
    if parts == 1:
        return (rows,)
    if not name.endswith("qkv"):
        return (rows // parts,) * parts
    if spec.mixer_of(name) == "delta" and delta is not None:
        if parts == max(_BY_HEADS):
            return delta.channels, 2 * delta.value_heads, delta.value_width
        if parts == min(_BY_HEADS):
            return delta.channels + delta.value_width, 2 * delta.value_heads
        apart = _parts(delta)
        return apart if parts == len(apart) else (delta.channels, *apart[3:])
    heads = spec.heads_of(int(name.split(".")[1]))
    if parts > _APART:
        return spec.attention_widths(int(name.split(".")[1]))
    return (2 if spec.gated else 1) * heads.q_width, heads.kv_width, heads.kv_width


def _names(shards: tuple[Path, ...]) -> str:
    return shards[0].name if len(shards) == 1 else f"all {len(shards)} shards"
