"""`StoredModel`: a low-bit model on disk, checked when opened, with tensors mapped on demand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from models.catalogue import recommended
from models.errors import ModelError, StoreError
from models.generation_config import recommended_sampling
from models.losses import TypeLosses
from models.mtp import mtp_recipe, mtp_spec
from models.packed import KeyStatistics, PackedLinear, PackedResidual, tensor_names
from models.recipe import Recipe
from models.spec import ModelSpec
from models.store import layout
from models.store.manifest import Manifest, Summary, check_quickly, check_sizes, read_stored, verify
from models.store.tensors import MappedTensors


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModelInfo:
    """A stored model's description, known without opening its weights."""

    name: str
    """Its name in the store (`name` or `org/name`)."""
    path: Path
    recipe: Recipe
    source: str
    """The checkpoint it was made from: `org/name`, a short name, or a folder's or file's name."""
    summary: Summary
    source_types: Mapping[str, int] | None = None
    """Number of weights by the type that a GGUF file stores them in, most first; None for other checkpoints."""

    @classmethod
    def read(cls, path: Path, name: str) -> StoredModelInfo:
        """Read manifest and recipe of a folder, and check that no file is missing or cut.

        Raises:
            StoreError: the folder is damaged, incomplete or foreign.
        """
        manifest = Manifest.read(path)
        check_sizes(path, manifest)
        recipe = _read_json(path / layout.RECIPE)
        try:
            return cls(
                name=name,
                path=path,
                recipe=Recipe.from_json(recipe["recipe"]),
                source=str(recipe["source"]["name"]),
                summary=manifest.summary,
                source_types=_counts(recipe["source"].get("types")),
            )
        except (ModelError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise StoreError(f"{path / layout.RECIPE} is damaged ({error}); quantize the model again") from error


class StoredModel:
    """A low-bit model ready to be loaded by a backend.

    Arrays are read-only views of memory-mapped files: nothing is copied, pages are read when touched.
    """

    def __init__(self, info: StoredModelInfo, spec: ModelSpec, files: dict[str, MappedTensors]) -> None:
        self.name = info.name
        self.path = info.path
        self.recipe = info.recipe
        self.info = info
        self.spec = spec
        self._files = files
        self._linear_names = frozenset(spec.linear_names())
        self.mtp: StoredModel | None = None
        """The block that predicts a further token, as a model of its own (`models.mtp`); None: there is none."""

    @classmethod
    def open_folder(cls, path: Path, name: str | None = None) -> StoredModel:
        """Open a folder in the store's layout, wherever it lies; it may be read-only.

        Checks sizes, headers (names, types and shapes of all tensors) and sampled checksums, not every byte.

        Raises:
            StoreError: the folder is damaged, incomplete or foreign.
        """
        info = StoredModelInfo.read(path, name or path.name)
        manifest = Manifest.read(path)
        check_quickly(path, manifest)
        spec = _read_spec(path)
        files = {}
        for file in layout.tensor_files(spec):
            files[file] = MappedTensors(path / file)
            _check_tensors(
                files[file], layout.file_tensors(spec, info.recipe, file), layout.optional_tensors(spec, file)
            )
        model = cls(info, spec, files)
        if layout.MTP in manifest.files:
            files[layout.MTP] = own = MappedTensors(path / layout.MTP)
            _check_tensors(own, layout.mtp_tensors(spec, info.recipe), {})
            model.mtp = _Mtp(model, own)
        return model

    @property
    def tokenizer_path(self) -> Path:
        """Folder with tokenizer.json and what belongs to it."""
        return self.path

    @property
    def sampling(self) -> dict[str, float]:
        """The sampling that its maker recommends, by the keys of generation_config.json; empty where none is known."""
        path = self.path / layout.GENERATION_CONFIG
        if path.exists() and (found := recommended_sampling(_read_json(path))):
            return found
        return dict(recommended(self.info.source))

    def linear(self, name: str) -> PackedLinear:
        """A linear layer by its name in `ModelSpec.linear_names()`; q, k, v and gate, up are fused.

        Raises:
            KeyError: the model has no linear layer of that name.
        """
        if name not in self._linear_names:
            raise KeyError(name)
        file = self._files[layout.file_of(name)]
        shape = self.spec.linear_shape(name)
        return PackedLinear(
            name=name,
            shape=shape,
            bits=self.recipe.layer_bits(name),
            group_size=self.recipe.group_of(shape[1], name),
            codes=file[f"{name}.stream" if self.recipe.trellis else f"{name}.codes"],
            scales=file[f"{name}.scales"],
            zeros=file.get(f"{name}.zeros"),
            minimums=file.get(f"{name}.minimums"),
            codebook=file.get(f"{name}.codebook"),
            group_scales=file.get(f"{name}.group_scales"),
            group_minimums=file.get(f"{name}.group_minimums"),
            trellis=self.recipe.trellis,
            per_token=self.recipe.per_token,
            bias=file.get(f"{name}.bias"),
            residual=self._residual(file, name),
            rank_maximum=file.get(f"{name}.rank_maximum"),
            mean_square=file.get(f"{name}.mean_square"),
        )

    def _residual(self, file: MappedTensors, name: str) -> PackedResidual | None:
        codes = file.get(f"{name}.residual")
        if codes is None:
            return None
        return PackedResidual(bits=self.recipe.residual_bits, codes=codes, scales=file.get(f"{name}.residual_scales"))

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        """A norm's weight (`layers.0.input_norm`, `norm`), float32 [width], or a router's, float32 [E, C].

        Raises:
            StoreError: the model has no vector of that name.
        """
        return self._files[layout.file_of(name)][name]

    def key_statistics(self, layer: int) -> KeyStatistics | None:
        """Statistics of a block's keys and queries; None where they were not gathered."""
        mean, axis = (self._files[layout.block_file(layer)].get(name) for name in tensor_names(layer))
        return None if mean is None or axis is None else KeyStatistics(mean, axis)

    def embedding(self) -> npt.NDArray[np.float16]:
        """The embedding table, float16 [V, C]."""
        return self._files[layout.OUTER]["embed"]

    def token_table(self) -> npt.NDArray[np.float16]:
        """Embeddings of the blocks' own, side by side: float16 [V, blocks * P]."""
        return self._files[layout.OUTER]["tokens"]

    def expert_tokens(self, layer: int) -> npt.NDArray[np.int32]:
        """Calibration tokens that went to each expert of a block: int32 [held]."""
        return self._files[layout.block_file(layer)][layout.expert_tokens(layer)]

    @property
    def mtp_bytes(self) -> int:
        """Bytes of the block that predicts further tokens; 0: there is none."""
        file = self._files.get(layout.MTP)
        return 0 if file is None else sum(entry.nbytes for entry in file.entries.values())

    def release(self) -> None:
        for file in self._files.values():
            file.release()

    @property
    def losses(self) -> TypeLosses | None:
        """Losses of the layer types, by k_chunk; None where they were not measured."""
        try:
            found: TypeLosses | None = read_stored(self.path / layout.LOSSES, TypeLosses.from_json)
        except FileNotFoundError:
            return None
        return found

    def verify(self) -> None:
        """Read every byte and compare sha256."""
        verify(self.path, Manifest.read(self.path))


class _Mtp(StoredModel):
    """A model's block that predicts a further token."""

    def __init__(self, model: StoredModel, own: MappedTensors) -> None:
        info = replace(model.info, recipe=mtp_recipe(model.recipe))
        super().__init__(info, mtp_spec(model.spec), {layout.block_file(0): own})
        self._model = model

    def linear(self, name: str) -> PackedLinear:
        return self._model.linear(name) if name == "head" else super().linear(name)

    def vector(self, name: str) -> npt.NDArray[np.float32]:
        return self._files[layout.block_file(0)][name]

    def embedding(self) -> npt.NDArray[np.float16]:
        return self._model.embedding()


def _check_tensors(file: MappedTensors, expected: layout.TensorTypes, optional: layout.TensorTypes) -> None:
    if optional.keys() & file.entries.keys():  # all of them or none
        expected = expected | optional
    found = {name: (entry.dtype, entry.shape) for name, entry in file.entries.items()}
    if found != expected:
        wrong = sorted({name for name, _ in found.items() ^ expected.items()})
        raise StoreError(
            f"{file.path} does not belong to this model or is damaged ({', '.join(wrong[:3])}); "
            "quantize the model again"
        )


def _counts(types: Mapping[str, Any] | None) -> dict[str, int] | None:
    return None if types is None else {str(kind): int(count) for kind, count in types.items()}


def _read_spec(path: Path) -> ModelSpec:
    from models.families import spec_from_config

    generation = path / layout.GENERATION_CONFIG
    config = _read_json(path / layout.CONFIG)
    return spec_from_config(
        config, _read_json(generation) if generation.exists() else None, source=str(path / layout.CONFIG)
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = read_stored(path)
    except FileNotFoundError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(data, dict):
        raise StoreError(f"{path} is damaged (not a JSON object); quantize the model again")
    return data
