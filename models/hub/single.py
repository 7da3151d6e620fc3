"""The download of one file of a repository at one commit, with known size and checksum."""

from __future__ import annotations

from pathlib import Path

from models.errors import HubError, HubUnreachableError
from models.hub.blob import BlobDownload
from models.hub.cache import RepositoryCache, cache_root, is_intact
from models.hub.listing import Listing, RemoteFile, read_listing
from models.hub.meter import Meter
from models.hub.snapshot import token_to_send
from models.hub.transport import Policy, Transport
from models.progress import Cancelled, Progress, ProgressCallback


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
    *,
    endpoint: str | None = None,
    cache_dir: Path | str | None = None,
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
        endpoint: Address of the hub; HF_ENDPOINT or huggingface.co if None.
        cache_dir: The cache; HF_HUB_CACHE or HF_HOME/hub if None.
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

    if (found := cached_file(name, commit, file, cache_dir=cache_dir)) is not None:
        return found
    if constants.is_offline_mode():
        raise HubUnreachableError("HF_HUB_OFFLINE forbids access to the hub.")
    address = constants.ENDPOINT if endpoint is None else endpoint
    cache = RepositoryCache(cache_root(cache_dir), name)

    def note(message: str) -> None:
        progress(Progress(phase="check", done=0.0, total=None, unit="bytes", message=message))

    note(f"asking {address} for {name}")
    with Transport(address, token_to_send(None), policy or Policy(), cancelled) as transport:
        # Detects an unreachable hub at once; a download would retry for minutes.
        if file.name not in read_listing(name, commit, transport, note).gguf:
            raise HubError(f"{name} has no file {file.name!r} at {commit[:12]}.")
        listing = Listing(name=name, commit=commit, files={}, gguf={file.name: file}, others=())
        cache.prepare()
        with cache.lock(
            file.digest, cancelled, lambda: note(f"{file.name}: another program is downloading it; waiting")
        ):
            if cache.drop_damaged(commit, file):
                note(f"{file.name}: the cached file has the wrong checksum; downloading it again")
        cache.check_space(commit, [file])
        meter = Meter(progress, file.size)
        fresh = {file.digest} if BlobDownload(cache, listing, file, transport, meter).run() else set()
        meter.finish()
        with cache.lock(commit, cancelled, lambda: meter.note("another run is finishing; waiting")):
            return cache.publish(listing, [file], commit, fresh) / file.name
