"""Where the program keeps its files.

Every function only names a place; `private_folder` makes one. `LOWBIT_CHAT_HOME` moves everything into one folder;
without it, each kind of file goes where the operating system wants it.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import platformdirs

APPLICATION = "lowbit-chat"
HOME_VARIABLE = "LOWBIT_CHAT_HOME"


def _moved_home() -> Path | None:
    text = os.environ.get(HOME_VARIABLE, "").strip()
    return Path(text).expanduser().absolute() if text else None


def home() -> Path:
    """Folder of everything the program writes that is neither a setting nor a cache."""
    return _moved_home() or Path(platformdirs.user_data_dir(APPLICATION, appauthor=False))


def store_root() -> Path:
    """Folder of the stored low-bit models."""
    return home() / "models"


def cache_dir() -> Path:
    """Folder of what may be deleted at any time: compiled kernels, measurements, the caches of long conversations."""
    moved = _moved_home()
    return moved / "cache" if moved else Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False))


def chats_dir() -> Path:
    """Folder in which the runtime keeps the caches of long conversations; they hold what was said."""
    return cache_dir() / "chats"


def history_file() -> Path:
    """The chats that were had, a SQLite database."""
    return home() / "history.db"


def profiles_dir() -> Path:
    """Folder of what tuning found and measured; it is worth keeping, for measuring again takes a while."""
    return home() / "profiles"


def settings_file() -> Path:
    """The settings, a TOML file."""
    moved = _moved_home()
    folder = moved if moved else Path(platformdirs.user_config_dir(APPLICATION, appauthor=False))
    return folder / "settings.toml"


def presets_file() -> Path:
    """The system prompts that have a name, a TOML file."""
    return settings_file().with_name("presets.toml")


def log_file() -> Path:
    """The file to which the runtime process writes what it would print."""
    return home() / "runtime.log"


def private_folder(folder: Path) -> Path:
    """Make a folder, with the parents it lacks, that only its owner can enter (mode 0700).

    A folder that exists is left as it is.

    Returns:
        The folder.

    Raises:
        OSError: the folder cannot be made.
    """
    missing = [folder, *folder.parents]
    for path in reversed([path for path in missing if not path.exists()]):
        path.mkdir(mode=0o700, exist_ok=True)
    return folder


def write_whole(file: Path, text: str) -> None:
    """Replace a file in one step, so that a crash leaves the old one or the new one; its folder is made private.

    Raises:
        OSError: it cannot be written; the old one is as it was.
    """
    private_folder(file.parent)
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
