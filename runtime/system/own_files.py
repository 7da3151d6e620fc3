"""Files that only this user can have written: machine code, which runs unread, and what holds a secret.

Where another user of the machine can write, code or an address of theirs may lie in the place of ours. Windows has no
owners and permissions of this kind: nothing is checked there.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

WRITING = 0o022
"""Permission of others to write."""
ANYTHING = 0o077
"""Permission of others to do anything at all."""
_VARIABLE = "LOWBIT_CHAT_KERNEL_CACHE"
_UNMAPPED = 65534
"""Owner that a container shows for the system's folders where it does not know the system's root."""


def read_own(file: Path, denied: int = WRITING) -> bytes:
    """Read a file that only this user can have written. The file that is checked is the very one that is read.

    Args:
        file: Which; a link is not followed.
        denied: Permissions that nobody else may have.

    Raises:
        OSError: it cannot be read, or is not this user's alone.
    """
    descriptor = os.open(file, os.O_RDONLY | _flag("O_NOFOLLOW") | _flag("O_NONBLOCK") | _flag("O_BINARY"))
    try:
        status = os.fstat(descriptor)
        problem = _problem(status, denied) if stat.S_ISREG(status.st_mode) else "it is no file"
        if problem is not None:
            raise PermissionError(errno.EPERM, problem, str(file))
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(descriptor)


def is_own(file: Path, denied: int = WRITING) -> bool:
    """Whether there is a file that `read_own` would read with the same arguments."""
    try:
        status = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and _problem(status, denied) is None


def kernel_folder(name: str) -> Path:
    """The folder of a kind of machine code, which only this user can write to.

    It lies in the cache folder, or in the one that LOWBIT_CHAT_KERNEL_CACHE names.
    """
    chosen, home = os.environ.get(_VARIABLE), os.environ.get("LOWBIT_CHAT_HOME")
    if chosen:
        base = Path(chosen)
    elif home:
        base = Path(home).expanduser() / "cache" / "kernels"
    else:
        import platformdirs

        base = Path(platformdirs.user_cache_dir("lowbit-chat", appauthor=False)) / "kernels"
    return own_folder(base / name)


def own_folder(folder: Path, variable: str = _VARIABLE) -> Path:
    """A folder for machine code, made for its owner alone; a temporary one where it is not to be trusted or written.

    Args:
        folder: Which.
        variable: The environment variable that names another.
    """
    try:
        for path in reversed([folder, *folder.parents]):
            path.mkdir(mode=0o700, exist_ok=True)
        problem = _folder_problem(folder) or (None if os.access(folder, os.W_OK | os.X_OK) else "it is not writable")
    except OSError as error:
        problem = str(error)
    if problem is None:
        return folder
    temporary = Path(tempfile.mkdtemp(prefix="lowbit-chat-kernels-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    logger.warning(
        "compiled kernels cannot be kept in %s (%s), so every start compiles them again; %s names another folder",
        folder,
        problem,
        variable,
    )
    found = temporary / folder.name
    found.mkdir(mode=0o700)
    return found


def _flag(name: str) -> int:
    """A flag of `os.open`; 0 on a system that lacks it."""
    return getattr(os, name, 0)


def _problem(status: os.stat_result, denied: int) -> str | None:
    """Who else has a hand in a file or folder; None where only this user has."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    if status.st_mode & denied:
        return f"other users have access to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _folder_problem(folder: Path) -> str | None:
    """Who else can write to a folder or put another in its place; None where only this user and root can.

    A group may write to the folders above: on many systems each user has a group of their own, which may do that.
    """
    if not hasattr(os, "geteuid"):
        return None
    if (problem := _problem(folder.stat(), WRITING)) is not None:
        return problem
    for above in {*folder.absolute().parents, *folder.resolve().parents}:
        status = above.stat()
        if status.st_uid not in (os.geteuid(), 0, _UNMAPPED):
            return f"{above} belongs to another user"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"every user may write to {above}"
    return None
