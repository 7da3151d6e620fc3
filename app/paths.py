"""The places of the program's files.

Every function only returns a path; `private_folder` creates a folder. `LOWBIT_CHAT_HOME` moves everything into one
folder; otherwise each kind of file goes where the operating system's conventions put it.
"""

from __future__ import annotations

import os
from pathlib import Path

import platformdirs

from models.files import private_folder, replacing

APPLICATION = "lowbit-chat"
HOME_VARIABLE = "LOWBIT_CHAT_HOME"


def _moved_home() -> Path | None:
    text = os.environ.get(HOME_VARIABLE, "").strip()
    return Path(text).expanduser().absolute() if text else None


def home() -> Path:
    """Folder of all data that is neither a setting nor a cache."""
    return _moved_home() or Path(platformdirs.user_data_dir(APPLICATION, appauthor=False))


def store_root() -> Path:
    """Folder of the stored low-bit models."""
    return home() / "models"


def cache_dir() -> Path:
    """Folder of files that may be deleted at any time: compiled kernels, measurements, conversations' caches."""
    moved = _moved_home()
    return moved / "cache" if moved else Path(platformdirs.user_cache_dir(APPLICATION, appauthor=False))


def chats_dir() -> Path:
    """Folder of the caches of long conversations, which reveal their content."""
    return cache_dir() / "chats"


def links_dir() -> Path:
    """Folder of links to other programs' models whose own names say nothing."""
    return cache_dir() / "links"


def history_file() -> Path:
    """The chat history, a SQLite database."""
    return home() / "history.db"


def profiles_dir() -> Path:
    """Folder of tuning results and measurements, which take a while to repeat."""
    return home() / "profiles"


def settings_file() -> Path:
    """The settings file (TOML)."""
    moved = _moved_home()
    folder = moved if moved else Path(platformdirs.user_config_dir(APPLICATION, appauthor=False))
    return folder / "settings.toml"


def presets_file() -> Path:
    """The system prompt presets (TOML)."""
    return settings_file().with_name("presets.toml")


def prompts_dir() -> Path:
    """Folder of the user's reusable prompts."""
    return settings_file().with_name("prompts")


def log_file() -> Path:
    """The log file that receives the runtime process's output."""
    return home() / "runtime.log"


def write_atomically(file: Path, text: str) -> None:
    """Replace a file atomically and make its folder private. A crash leaves either the old file or the new one.

    Raises:
        OSError: it cannot be written; the old file is unchanged.
    """
    private_folder(file.parent)
    with replacing(file) as stream:
        stream.write(text.encode())
