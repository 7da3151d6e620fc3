"""Private files: machine code, secrets and what names programs to run, which only this user can have written.

In a folder that other users can write to, they could substitute code or an address of their own. Windows has no owners
and permissions of this kind: nothing is checked there.
"""

from __future__ import annotations

import atexit
import errno
import logging
import os
import shlex
import shutil
import stat
import tempfile
from pathlib import Path

logger = logging.getLogger(__name__)

WRITE_ACCESS = 0o022
"""Write permission of others."""
ANY_ACCESS = 0o077
"""Any permission of others."""
_VARIABLE = "LOWBIT_CHAT_KERNEL_CACHE"
_UNMAPPED = 65534
"""Owner that a container shows for system folders if it does not know the system's root."""


def read_private(file: Path, denied: int = WRITE_ACCESS) -> bytes:
    """Read a file that only this user can have written. Checks the opened file itself, not just its path.

    Args:
        file: The file; links are not followed.
        denied: Permissions that nobody else may have.

    Raises:
        OSError: it cannot be read, or others have access.
    """
    descriptor = os.open(file, os.O_RDONLY | _flag("O_NOFOLLOW") | _flag("O_NONBLOCK") | _flag("O_BINARY"))
    try:
        status = os.fstat(descriptor)
        problem = _problem(status, denied) if stat.S_ISREG(status.st_mode) else "it is not a file"
        if problem is not None:
            raise PermissionError(errno.EPERM, problem, str(file))
        with open(descriptor, "rb", closefd=False) as stream:
            return stream.read()
    finally:
        os.close(descriptor)


def read_trusted(file: Path, most: int) -> bytes:
    """Read a file whose content leads to running programs: only this user, or root, can have written it.

    Links are followed. The opened file is checked, and the folders in which it and a link to it could be exchanged.

    Args:
        file: The file.
        most: Bytes that it may have.

    Returns:
        Its content, or one byte more than `most` of a larger file.

    Raises:
        PermissionError: somebody else can have written it; the message says how to mend that.
        OSError: it cannot be read.
    """
    real = file.resolve(strict=True)
    descriptor = os.open(real, os.O_RDONLY | _flag("O_NOFOLLOW") | _flag("O_NONBLOCK") | _flag("O_BINARY"))
    with os.fdopen(descriptor, "rb") as stream:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(file))
        problem = _trust_problem(real, status) or _trust_problem(file, file.lstat())
        for folder in dict.fromkeys((real.parent, file.absolute().parent)):
            problem = problem or _trust_problem(folder, folder.stat())
            if problem is None and (above := _problem_above(folder)) is not None:
                problem = f"{above}; take that from them, or keep the file elsewhere"
        if problem is not None:
            raise PermissionError(problem)
        return stream.read(most + 1)


def is_private(file: Path, denied: int = WRITE_ACCESS) -> bool:
    """Whether `read_private` would accept a file."""
    try:
        status = file.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and _problem(status, denied) is None


def kernel_folder(name: str) -> Path:
    """The folder of a kind of machine code, writable only by this user.

    It is in the cache folder, or in the one that LOWBIT_CHAT_KERNEL_CACHE names.
    """
    chosen, home = os.environ.get(_VARIABLE), os.environ.get("LOWBIT_CHAT_HOME")
    if chosen:
        base = Path(chosen)
    elif home:
        base = Path(home).expanduser() / "cache" / "kernels"
    else:
        import platformdirs

        base = Path(platformdirs.user_cache_dir("lowbit-chat", appauthor=False)) / "kernels"
    return private_code_folder(base / name)


def private_code_folder(folder: Path, variable: str = _VARIABLE) -> Path:
    """A folder for machine code, created for its owner only; a temporary one if it cannot be trusted or written.

    Args:
        folder: The preferred folder.
        variable: The environment variable that overrides it.
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
    inside = temporary / folder.name
    inside.mkdir(mode=0o700)
    return inside


def _flag(name: str) -> int:
    """A flag of `os.open`; 0 if the system lacks it."""
    return getattr(os, name, 0)


def _problem(status: os.stat_result, denied: int) -> str | None:
    """A description of other users' access to a file or folder; None if only this user has access."""
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return "it belongs to another user"
    if status.st_mode & denied:
        return f"other users have access to it (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _folder_problem(folder: Path) -> str | None:
    """A description of others' access to a folder or its parents; None if only this user and root have it.

    Groups may write to the parent folders: on many systems each user has a group of their own.
    """
    if not hasattr(os, "geteuid"):
        return None
    if (problem := _problem(folder.stat(), WRITE_ACCESS)) is not None:
        return problem
    return _problem_above(folder)


def _problem_above(folder: Path) -> str | None:
    """A description of others' access to the folders above one; None if they can't replace it."""
    if not hasattr(os, "geteuid"):
        return None
    for above in {*folder.absolute().parents, *folder.resolve().parents}:
        status = above.stat()
        if status.st_uid not in (os.geteuid(), 0, _UNMAPPED):
            return f"{above} belongs to another user"
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"every user may write to {above}"
    return None


def _is_own_group(status: os.stat_result) -> bool:
    """Whether nobody else is in a file's group: where users have one of the same number, it may write their files."""
    return status.st_gid == status.st_uid != 0


def _trust_problem(path: Path, status: os.stat_result) -> str | None:
    """How others can have changed a file, folder or link, and what to do; None if only this user and root can."""
    if not hasattr(os, "geteuid"):
        return None
    folder = stat.S_ISDIR(status.st_mode)
    if status.st_uid not in (os.geteuid(), 0, *((_UNMAPPED,) if folder else ())):
        return f"{path} belongs to another user; make it yours (chown), or use a copy that is yours"
    safe = stat.S_ISLNK(status.st_mode) or (folder and status.st_mode & stat.S_ISVTX)
    if status.st_mode & (stat.S_IWOTH if _is_own_group(status) else WRITE_ACCESS) and not safe:
        mend = f"read what is in it, then chmod go-w {shlex.quote(str(path))}"
        return f"other users may write to {path} (mode {stat.S_IMODE(status.st_mode):o}); {mend}"
    return None
