"""A Hugging Face checkpoint on disk: safetensors, in one file or sharded. Nothing in it is ever executed or unpickled.

Opening one reads config.json and the headers of the shards and checks names, shapes and dtypes of all tensors; weights
are read only when asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from models.errors import CheckpointError, UnsupportedModelError
from models.families import family_of, spec_from_config
from models.families.family import Family
from models.shard import DTYPES, ShardTensor, read_header
from models.spec import LAYER_TYPES, ModelSpec

SINGLE = "model.safetensors"
"""The weights of a checkpoint in one file."""
INDEX = "model.safetensors.index.json"
"""Which shard holds which tensor, for a checkpoint in several files."""

_DOWNLOAD_AGAIN = "Download the model again."


@dataclass(slots=True, kw_only=True)
class Checkpoint:
    """The weights of a Hugging Face checkpoint under the names of `models.architecture`."""

    folder: Path
    """The checkpoint's folder."""
    config: dict[str, Any]
    """Parsed config.json."""
    spec: ModelSpec
    """The architecture."""
    shards: tuple[Path, ...]
    """The safetensors files, in the order of their names."""
    _family: Family
    _entries: Mapping[str, ShardTensor]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint and check that it is complete.

        Args:
            folder: Holds config.json and model.safetensors, or shards with their index.

        Raises:
            UnsupportedModelError: The architecture, or an option of it, is not one this program runs.
            CheckpointError: A file is missing, damaged or foreign, or a tensor is missing or has a wrong shape.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise CheckpointError(f"{folder}: there is no such folder. Name a folder with a Hugging Face checkpoint.")
        config_file = folder / "config.json"
        config = _read_table(config_file)
        generation_file = folder / "generation_config.json"
        generation = _read_table(generation_file) if generation_file.exists() else None
        spec = spec_from_config(config, generation, source=str(config_file))
        entries = _read_entries(folder)
        checkpoint = cls(
            folder=folder,
            config=config,
            spec=spec,
            shards=tuple(sorted({entry.path for entry in entries.values()})),
            _family=family_of(config, source=str(config_file)),
            _entries=entries,
        )
        checkpoint._check_tie()
        checkpoint._check_tensors()
        return checkpoint

    def vector(self, name: str) -> torch.Tensor:
        """A norm's weight, for example `layers.0.input_norm` or `norm`. Returns float32 [width]."""
        (module,) = self._family.sources(name)
        return self._entries[f"{module}.weight"].read().to(torch.float32)

    def linear(self, name: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A linear layer by its name in `ModelSpec.linear_names()`; q, k, v and gate, up are fused.

        Returns:
            The weight [N, K] in the checkpoint's own dtype, and the bias float32 [N] or None.
        """
        if name == "head" and self.spec.tied:
            return self.embedding(), None
        weights = [self._entries[f"{module}.weight"].read() for module in self._family.sources(name)]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        if not self.spec.has_bias(name):
            return weight, None
        biases = [self._entries[f"{module}.bias"].read().to(torch.float32) for module in self._family.sources(name)]
        return weight, torch.cat(biases)

    def embedding(self) -> torch.Tensor:
        """The embedding table [V, C] in the checkpoint's own dtype."""
        return self._entries[f"{self._embedding_module()}.weight"].read()

    def _embedding_module(self) -> str:
        """The module that holds the embedding table; a tied one may be stored as the head alone."""
        (embed,), (head,) = self._family.sources("embed"), self._family.sources("head")
        stored_as_head = self.spec.tied and f"{embed}.weight" not in self._entries and f"{head}.weight" in self._entries
        return head if stored_as_head else embed

    def _check_tie(self) -> None:
        """Trust the weights over `tie_word_embeddings`: a head that is stored and differs from the table counts."""
        (embed,), (head,) = self._family.sources("embed"), self._family.sources("head")
        keys = (f"{embed}.weight", f"{head}.weight")
        if not self.spec.tied or any(key not in self._entries for key in keys):
            return
        table, stored_head = (self._entries[key] for key in keys)
        same_format = (table.shape, table.dtype) == (stored_head.shape, stored_head.dtype)
        if not same_format or not torch.equal(table.read(), stored_head.read()):
            self.spec = replace(self.spec, tied=False)

    def _check_tensors(self) -> None:
        """Every tensor the architecture needs is there with the right shape, and no block has one beyond those."""
        expected = self._expected_shapes()
        for key, shape in expected.items():
            entry = self._entries.get(key)
            if entry is None:
                hint = " (or set tie_word_embeddings, if the head is the embedding table)" if "lm_head" in key else ""
                raise CheckpointError(
                    f"{self.folder}: the tensor '{key}' is missing from {_names(self.shards)}. "
                    f"Download the model again{hint}."
                )
            if entry.shape != shape:
                raise CheckpointError(
                    f"{entry.path}: the tensor '{key}' has shape {list(entry.shape)}, but config.json asks for "
                    f"{list(shape)}. Weights and config.json must come from the same model. {_DOWNLOAD_AGAIN}"
                )
            if entry.dtype not in DTYPES:
                raise UnsupportedModelError(
                    f"{entry.path}: the tensor '{key}' is stored as {entry.dtype} "
                    f"(supported: {', '.join(DTYPES)}). Take the model's original checkpoint in 16 or 32 bits."
                )
        for key, entry in self._entries.items():
            # Old Llama checkpoints store the rotary frequencies, which follow from config.json.
            if key.startswith("model.layers.") and key not in expected and not key.endswith("rotary_emb.inv_freq"):
                raise CheckpointError(
                    f"{entry.path}: the tensor '{key}' has no place in a {self.spec.family} model of "
                    f"{self.spec.num_layers} layers as config.json describes it. Weights and config.json must come "
                    f"from the same model. {_DOWNLOAD_AGAIN}"
                )

    def _expected_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor that the architecture needs, by its name in the file."""
        spec, family = self.spec, self._family
        shapes: dict[str, tuple[int, ...]] = {
            f"{self._embedding_module()}.weight": (spec.vocab_size, spec.hidden_size),
            "model.norm.weight": (spec.hidden_size,),
        }
        if not spec.tied:
            shapes["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
        for layer in range(spec.num_layers):
            for norm, width in spec.block_norms(layer).items():
                (module,) = family.sources(norm)
                shapes[f"{module}.weight"] = (width,)
            for kind in LAYER_TYPES:
                name = f"layers.{layer}.{kind}"
                modules = family.sources(name)
                for module, rows in zip(modules, _rows(spec, kind, len(modules)), strict=True):
                    shapes[f"{module}.weight"] = (rows, spec.linear_shape(kind)[1])
                    if spec.has_bias(name):
                        shapes[f"{module}.bias"] = (rows,)
        return shapes


def _rows(spec: ModelSpec, kind: str, parts: int) -> tuple[int, ...]:
    """Output channels of each of the modules that a linear layer is fused from."""
    if parts == 1:
        return (spec.linear_shape(kind)[0],)
    return (spec.q_width, spec.kv_width, spec.kv_width) if kind == "qkv" else (spec.intermediate_size,) * parts


def _names(shards: tuple[Path, ...]) -> str:
    return shards[0].name if len(shards) == 1 else f"all {len(shards)} shards"


def _read_table(path: Path) -> dict[str, Any]:
    """Parse a JSON file that holds an object."""
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: there is no such file. Name a folder with a Hugging Face checkpoint "
            "(config.json and *.safetensors)."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{path}: is damaged, not a JSON file ({error}). {_DOWNLOAD_AGAIN}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path}: is damaged, not a JSON object. {_DOWNLOAD_AGAIN}")
    return table


def _read_entries(folder: Path) -> dict[str, ShardTensor]:
    """Every tensor of the checkpoint. The single file wins over an index, as in transformers."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(_no_weights(folder))
    weight_map = _read_table(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX}: is damaged, it has no weight_map. {_DOWNLOAD_AGAIN}")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX}: names '{name}', which is not a safetensors file beside it.")
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(names)} shards are missing: {', '.join(missing[:4])}"
            f"{', …' if len(missing) > 4 else ''}. Download the rest of the model."
        )
    entries: dict[str, ShardTensor] = {}
    for name in names:
        held = read_header(folder / name)
        claimed = {key for key, shard in weight_map.items() if shard == name}
        absent = sorted(claimed - held.keys())
        if absent:
            raise CheckpointError(
                f"{folder / name}: the tensor '{absent[0]}' is missing, which {INDEX} says it holds. {_DOWNLOAD_AGAIN}"
            )
        entries |= {key: held[key] for key in claimed}
    return entries


def _no_weights(folder: Path) -> str:
    """What to say about a folder without safetensors that can be read."""
    present = {path.name for path in folder.iterdir() if path.is_file()}
    stray = sorted(name for name in present if name.endswith(".safetensors"))
    if stray:
        return (
            f"{folder}: there is neither {SINGLE} nor {INDEX} (found: {', '.join(stray[:4])}). "
            "Download the model's Hugging Face files completely."
        )
    pickled = sorted(name for name in present if name.endswith((".bin", ".pt", ".pth", ".ckpt")))
    if pickled:
        return (
            f"{folder}: the weights are pickled ({', '.join(pickled[:4])}), which can run code when read and is not "
            "supported. Take a version of the model in safetensors, or convert it with transformers' save_pretrained."
        )
    gguf = sorted(name for name in present if name.endswith(".gguf"))
    if gguf:
        return f"{folder}: GGUF files ({gguf[0]}) are not supported. Take the model's checkpoint in safetensors."
    return f"{folder}: there are no weights ({SINGLE} or shards with {INDEX}). Download the model's safetensors files."
