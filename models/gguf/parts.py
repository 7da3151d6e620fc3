"""A model in several GGUF files, as llama.cpp's `llama-gguf-split` writes them: the first holds all metadata."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from models.errors import CheckpointError
from models.gguf.header import Header, TensorInfo, read_header
from models.gguf_files import PART, part_names


def read_model(path: Path) -> Header:
    """Read the header of a GGUF file; where it is one of several parts, those of all of them as one.

    Args:
        path: The file, or any of the parts; the others lie beside it.

    Raises:
        CheckpointError: see `read_header`; or a part is missing, or belongs to another model.
    """
    given = read_header(path)
    count = given.metadata.get("split.count", 0)
    if not isinstance(count, int) or count < 2:
        return given
    match = PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path}: is one of {count} parts of a model, but its name does not say which. Give the parts their names "
            f"back, NAME-00001-of-{count:05}.gguf and so on, in one folder."
        )
    paths = [path.with_name(name) for name in part_names(path.name)]
    missing = [own.name for own in paths if not own.is_file()]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of {count} parts of the model are missing: {', '.join(missing[:4])}"
            f"{', …' if len(missing) > 4 else ''}. Download them into the same folder."
        )
    parts = [given if own == path else read_header(own) for own in paths]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        placed = (part.metadata.get("split.no"), part.metadata.get("split.count"))
        if placed != (number, count) or tensors.keys() & part.tensors.keys():
            raise CheckpointError(
                f"{part.path}: is not part {number + 1} of {count} of the model that the other files beside it hold. "
                "Download it again."
            )
        tensors |= part.tensors
    promised = parts[0].metadata.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise CheckpointError(
            f"{parts[0].path}: its {count} parts hold {len(tensors)} tensors, not {promised} as it says: they do not "
            "belong together. Download them again."
        )
    return replace(parts[0], tensors=tensors, files=tuple(paths))
