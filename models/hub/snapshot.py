"""Downloads from the hub: a checkpoint, or one file of known size and checksum.

A repository of GGUF files gives one model. Otherwise configuration and the index of shards come first, so that a
gated repository, or one without safetensors, is detected before gigabytes are downloaded. Names and the revision's
reference are written after every file is complete and verified, so that nobody finds half a checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from models.errors import HubError, HubUnreachableError
from models.gguf.header import choose
from models.hub.blob import BlobDownload
from models.hub.cache import RepositoryCache, cache_root, is_intact
from models.hub.listing import CONFIG, Listing, RemoteFile, check_revision, read_listing, split_name
from models.hub.meter import Meter
from models.hub.transport import Policy, Transport
from models.progress import Cancelled, ProgressCallback, ignore_progress, never_cancelled, note

_CHECK = "check"


def pull(
    name: str,
    revision: str | None = None,
    *,
    progress: ProgressCallback = ignore_progress,
    cancelled: Cancelled = never_cancelled,
    endpoint: str | None = None,
    cache_dir: Path | str | None = None,
    token: str | None = None,
    policy: Policy | None = None,
) -> Path:
    """Download a checkpoint's files into the Hugging Face cache unless they are there.

    These are configuration, tokenizer, chat template and safetensors (the set in model.safetensors.index.json if there
    are several), or a GGUF file, maybe in parts (see `models.gguf.header`), never formats that can execute code.
    Earlier downloads are resumed, even within a file. If the hub does not respond, a complete copy in the cache is
    used.

    Args:
        name: `owner/name`, or `owner/name:TYPE` for a GGUF file with weights of that type.
        revision: Branch, tag or commit; the default branch if None.
        progress: Receives reports in bytes.
        cancelled: Called several times per second.
        endpoint: Address of the hub; HF_ENDPOINT or huggingface.co if None.
        cache_dir: The cache; HF_HUB_CACHE or HF_HOME/hub if None.
        token: For gated and private models; HF_TOKEN or the saved login if None.
        policy: Timeouts and retries.

    Returns:
        The folder of the snapshot, `<cache>/models--owner--name/snapshots/<commit>`, or the (first) GGUF file in it.

    Raises:
        HubError: the name or revision is invalid, the hub refuses, or it sent something other than it listed.
        HubUnreachableError: the hub does not respond, or access is forbidden (HF_HUB_OFFLINE).
        CheckpointError: the repository has no checkpoint in safetensors, and no GGUF file to choose.
        StoreError: the disk is full, or the cache can't be written.
        CancelledError: `cancelled` returned True; the same call continues.
    """
    from huggingface_hub import constants

    repository, gguf_type = split_name(name)
    revision = "main" if revision is None else revision
    check_revision(revision)
    cache = RepositoryCache(cache_root(cache_dir), repository)
    if constants.is_offline_mode():
        if (found := cache.complete(revision, gguf_type)) is None:
            raise HubUnreachableError(
                f"{name} ({revision}) is not in the cache {cache.root}, and HF_HUB_OFFLINE forbids access to the hub; "
                "unset it to download the model."
            )
        return found
    address = constants.ENDPOINT if endpoint is None else endpoint
    tell = partial(note, progress)
    tell(f"asking {address} for {name}")
    with Transport(address, token_to_send(token), policy or Policy(), cancelled) as transport:
        try:
            listing = read_listing(repository, revision, transport, tell)
        except HubUnreachableError as error:
            if (found := cache.complete(revision, gguf_type)) is None:
                raise
            tell(f"the hub does not answer; taking the copy in the cache ({error})")
            return found
        download = _Pull(cache, listing, revision, transport, progress)
        if gguf_type is None and not listing.is_gguf:
            return download.safetensors()
        return download.gguf([listing.gguf[file] for file in choose(repository, listing.gguf, gguf_type)])


class _Pull:
    """The download of a repository with a known listing."""

    def __init__(
        self, cache: RepositoryCache, listing: Listing, revision: str, transport: Transport, progress: ProgressCallback
    ) -> None:
        self._cache = cache
        self._listing = listing
        self._revision = revision
        self._transport = transport
        self._progress = progress
        self._fresh: set[str] = set()

    def gguf(self, files: list[RemoteFile]) -> Path:
        """Download a GGUF model. Returns the path of its first file in the snapshot."""
        self._cache.prepare()
        return self._weights(files) / files[0].name

    def safetensors(self) -> Path:
        """Download a checkpoint in safetensors. Returns the snapshot's folder."""
        cache, listing = self._cache, self._listing
        small, index = listing.small_files(), listing.index()
        first = [listing.files[CONFIG], *([index] if index is not None else [])]
        cache.prepare()
        cache.check_space(listing.commit, first)
        self._fetch(first, Meter(self._progress, sum(file.size for file in first), phase=_CHECK))
        rest = (file for file in small if file not in first)
        return self._weights([*first, *rest, *listing.weights(self._index_path(index))])

    def _weights(self, files: list[RemoteFile]) -> Path:
        cache, listing = self._cache, self._listing
        cache.check_space(listing.commit, files)
        meter = Meter(self._progress, sum(file.size for file in files))
        self._fetch(files, meter)
        meter.finish()
        key = listing.commit
        with cache.lock(key, self._transport.cancelled, lambda: meter.note("another run is finishing; waiting")):
            return cache.publish(listing, files, self._revision, self._fresh)

    def _fetch(self, files: list[RemoteFile], meter: Meter) -> None:
        for file in files:
            if BlobDownload(self._cache, self._listing, file, self._transport, meter).run():
                self._fresh.add(file.digest)

    def _index_path(self, index: RemoteFile | None) -> Path | None:
        if index is None:
            return None
        blob = self._cache.blob(index)
        return blob if blob.is_file() else self._cache.pointer(self._listing.commit, index)


