"""A full-precision checkpoint: the weights of a Hugging Face folder or GGUF file under this program's names.

Opening one reads its description and checks the names, shapes and formats of all tensors; weights are read on demand.
A GGUF file's low-bit weights are dequantized as they are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from models.checkpoint_files import CheckpointFiles, read_folder
from models.errors import CheckpointError
from models.gguf.checkpoint import read_gguf
from models.spec import Mixer, ModelSpec


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """The weights of a checkpoint under the names of `models.architecture`."""

    files: CheckpointFiles
    """Its files."""
    spec: ModelSpec
    """The architecture."""

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

    @property
    def path(self) -> Path:
        """The checkpoint's folder, or its GGUF file."""
        return self.files.path

    def vector(self, name: str) -> torch.Tensor:
        """A weight that stays in float32: a router's [scores, C], or a vector [width] of `ModelSpec.block_vectors`."""
        kind = name.rsplit(".", 1)[-1]
        if kind == "router":
            return torch.cat([self.files.entries[key].read().to(torch.float32) for key in self._router_keys(name)])
        weight = self.files.entries[self._vector_key(name)].read().to(torch.float32)
        if kind == "conv":
            weight = weight.squeeze(1).T.flatten()
        if kind == "decay" and not self.files.decay_made:
            weight = -weight.exp()
        if kind.endswith("norm"):
            weight = weight + self.files.norm_offset
        return weight * self.files.multipliers.get(kind, 1.0)

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer by its name in `ModelSpec.linear_names()`; q, k, v and gate, up are fused.

        Returns:
            The weight [N, K] in the checkpoint's own dtype, float32 where a multiplier is folded in, and the bias
            float32 [N] or None.
        """
        if name == "head" and self.spec.tied:
            return self._table(), None
        weights = [self.files.entries[f"{module}.weight"].read() for module in self._sources(name)]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        bias = None
        if self.spec.has_bias(name):
            biases = [self.files.entries[f"{module}.bias"].read() for module in self._sources(name)]
            bias = torch.cat([each.to(torch.float32) for each in biases])
        return self._multiplied(name, weight), None if bias is None else self._multiplied(name, bias)

    def _multiplied(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """A linear layer's weight or bias, multiplied and in the order that the configuration asks for."""
        kind = name.rsplit(".", 1)[-1]
        if kind == "qkv" and self.files.family.interleaved:
            rows = rows[self._halves()]
        if kind == "qkv" and self.spec.gated and self.spec.mixer(int(name.split(".")[1])) == "attention":
            rows = rows[self._gates_last()]
        of_all, of_queries = (self.files.multipliers.get(part, 1.0) for part in (kind, "q" if kind == "qkv" else ""))
        if of_all == of_queries == 1:
            return rows
        rows = rows.to(torch.float32) * of_all
        rows[: self.spec.q_width if kind == "qkv" else 0] *= of_queries
        return rows

    def _gates_last(self) -> torch.Tensor:
        """Rows of q, k, v and gates, by the places at which each head's q is followed by its gate. int64 [N]."""
        spec = self.spec
        q = torch.arange(2 * spec.q_width).view(spec.num_heads, 2, spec.head_dim)
        rest = torch.arange(2 * spec.q_width, 2 * spec.q_width + 2 * spec.kv_width)
        return torch.cat((q[:, 0].flatten(), rest, q[:, 1].flatten()))

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
        """The embedding table [V, C] in the checkpoint's own dtype."""
        return self._table()

    def _sources(self, name: str) -> tuple[str, ...]:
        """Modules of a linear layer."""
        return self.files.family.sources(name, self._mixer(name))

    def _vector_key(self, name: str) -> str:
        """Name of a vector's tensor."""
        return self.files.family.vector(name, self._mixer(name))

    def _router_keys(self, name: str) -> tuple[str, ...]:
        """Names of a router's tensors."""
        return tuple(f"{module}.weight" for module in self._sources(name))

    def _mixer(self, name: str) -> Mixer:
        return self.spec.mixer(int(name.split(".")[1])) if name.startswith("layers.") else "attention"

    def _table(self) -> torch.Tensor:
        return self.files.entries[f"{self._embedding_module()}.weight"].read()

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
            # Old Llama checkpoints store the rotary frequencies, which follow from config.json.
            needless = key.endswith("rotary_emb.inv_freq")
            needless = needless or (files.family.predicts_further and key.startswith(further))
            if key.startswith("model.layers.") and key not in expected and not needless:
                raise CheckpointError(
                    f"{entry.path}: the tensor '{entry.name}' has no place in a {self.spec.family} model of "
                    f"{self.spec.num_layers} layers as {files.described_in} describes it. {files.remedy}"
                )

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the architecture needs, by its name in the file."""
        spec = self.spec
        shapes: dict[str, tuple[int, ...]] = {
            f"{self._embedding_module()}.weight": (spec.vocab_size, spec.hidden_size),
            self._vector_key("norm"): (spec.hidden_size,),
        }
        if not spec.tied:
            shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
        for layer in range(spec.num_layers):
            for vector, width in spec.block_vectors(layer).items():
                taps = vector.endswith(".conv")
                shapes[self._vector_key(vector)] = (width // spec.taps, 1, spec.taps) if taps else (width,)
            for router, (scores, width) in spec.routers(layer).items():
                first, *others = self._router_keys(router)
                shapes |= {first: (scores - len(others), width)} | dict.fromkeys(others, (1, width))
            for name in spec.block_linears(layer):
                modules = self._sources(name)
                for module, rows in zip(modules, _rows(spec, name, len(modules)), strict=True):
                    shapes[f"{module}.weight"] = (rows, spec.linear_shape(name)[1])
                    if spec.has_bias(name):
                        shapes[f"{module}.bias"] = (rows,)
        return shapes


def _rows(spec: ModelSpec, name: str, parts: int) -> tuple[int, ...]:
    """Output channels of each of the modules that a linear layer is fused from."""
    rows = spec.linear_shape(name)[0]
    if parts == 1:
        return (rows,)
    if not name.endswith("qkv"):
        return (rows // parts,) * parts
    if spec.mixer(int(name.split(".")[1])) == "delta" and (delta := spec.delta) is not None:
        return delta.channels, delta.value_heads, delta.value_heads, delta.value_width
    return (2 if spec.gated else 1) * spec.q_width, spec.kv_width, spec.kv_width


def _names(shards: tuple[Path, ...]) -> str:
    return shards[0].name if len(shards) == 1 else f"all {len(shards)} shards"
