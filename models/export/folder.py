"""Folders of AWQ, GPTQ and compressed-tensors models: 4-bit groups in safetensors, as vLLM and SGLang read them.

The blocks' matrices are low-bit; embedding table, norms and output head are not, as those programs expect. The head is
written from its own codes, so it computes what ours does.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from models import integer_formats
from models.errors import UnsupportedModelError
from models.export import ExportFormat, Step
from models.families import FAMILIES
from models.foreign import read_json
from models.packed import PackedLinear, rows_of
from models.quantizers.dequantize import parts, pieces, restored, uniform_groups
from models.quantizers.groups import GroupCodes, round_to_grid, search
from models.spec import LAYER_TYPES
from models.store import StoredModel, layout
from models.store.manifest import Manifest
from models.store.tensors import Array, PiecewiseTensor, tensor_file

GROUP_SIZES = (128, 64, 32)
"""Numbers of input channels that share a scale, as the kernels of these programs have them."""
Tensors = dict[str, Array | PiecewiseTensor]
_FAMILIES = ("llama", "mistral", "ministral", "qwen2", "qwen3", "phi3", "smollm3", "seed_oss")
"""Families whose norms and rows are here what they are in a checkpoint."""
_BITS = 4
_WORD = 8
"""Codes in a word: numbers of outputs must be multiples of it."""


class FolderWriter:
    """Writes one model.

    Args:
        model: The model.
        kind: `awq`, `gptq` or `compressed-tensors`.
        residuals: Whether residuals are added, and the sums rounded to 4 bits.

    Raises:
        UnsupportedModelError: the format cannot hold it.
    """

    def __init__(self, model: StoredModel, kind: ExportFormat, residuals: bool) -> None:
        self._model, self._kind, self._residuals = model, kind, residuals
        self._spec, self._family = model.spec, FAMILIES[model.spec.family]
        self._group_size = self._common_group_size()
        self._check()
        self._less_one = residuals or all(
            np.all(linear.zeros != 0) for linear in self._block_matrices() if linear.zeros is not None
        )
        self.notes: list[str] = []
        """What differs from the stored model."""
        if residuals:
            self.notes.append("weights with their residuals were rounded to 4 bits anew, by plain rounding")
        elif model.recipe.bits < _BITS:
            self.notes.append(f"codes of 3 bits take 4 bits in {kind}")
        if model.recipe.per_token:
            self.notes.append("activations keep 16 bits there; qoq rounds them to 8")

    def write(self, folder: Path, step: Step) -> dict[str, int]:
        """Write the folder, a file for each block, and return the number of weights by type."""
        folder.mkdir()
        spec = self._spec
        shards = [partial(self._block, layer, step) for layer in range(spec.num_layers)]
        shards.append(partial(self._outer, step))
        index: dict[str, str] = {}
        total = 0
        for number, shard in enumerate(shards, 1):
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors = shard()
            with (folder / name).open("wb") as file:
                for piece in tensor_file(tensors):
                    file.write(piece)
            index |= dict.fromkeys(tensors, name)
            total += sum(math.prod(each.shape) * each.dtype.itemsize for each in tensors.values())
        table = {"metadata": {"total_size": total}, "weight_map": dict(sorted(index.items()))}
        _write_json(folder / "model.safetensors.index.json", table)
        _write_json(folder / layout.CONFIG, self._config())
        own = {layout.RECIPE, layout.LOSSES, layout.REFERENCE, layout.CONFIG, layout.MTP}
        own |= {*layout.tensor_files(spec)}
        for name in sorted(Manifest.read(self._model.path).files.keys() - own):
            (folder / name).write_bytes((self._model.path / name).read_bytes())
        low = sum(math.prod(spec.linear_shape(kind)) for kind in LAYER_TYPES) * spec.num_layers
        return {"INT4": low, "F16": 2 * math.prod(spec.linear_shape("head"))}

    def _block(self, layer: int, step: Step) -> Tensors:
        tensors: Tensors = {}
        for name in self._spec.block_vectors(layer):
            (module,) = self._family.sources(name)
            tensors[f"{module}.weight"] = self._model.vector(name)
        for kind in LAYER_TYPES:
            step()
            linear = self._model.linear(f"layers.{layer}.{kind}")
            groups = self._groups(linear)
            for module, rows in parts(self._spec, self._family, kind):
                own = f"model.layers.{layer}.{module}"
                tensors |= {f"{own}.{last}": each for last, each in self._packed(groups, rows).items()}
                if linear.bias is not None:
                    tensors[f"{own}.bias"] = linear.bias[rows].astype(np.float16)
        self._model.release()
        return tensors

    def _outer(self, step: Step) -> Tensors:
        step()
        head = self._model.linear("head")
        return {
            "model.embed_tokens.weight": self._model.embedding(),
            "model.norm.weight": self._model.vector("norm"),
            "lm_head.weight": PiecewiseTensor(
                dtype=np.dtype(np.float16), shape=head.shape, pieces=lambda: self._half(head)
            ),
        }

    def _half(self, head: PackedLinear) -> Iterator[Array]:
        for piece in pieces(head):
            yield restored(rows_of(head, piece), self._residuals).astype(np.float16)

    def _groups(self, linear: PackedLinear) -> GroupCodes:
        if self._residuals:
            weight = restored(linear, residuals=True)
            scales, zeros = search(weight, None, _BITS, self._group_size)
            return round_to_grid(weight, scales, zeros, _BITS, self._group_size)
        found = uniform_groups(linear)
        assert found is not None  # refused before
        count = linear.shape[1] // self._group_size
        which = np.arange(count) * self._group_size // found.group_size
        return replace(found, scales=found.scales[:, which], zeros=found.zeros[:, which], group_size=self._group_size)

    def _packed(self, groups: GroupCodes, rows: slice) -> dict[str, Array]:
        part = replace(groups, codes=groups.codes[rows], scales=groups.scales[rows], zeros=groups.zeros[rows])
        if self._kind == "awq":
            return integer_formats.awq(part)
        if self._kind == "gptq":
            return integer_formats.gptq(part, less_one=self._less_one)
        return integer_formats.compressed_tensors(part)

    def _config(self) -> dict[str, Any]:
        """config.json: the checkpoint's own, with the format's description of its weights."""
        config = read_json(self._model.path / layout.CONFIG)
        config.pop("torch_dtype", None)
        about: dict[str, Any]
        if self._kind == "awq":
            about = {"quant_method": "awq", "bits": _BITS, "zero_point": True, "version": "gemm"}
        elif self._kind == "gptq":
            version = "gptq" if self._less_one else "gptq_v2"
            about = {"quant_method": "gptq", "bits": _BITS, "checkpoint_format": version}
            about |= {"desc_act": False, "sym": False, "lm_head": False}
        else:
            about = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
            about |= {"quantization_status": "compressed", "ignore": ["lm_head"]}
            weights = {"num_bits": _BITS, "type": "int", "symmetric": False, "strategy": "group", "dynamic": False}
            about["config_groups"] = {
                "group_0": {"targets": ["Linear"], "weights": {**weights, "group_size": self._group_size}}
            }
        if self._kind != "compressed-tensors":
            about["group_size"] = self._group_size
        return {**config, "dtype": "float16", "tie_word_embeddings": False, "quantization_config": about}

    def _block_matrices(self) -> Iterator[PackedLinear]:
        for name in self._spec.linear_names()[:-1]:
            yield self._model.linear(name)

    def _common_group_size(self) -> int:
        """The largest of `GROUP_SIZES` that divides every matrix's inputs and, as they are kept, its groups.

        Raises:
            UnsupportedModelError: there is none.
        """
        widths = {self._spec.linear_shape(kind)[1] for kind in LAYER_TYPES}
        sizes = widths if self._residuals else widths | {self._model.recipe.group_of(width) for width in widths}
        for size in GROUP_SIZES:
            if all(each % size == 0 for each in sizes):
                return size
        raise self._refusal(f"its matrices have {_listed(widths)} inputs, and groups of 32 must divide them all")

    def _check(self) -> None:
        recipe, spec = self._model.recipe, self._spec
        config = read_json(self._model.path / layout.CONFIG)
        if spec.family not in _FAMILIES or "text_config" in config:
            raise self._refusal(f"weights of {spec.family} models are rearranged here, and cannot be written back yet")
        if not recipe.uniform and not self._residuals:
            raise self._refusal("its codes are not evenly spaced: export it as gguf, or with its residuals")
        if recipe.kept:
            raise self._refusal(
                "it has the weights of its source, whose minimums and 8 bits have no place there: export it as gguf"
            )
        for kind in LAYER_TYPES:
            for module, rows in parts(spec, self._family, kind):
                if (rows.stop - rows.start) % _WORD:
                    raise self._refusal(
                        f"{module} has {rows.stop - rows.start} outputs, which is not a multiple of {_WORD}"
                    )

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._model.name} cannot be exported as {self._kind}: {reason}")


def _write_json(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _listed(numbers: set[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))
