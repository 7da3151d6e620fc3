"""The keys that work everywhere, with the ids by which users can change them. Screens and widgets add their own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from textual.binding import Binding, BindingType

from app.settings import SettingsError

KEYS = (
    Binding("f1", "help", "help", tooltip="The keys", id="app.help", priority=True),
    Binding("ctrl+n", "new_chat", "new", tooltip="Start a new chat", id="chat.new", priority=True),
    Binding("ctrl+b", "chats", "chats", tooltip="Find, open, rename or delete a chat", id="app.chats", priority=True),
    Binding("ctrl+r", "regenerate", "again", tooltip="Get another answer", id="chat.regenerate", priority=True),
    Binding("ctrl+e", "edit", "edit", tooltip="Edit the last prompt as a new branch", id="chat.edit", priority=True),
    Binding("ctrl+y", "copy_answer", "copy", tooltip="Copy the last answer", id="chat.copy", priority=True),
    Binding(
        "ctrl+g",
        "continue",
        "continue",
        tooltip="Continue an answer that ended early",
        id="chat.continue",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+o", "attach", "attach", tooltip="Attach a file or folder", id="chat.attach", priority=True, show=False
    ),
    Binding("escape", "stop", "stop", tooltip="Stop what is running; what was written stays", id="chat.stop"),
    Binding(
        "f2", "models", "models", tooltip="Choose, download, quantize or delete a model", id="app.models", priority=True
    ),
    Binding(
        "f3", "settings", "settings", tooltip="Budget, sampling, memory, appearance", id="app.settings", priority=True
    ),
    Binding(
        "f4", "device", "device", tooltip="The device, and how the model is tuned to it", id="app.device", priority=True
    ),
    Binding(
        "f5",
        "chat_settings",
        "this chat",
        tooltip="System prompt and sampling of this chat only",
        id="chat.settings",
        priority=True,
        show=False,
    ),
    Binding(
        "f6",
        "log",
        "log",
        tooltip="Messages of the runtime, and why it stopped",
        id="app.log",
        priority=True,
        show=False,
    ),
    Binding(
        "f7",
        "inspect",
        "tokens",
        tooltip="How likely each token of the last answer was",
        id="chat.tokens",
        priority=True,
        show=False,
    ),
    Binding(
        "f8",
        "presets",
        "presets",
        tooltip="Choose a system prompt for this chat",
        id="chat.presets",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+l",
        "tools",
        "tools",
        tooltip="Servers of tools, and what this chat may use",
        id="app.tools",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+t",
        "stop_work",
        "stop the work",
        tooltip="Stop loading, quantizing or tuning; the chat goes on",
        id="app.stop_work",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+z",
        "suspend_process",
        "pause",
        tooltip="Suspend to the shell; fg returns",
        id="app.suspend",
        priority=True,
        show=False,
    ),
    Binding("ctrl+p", "command_palette", "commands", tooltip="Everything the program can do", id="app.commands"),
    Binding("ctrl+q", "quit", "quit", tooltip="Quit the program", id="app.quit", priority=True, show=False),
    Binding("ctrl+c", "interrupt", "stop, or quit", tooltip="Stop, or quit", id="app.interrupt", show=False),
)
"""Bindings of the application. They have priority, so that a key typed right after one reaches the opened screen."""


def keymap_of(text: str, bindings: Iterable[BindingType]) -> dict[str, str]:
    """Parse the setting `keys`.

    Args:
        text: `chat.new=f9, app.help=ctrl+underscore`: ids of actions, each with a key as Textual names it.
        bindings: the bindings that can be changed.

    Returns:
        Keys by id.

    Raises:
        SettingsError: the text is malformed, an action is unknown, or two actions would share a key.
    """
    known = {one.id: one for one in bindings if isinstance(one, Binding) and one.id}
    found: dict[str, str] = {}
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        name, _, key = part.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+(\+[a-z0-9_]+)*", key):
            raise SettingsError(f"keys: {part!r} is invalid; write it like chat.new=f9, with a key such as ctrl+x")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
            raise SettingsError(f"keys: there is no action {name!r}: {hint}")
        found[name] = key
    everywhere: dict[str, str] = {}
    for name, one in known.items():
        if one.priority or name in found:
            for key in found.get(name, one.key).split(","):
                if (other := everywhere.setdefault(key, name)) != name:
                    raise SettingsError(f"keys: {key} is assigned twice: to {other} and {name}")
    return found


def current_key(binding: Binding, keymap: Mapping[str, str]) -> str:
    """The key of an action, taking the user's changes into account."""
    return keymap.get(binding.id or "", binding.key)
