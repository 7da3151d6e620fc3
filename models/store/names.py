"""Names of stored models and their folders. A name can never point outside the store."""

from __future__ import annotations

import re
from pathlib import Path

from models.catalogue import KNOWN
from models.errors import StoreError
from models.gguf_files import DEFAULT_TYPES, PART, type_of
from models.recipe import QOQ_STEPS, Recipe

_PART = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9])?")
_SEPARATOR = "--"
"""Replaces the slash of `org/name` in a folder's name, as in the Hugging Face cache."""
GGUF = ".gguf"
"""Ending of a GGUF file."""
_SNAPSHOT = re.compile(r"models--(?P<name>.+)")


def check_name(name: str) -> str:
    """Return `name` if it may name a stored model: `name` or `org/name` of letters, digits, `.`, `_` and `-`.

    Raises:
        StoreError: it may not, for example because it tries to leave the store.
    """
    parts = name.split("/")
    good = len(parts) <= 2 and all(_PART.fullmatch(part) for part in parts)
    if not good or _SEPARATOR in name or ".." in name or len(name) > 150:
        raise StoreError(
            f"{name!r} is not a good model name: use letters, digits, '.', '_' and single '-', beginning and ending "
            "with a letter or digit, as in 'name' or 'org/name'"
        )
    return name


def folder_of(name: str) -> str:
    """Folder of a model inside the store."""
    return check_name(name).replace("/", _SEPARATOR)


def name_of(folder: str) -> str:
    """The model that a folder of the store belongs to.

    Raises:
        StoreError: the folder is none that `folder_of` gives.
    """
    return check_name(folder.replace(_SEPARATOR, "/", 1))


def source_name(checkpoint: Path) -> str:
    """The name of a checkpoint: its short name, or `org/name` in the Hugging Face cache, else its file name.

    A GGUF file in that cache is `org/name:TYPE`, or `org/name` if it has the type that is taken by default.
    """
    for known in KNOWN.values():
        if checkpoint.name == known.file:
            return known.name
    path = checkpoint.absolute() if checkpoint.is_file() else checkpoint.resolve()  # a file there links to a blob
    folder = path.parent if path.name.endswith(GGUF) else path
    if folder.parent.name == "snapshots" and (match := _SNAPSHOT.fullmatch(folder.parent.parent.name)):
        kind = None if folder is path else type_of(path.name)
        return match["name"].replace("--", "/", 1) + (f":{kind}" if kind not in (None, DEFAULT_TYPES[0]) else "")
    match = PART.fullmatch(path.name)
    return path.name if match is None else f"{match['model']}{GGUF}"


def made_of_hub(source: str, asked: str) -> bool:
    """Whether a model's source is what a name on the hub asks for, `owner/name` or `owner/name:TYPE`."""
    repository, _, kind = asked.partition(":")
    if kind and kind.upper() != DEFAULT_TYPES[0]:
        return source == f"{repository}:{kind.upper()}"
    return source == repository or source.startswith(f"{repository}:")


def default_name(checkpoint: Path, recipe: Recipe) -> str:
    """Name of a model unless one is given: source, method and bits, and what else differs from the usual recipe.

    For example `english3m-gptq-3bit`, or `org/name-rtn-4bit-g128` for a downloaded checkpoint.
    """
    usual = Recipe.usual(recipe.method, bits=recipe.bits)
    known = source_name(checkpoint).removesuffix(GGUF)
    source = "/".join(filter(None, (_cleaned(part) for part in known.split("/")))) or "model"
    name = f"{source}-{recipe.method}-{recipe.bits:g}bit"
    for letter, field in (("g", "group_size"), ("r", "residual_bits"), ("h", "head_bits"), ("e", "expected_k_chunk")):
        if getattr(recipe, field) != getattr(usual, field):
            name += f"-{letter}{getattr(recipe, field)}"
    if recipe.per_token:
        usual = Recipe.usual(recipe.method, group_size=recipe.group_size)
        for field in QOQ_STEPS:
            if getattr(recipe, field) != getattr(usual, field):
                name += f"-{'' if getattr(recipe, field) else 'no-'}{field.replace('_', '-')}"
    if recipe.smooth_attention and not recipe.per_token:
        name += "-sa"
    return check_name(name)


def _cleaned(text: str) -> str:
    """The nearest acceptable part of a name."""
    text = re.sub(r"[^A-Za-z0-9._]+", "-", text)  # runs of dashes included
    return re.sub(r"\.{2,}", ".", text).strip("-._")[:60].strip("-._")
