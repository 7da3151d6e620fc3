"""The names of repositories and revisions, the files of a repository, and those that a checkpoint in safetensors needs.

Names become parts of URLs and of paths in the cache, so they are checked first.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from models.errors import CheckpointError, HubError
from models.foreign import read_json
from models.hub.transport import Head, Transport, without_login
from models.plain_tokenizer import TOKENIZER_FILES

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


CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SMALL_FILES = (CONFIG, "generation_config.json", *TOKENIZER_FILES)
"""Files to download besides weights, if a repository has them."""
_SHARD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors", re.ASCII)
_SHA1 = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteFile:
    """A file of a repository at one commit."""

    name: str
    size: int
    """In bytes."""
    digest: str
    """sha256 of the content in 64 hexadecimal digits (LFS), or git's sha1 of it in 40: the name of its blob."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The files of a repository at one commit."""

    name: str
    commit: str
    """40 hexadecimal digits."""
    files: dict[str, RemoteFile]
    """Files by name; only those that could be needed."""
    gguf: dict[str, RemoteFile]
    """GGUF files at the top level, by name."""
    others: tuple[str, ...]
    """Names of weights in other formats, for messages."""

    @property
    def is_gguf(self) -> bool:
        return bool(self.gguf) and not any(name in (INDEX, SINGLE) or _SHARD.fullmatch(name) for name in self.files)

    def small_files(self) -> list[RemoteFile]:
        """Configuration, tokenizer and chat template.

        Raises:
            CheckpointError: there is no config.json.
        """
        if CONFIG not in self.files:
            raise CheckpointError(
                f"{self.name} has no {CONFIG}, so it is not a Hugging Face checkpoint; choose another repository."
            )
        return [self.files[name] for name in SMALL_FILES if name in self.files]

    def index(self) -> RemoteFile | None:
        """The index of shards, if there is one; it takes precedence over a single file.

        Raises:
            CheckpointError: there are no weights in a supported format.
        """
        if INDEX in self.files or SINGLE in self.files:
            return self.files.get(INDEX)
        if stray := sorted(name for name in self.files if _SHARD.fullmatch(name)):
            raise CheckpointError(
                f"{self.name} has neither {SINGLE} nor {INDEX} (found: {', '.join(stray[:3])}): choose the repository "
                "of the model itself."
            )
        found = f" (found: {', '.join(self.others[:3])})" if self.others else ""
        raise CheckpointError(
            f"{self.name} has no weights in safetensors or GGUF{found}: choose a repository that has, or convert it "
            "with transformers' save_pretrained."
        )

    def weights(self, index: Path | None) -> list[RemoteFile]:
        """The safetensors files of the model.

        Args:
            index: The downloaded index of shards; None if there is none.

        Raises:
            CheckpointError: the index is damaged, or names files that the repository lacks.
        """
        if index is None:
            return [self.files[SINGLE]]
        try:
            shards = shards_of(index)
        except ValueError as error:
            raise CheckpointError(f"{self.name}: {INDEX} is damaged ({error}): choose another revision.") from error
        if missing := [name for name in shards if name not in self.files]:
            raise CheckpointError(
                f"{self.name}: {INDEX} names {missing[0]}, which the repository does not have: choose another revision."
            )
        return [self.files[name] for name in shards]


def shards_of(index: Path) -> list[str]:
    """Names of the files that hold the weights, in order.

    Raises:
        OSError: the list cannot be read.
        ValueError: it is damaged, or names something that is not a safetensors file beside it.
    """
    table = read_json(index)
    weight_map = table.get("weight_map") if isinstance(table, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError("it has no weight_map")
    shards = sorted({str(shard) for shard in weight_map.values()})
    for shard in shards:
        if _SHARD.fullmatch(shard) is None:
            raise ValueError(f"it names {shard!r}, which is not a safetensors file beside it")
    return shards


def read_listing(name: str, revision: str, transport: Transport, note: Callable[[str], None]) -> Listing:
    """List the files of a repository on the hub.

    Raises:
        HubUnreachableError: the hub does not respond.
        HubError: the repository or revision does not exist or can't be accessed.
        CancelledError: the work was asked to stop.
    """

    def refuse(head: Head, body: bytes) -> None:
        raise refused(head, body, name, revision, None, transport.endpoint)

    path = f"/api/models/{quote(name)}/revision/{quote(revision, safe='')}?blobs=true"
    return _parsed(name, transport.read_json(path, f"asking for {name}", refuse, note))


def refused(head: Head, body: bytes, name: str, revision: str, file: str | None, endpoint: str) -> HubError:
    """The error for a response that is neither a success nor worth a retry."""
    code, endpoint = head.headers.get("x-error-code", ""), without_login(endpoint)
    page = f"{endpoint}/{name}"
    if code == "GatedRepo" or (head.status == 403 and code != "RepoNotFound"):
        return HubError(
            f"{name} is gated (the hub answers {head.status}): accept its terms at {page}, then log in with "
            "`hf auth login` or set HF_TOKEN to a token that may read it."
        )
    if code == "RevisionNotFound":
        return HubError(f"{name} has no revision {revision!r}: see {page}/tree/main for its branches and tags.")
    if code == "EntryNotFound" or (file is not None and head.status == 404):
        return HubError(f"{name} has no file {file!r} at {revision}, though it lists one: try again later.")
    if head.status == 401:
        return HubError(
            f"{name} does not exist, or is private or gated (the hub answers 401): check the name, and log in with "
            "`hf auth login` or set HF_TOKEN to a token that may read it."
        )
    if head.status == 404:
        return HubError(
            f"the hub knows no model {name} (404): check the spelling at {endpoint}; for a private one set HF_TOKEN."
        )
    said = body[:200].decode("utf-8", "replace").strip().splitlines()
    detail = f": {said[0]}" if said else ""
    return HubError(f"{name}: the hub answers {head.status}{detail}; is HF_ENDPOINT ({endpoint}) right?")


def _parsed(name: str, answer: dict[str, Any]) -> Listing:
    commit, siblings = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not is_commit(commit) or not isinstance(siblings, list):
        raise HubError(f"{name}: the response names no commit or files; is HF_ENDPOINT a hub?")
    files, gguf, others = {}, {}, []
    for sibling in siblings:
        path = sibling.get("rfilename") if isinstance(sibling, dict) else None
        if not isinstance(path, str):
            raise HubError(f"{name}: the response has a file without a name; is HF_ENDPOINT a hub?")
        if path in SMALL_FILES or path == INDEX or _SHARD.fullmatch(path):
            files[path] = _file(name, path, sibling)
        elif path.endswith(".gguf") and "/" not in path:
            gguf[path] = _file(name, path, sibling)
        elif path.endswith((".bin", ".pt", ".pth", ".onnx", ".msgpack", ".h5")):
            others.append(path)
    return Listing(name=name, commit=commit, files=files, gguf=gguf, others=tuple(others))


def _file(name: str, path: str, sibling: dict[str, Any]) -> RemoteFile:
    lfs = sibling.get("lfs")
    if isinstance(lfs, dict):
        size, digest, form = lfs.get("size"), lfs.get("sha256"), _SHA256
    else:
        size, digest, form = sibling.get("size"), sibling.get("blobId"), _SHA1
    if not isinstance(size, int) or size < 0 or not isinstance(digest, str) or form.fullmatch(digest) is None:
        raise HubError(f"{name}: the hub gives no size or checksum for {path}; is HF_ENDPOINT a hub?")
    return RemoteFile(name=path, size=size, digest=digest)
