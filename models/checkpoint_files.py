"""The files of a checkpoint in either format: configuration, tensors, tokenizer.

The formats are a folder with a Hugging Face checkpoint (safetensors, in one file or sharded) and a GGUF file. For a
folder, config.json and the headers of the shards are read; weights are read on demand. Nothing is ever executed or
unpickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from models import mtp
from models.errors import CheckpointError
from models.experts import name_in_checkpoint, separate
from models.families import family_of, spec_from_config, text_part
from models.families.family import Family
from models.families.fields import Fields
from models.foreign import read_file, read_json
from models.low_bit_source import read_low_bit
from models.shard import ShardTensor, StoredTensor, read_header
from models.spec import ModelSpec

SINGLE = "model.safetensors"
"""The weights of a checkpoint in one file."""
INDEX = "model.safetensors.index.json"
"""The index that maps tensors to shards, for a checkpoint in several files."""
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"

_DOWNLOAD_AGAIN = "Download the model again."


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """The description of a checkpoint by its files."""

    path: Path
    """The folder, or the GGUF file."""
    configuration: Mapping[str, bytes]
    """Content of config.json, and of generation_config.json if there is one."""
    spec: ModelSpec
    family: Family
    described_in: str
    """Name of the description in error messages."""
    remedy: str
    """Advice for tensors that don't match the description."""
    entries: Mapping[str, StoredTensor]
    """Tensors by their names in Hugging Face's format."""
    weights: tuple[Path, ...]
    """The files that hold them, in the order of their names."""
    multipliers: Mapping[str, float]
    """Factors of weights that the configuration asks for, see `Family.multipliers`."""
    keys_as_values: bool = False
    """Whether values are made by the weights of keys, see `Family.keys_as_values`."""
    norm_offset: float = 0.0
    """What is added to stored weights of norms, see `Family.norm_offset`."""
    decay_made: bool = False
    """Whether a delta rule's decays are stored as -exp(A), in place of A."""
    own_name: Callable[[str], str] = str
    """Returns the tensor's name in the files for its name in Hugging Face's format."""
    tokenizer: Callable[[], Mapping[str, bytes]] | None = None
    """Makes the tokenizer's files, by name; None if they are in the folder."""
    types: Mapping[str, int] | None = None
    """Number of weights by stored type, most first, for formats with low-bit types."""


def read_folder(folder: Path) -> CheckpointFiles:
    """Read the description of a Hugging Face checkpoint.

    Raises:
        UnsupportedModelError: The architecture, or an option of it, is not one this program runs.
        CheckpointError: A file is missing, damaged or foreign.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: there is no such folder. Name a folder with a Hugging Face checkpoint, or a GGUF file."
        )
    small = {name: folder / name for name in (CONFIG, GENERATION_CONFIG)}
    if not small[CONFIG].exists() and (found := gguf_files(folder)):
        raise CheckpointError(f"{folder} holds GGUF files ({', '.join(found[:4])}). Name one of them.")
    config = _read_table(small[CONFIG])
    generation = _read_table(small[GENERATION_CONFIG]) if small[GENERATION_CONFIG].exists() else None
    source = str(small[CONFIG])
    spec = spec_from_config(config, generation, source=source)
    text = text_part(config)
    family = family_of(text, source=source)
    stored = _read_entries(folder)
    entries, headless = _text_tensors(stored)
    if headless:
        spec = replace(spec, tied=True)
    if family.predicts_further:
        entries |= mtp.numbered(stored, spec.num_layers)
    tensors, types = read_low_bit(entries, text, source)
    fields = Fields(table=text, source=source)
    places = family.places(fields)
    tensors = separate(tensors, family, spec.mixture, places)
    return CheckpointFiles(
        path=folder,
        configuration={name: read_file(path) for name, path in small.items() if path.exists()},
        spec=spec,
        family=family,
        multipliers=family.multipliers(fields),
        keys_as_values=bool(family.keys_as_values) and fields.flag(family.keys_as_values, False),
        norm_offset=family.norm_offset,
        described_in=CONFIG,
        remedy=f"Weights and {CONFIG} must come from the same model. {_DOWNLOAD_AGAIN}",
        entries=tensors,
        weights=tuple(sorted({entry.path for entry in entries.values()})),
        types=types,
        own_name=partial(name_in_checkpoint, mixture=spec.mixture, places=places),
    )


def gguf_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.gguf") if path.is_file())


def _read_table(path: Path) -> dict[str, Any]:
    try:
        table = read_json(path)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path}: there is no such file. Name a folder with a Hugging Face checkpoint "
            "(config.json and *.safetensors), or a GGUF file."
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: it is not a JSON file ({error}). {_DOWNLOAD_AGAIN}") from error
    if not isinstance(table, dict):
        raise CheckpointError(f"{path} is damaged: it is not a JSON object. {_DOWNLOAD_AGAIN}")
    return table


def _read_entries(folder: Path) -> dict[str, ShardTensor]:
    """Every tensor of the checkpoint. The single file wins over an index, as in transformers."""
    if (folder / SINGLE).exists():
        return read_header(folder / SINGLE)
    if not (folder / INDEX).exists():
        raise CheckpointError(_no_weights(folder))
    weight_map = _read_table(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{folder / INDEX} is damaged: it has no weight_map. {_DOWNLOAD_AGAIN}")
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointError(f"{folder / INDEX} names '{name}', which is not a safetensors file beside it.")
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


_EMBEDDING, _NORM, _HEAD = "embed_tokens.weight", "norm.weight", "lm_head."


def _text_tensors(entries: Mapping[str, ShardTensor]) -> tuple[dict[str, ShardTensor], bool]:
    """The tensors of a language model by the names that a checkpoint of its own has: `model.layers.0...`, `lm_head.`.

    Their beginning differs where the model is a part of another (`model.language_model.`), was saved without its head
    (none) or by a program that wraps it (`module.model.`, `_orig_mod.`). It is what stands before the embedding table,
    or before the last norm where the table is stored as the head.

    Returns:
        The tensors, and whether there is a model without a head.
    """
    ends = _EMBEDDING if any(name.endswith(_EMBEDDING) for name in entries) else _NORM
    begins = {name.removesuffix(ends) for name in entries if name.endswith(ends)}
    begins = {begin for begin in begins if any(name.startswith(f"{begin}layers.") for name in entries)}
    if "model." in begins or len(begins) != 1:
        return dict(entries), False
    (own,) = begins
    found = {f"model.{name.removeprefix(own)}": entry for name, entry in entries.items() if name.startswith(own)}
    heads = {}
    for name, entry in entries.items():
        begin, head, last = name.rpartition(_HEAD)
        if head and own.startswith(begin):
            heads[head + last] = entry
    return found | heads, not heads and ends == _EMBEDDING


def _no_weights(folder: Path) -> str:
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
    if found := gguf_files(folder):
        return f"{folder} holds GGUF files ({', '.join(found[:4])}) and no safetensors. Name one of them."
    return f"{folder}: there are no weights ({SINGLE} or shards with {INDEX}). Download the model's safetensors files."
