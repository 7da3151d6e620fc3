"""Validation of names on the hub, which become parts of URLs and of paths in the cache."""

from __future__ import annotations

import re

from models.errors import HubError

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_PART}/{_PART}", re.ASCII)
_TYPE = re.compile(r"[A-Za-z0-9_]{2,16}", re.ASCII)
_REVISION = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*(?:/[A-Za-z0-9_][A-Za-z0-9_.+-]*)*", re.ASCII)
_MAX_REVISION = 200
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


def is_hub_name(text: str) -> bool:
    """Whether a text has the form of a model on the hub, `owner/name` or `owner/name:TYPE`. Nothing is looked up."""
    name, colon, kind = text.partition(":")
    if colon and _TYPE.fullmatch(kind) is None:
        return False
    return _NAME.fullmatch(name) is not None and "--" not in name and ".." not in name and not name.endswith(".git")


def split_name(name: str) -> tuple[str, str | None]:
    """A model on the hub as its repository and the type of GGUF weights that it asks for, if any.

    Raises:
        HubError: it is an address, a path, or has characters that the hub does not allow.
    """
    if not is_hub_name(name):
        raise HubError(
            f"{name!r} is not a name on the hub; use owner/name, as in Qwen/Qwen2.5-0.5B-Instruct (letters, digits, "
            "'-', '_' and '.'; no address, no path), or owner/name:TYPE for a GGUF file, as in Qwen/Qwen3-4B-GGUF:Q8_0."
        )
    repository, _, kind = name.partition(":")
    return repository, kind or None


def check_revision(revision: str) -> None:
    """Check that a text can be a branch, a tag or a commit.

    Raises:
        HubError: it could lead out of the cache, or has characters that the hub does not allow.
    """
    parts = revision.split("/")
    if (
        len(revision) > _MAX_REVISION
        or _REVISION.fullmatch(revision) is None
        or ".." in revision
        or any(part.endswith((".", ".lock")) for part in parts)
    ):
        raise HubError(f"{revision!r} is not a revision; use a branch, a tag or a commit, as in 'main'.")


def is_commit(revision: str) -> bool:
    """Whether a revision is a full commit hash, which never changes its meaning."""
    return _COMMIT.fullmatch(revision) is not None
