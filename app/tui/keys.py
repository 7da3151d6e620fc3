"""The keys that work everywhere, with the ids by which they can be changed. A screen or widget adds its own."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

from textual.binding import Binding, BindingType

from app.settings import SettingsError

KEYS = (
    Binding("f1", "help", "help", tooltip="The keys", id="app.help", priority=True),
    Binding("ctrl+n", "new_chat", "new", tooltip="Begin a new chat", id="chat.new", priority=True),
    Binding("ctrl+b", "chats", "chats", tooltip="Find, open, rename or delete a chat", id="app.chats", priority=True),
    Binding("ctrl+r", "regenerate", "again", tooltip="Ask for another answer", id="chat.regenerate", priority=True),
    Binding(
        "ctrl+e", "edit", "edit", tooltip="Write another prompt beside the last one", id="chat.edit", priority=True
    ),
    Binding("ctrl+y", "copy_answer", "copy", tooltip="Copy the last answer", id="chat.copy", priority=True),
    Binding(
        "ctrl+g",
        "continue",
        "continue",
        tooltip="Go on with an answer that ended early",
        id="chat.continue",
        priority=True,
        show=False,
    ),
    Binding("ctrl+o", "attach", "attach", tooltip="Send a text file", id="chat.attach", priority=True, show=False),
    Binding("escape", "stop", "stop", tooltip="Stop what runs; what came of an answer stays", id="chat.stop"),
    Binding("f2", "models", "models", tooltip="Pick, make or delete a model", id="app.models", priority=True),
    Binding("f3", "settings", "settings", tooltip="Budget, sampling, memory, looks", id="app.settings", priority=True),
    Binding(
        "f4", "device", "device", tooltip="The device, and how the model is tuned to it", id="app.device", priority=True
    ),
    Binding(
        "f5",
        "chat_settings",
        "this chat",
        tooltip="System prompt and sampling of this chat alone",
        id="chat.settings",
        priority=True,
        show=False,
    ),
    Binding(
        "f6", "log", "log", tooltip="What the runtime wrote, and why it ended", id="app.log", priority=True, show=False
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
        tooltip="Choose a system prompt that has a name, for this chat",
        id="chat.presets",
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
        tooltip="Back to the shell; fg returns",
        id="app.suspend",
        priority=True,
        show=False,
    ),
    Binding("ctrl+p", "command_palette", "commands", tooltip="Everything the program can do", id="app.commands"),
    Binding("ctrl+q", "quit", "quit", tooltip="End the program", id="app.quit", priority=True, show=False),
    Binding("ctrl+c", "interrupt", "stop, or quit", tooltip="Stop, or quit", id="app.interrupt", show=False),
)
"""Bindings of the application. With priority, a key typed right after one of them reaches what it opened."""


def keymap_of(text: str, bindings: Iterable[BindingType]) -> dict[str, str]:
    """The keys that a person gave to actions in the setting `keys`.

    Args:
        text: `chat.new=f9, app.help=ctrl+underscore`: ids of actions, each with a key as Textual names it.
        bindings: what can be given another key.

    Returns:
        Keys by id.

    Raises:
        SettingsError: it can't be understood, names no action, or one key would do two things.
    """
    known = {one.id: one for one in bindings if isinstance(one, Binding) and one.id}
    found: dict[str, str] = {}
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        name, _, key = part.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+(\+[a-z0-9_]+)*", key):
            raise SettingsError(f"keys: {part!r} is not acceptable; allowed: chat.new=f9, with a key such as ctrl+x")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(known))}"
            raise SettingsError(f"keys: there is no action {name!r}: {hint}")
        found[name] = key
    everywhere: dict[str, str] = {}
    for name, one in known.items():
        if one.priority or name in found:
            for key in found.get(name, one.key).split(","):
                if (other := everywhere.setdefault(key, name)) != name:
                    raise SettingsError(f"keys: {key} would do two things: {other} and {name}")
    return found


def worn(binding: Binding, keymap: Mapping[str, str]) -> str:
    """The key of an action, which a person may have changed."""
    return keymap.get(binding.id or "", binding.key)