def token_to_send(token: str | None) -> str | None:
    """The token to send: the given one, HF_TOKEN, or the saved login's."""
    from huggingface_hub import constants, get_token

    if token is not None or constants.HF_HUB_DISABLE_IMPLICIT_TOKEN:
        return token
    try:
        return get_token()
    except OSError as error:
        raise HubError(f"the saved login of huggingface_hub cannot be used ({error}): run `hf auth login`.") from error


def cached_file(name: str, commit: str, file: RemoteFile, *, cache_dir: Path | str | None = None) -> Path | None:
    """A file that is already in the cache, verified by checksum; the hub is not contacted.

    Args:
        name: `owner/name`.
        commit: 40 hexadecimal digits.
        file: The expected file.
        cache_dir: The cache; that of huggingface_hub if None.
    """
    path = RepositoryCache(cache_root(cache_dir), name).pointer(commit, file)
    return path if is_intact(path, file) else None


def pull_file(
    name: str,
    commit: str,
    file: RemoteFile,
    progress: ProgressCallback,
    cancelled: Cancelled,
    policy: Policy | None = None,
) -> Path:
    """Download one file into the Hugging Face cache unless it is there. Resumes earlier downloads.

    Cached files are verified as well as downloaded ones.

    Args:
        name: `owner/name`.
        commit: 40 hexadecimal digits.
        file: The expected file.
        progress: Receives reports in bytes.
        cancelled: Called several times per second.
        policy: Timeouts and retries.

    Returns:
        Its path in the snapshot of the commit.

    Raises:
        HubError: the hub refuses, or has or sent a different file.
        HubUnreachableError: the hub does not respond, or access is forbidden (HF_HUB_OFFLINE).
        StoreError: the disk is full, or the cache can't be written.
        CancelledError: `cancelled` returned True; the same call continues.
    """
    from huggingface_hub import constants

    if (found := cached_file(name, commit, file)) is not None:
        return found
    if constants.is_offline_mode():
        raise HubUnreachableError("HF_HUB_OFFLINE forbids access to the hub.")
    cache = RepositoryCache(cache_root(None), name)
    tell = partial(note, progress)
    tell(f"asking {constants.ENDPOINT} for {name}")
    with Transport(constants.ENDPOINT, token_to_send(None), policy or Policy(), cancelled) as transport:
        # Detects an unreachable hub at once; a download would retry for minutes.
        if file.name not in read_listing(name, commit, transport, tell).gguf:
            raise HubError(f"{name} has no file {file.name!r} at {commit[:12]}.")
        listing = Listing(name=name, commit=commit, files={}, gguf={file.name: file}, others=())
        cache.prepare()
        with cache.lock(
            file.digest, cancelled, lambda: tell(f"{file.name}: another program is downloading it; waiting")
        ):
            if cache.drop_damaged(commit, file):
                tell(f"{file.name}: the cached file has the wrong checksum; downloading it again")
        return _Pull(cache, listing, commit, transport, progress).gguf([file])
