"""The keys that work everywhere, with the ids by which users can change them, and the order in which keys act.

Screens and widgets add keys of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from textual import on
from textual.app import App, ScreenStackError
from textual.binding import Binding, BindingType
from textual.events import Event, Key, Paste
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, TextArea

from app.errors import hint
from app.language import _
from app.settings import SettingsError

BURST_S = 0.01
"""Keys that arrive closer together than this come from a paste, or were typed while the program was busy."""
ENTER_S = 0.03
"""Seconds that Enter waits to see whether more of a paste follows."""
ROUNDS = 3
"""A key's action posts messages, whose handlers post others: so many generations act before the next key."""
GONE_S = 0.05
"""Seconds after which to check whether the widget that has the key still exists."""

KEYS = (
    Binding("f1", "help", _("help"), tooltip=_("The keys"), id="app.help", priority=True),
    Binding("ctrl+p", "command_palette", _("commands"), tooltip=_("Everything the program can do"), id="app.commands"),
    Binding("ctrl+n", "new_chat", _("new"), tooltip=_("Start a new chat"), id="chat.new", priority=True),
    Binding(
        "ctrl+b", "chats", _("chats"), tooltip=_("Find, open, rename or delete a chat"), id="app.chats", priority=True
    ),
    Binding("ctrl+r", "regenerate", _("again"), tooltip=_("Get another answer"), id="chat.regenerate", priority=True),
    Binding(
        "ctrl+e", "edit", _("edit"), tooltip=_("Edit the last prompt as a new branch"), id="chat.edit", priority=True
    ),
    Binding("ctrl+y", "copy_answer", _("copy"), tooltip=_("Copy the last answer"), id="chat.copy", priority=True),
    Binding(
        "ctrl+g",
        "continue",
        _("continue"),
        tooltip=_("Continue an answer that ended early"),
        id="chat.continue",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+o",
        "attach",
        _("attach"),
        tooltip=_("Attach a file or folder"),
        id="chat.attach",
        priority=True,
        show=False,
    ),
    Binding("escape", "stop", _("stop"), tooltip=_("Stop what is running; what was written stays"), id="chat.stop"),
    Binding(
        "f2",
        "models",
        _("models"),
        tooltip=_("Choose, download, quantize or delete a model"),
        id="app.models",
        priority=True,
    ),
    Binding(
        "f3",
        "settings",
        _("settings"),
        tooltip=_("Budget, sampling, memory, appearance"),
        id="app.settings",
        priority=True,
    ),
    Binding(
        "f4",
        "device",
        _("device"),
        tooltip=_("The device, and how the model is tuned to it"),
        id="app.device",
        priority=True,
    ),
    Binding(
        "f5",
        "chat_settings",
        _("this chat"),
        tooltip=_("System prompt and sampling of this chat only"),
        id="chat.settings",
        priority=True,
        show=False,
    ),
    Binding(
        "f6",
        "log",
        _("log"),
        tooltip=_("Messages of the runtime, and why it stopped"),
        id="app.log",
        priority=True,
        show=False,
    ),
    Binding(
        "f7",
        "inspect",
        _("tokens"),
        tooltip=_("How likely each token of the last answer was"),
        id="chat.tokens",
        priority=True,
        show=False,
    ),
    Binding(
        "f8",
        "presets",
        _("presets"),
        tooltip=_("Choose a system prompt for this chat"),
        id="chat.presets",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+l",
        "tools",
        _("tools"),
        tooltip=_("Tool servers, and which tools this chat may use"),
        id="app.tools",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+t",
        "stop_work",
        _("stop the work"),
        tooltip=_("Stop loading, quantizing or tuning; the chat goes on"),
        id="app.stop_work",
        priority=True,
        show=False,
    ),
    Binding(
        "ctrl+z",
        "suspend_process",
        _("pause"),
        tooltip=_("Suspend to the shell; fg returns"),
        id="app.suspend",
        priority=True,
        show=False,
    ),
    Binding("ctrl+q", "quit", _("quit"), tooltip=_("Quit the program"), id="app.quit", priority=True, show=False),
    Binding(
        "ctrl+c",
        "interrupt",
        _("stop, clear, or quit"),
        tooltip=_("Stop the answer, clear the draft, or quit"),
        id="app.interrupt",
        show=False,
    ),
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
        name, _sign, key = part.partition("=")
        if not re.fullmatch(r"[a-z0-9_]+(\+[a-z0-9_]+)*", key):
            raise SettingsError(
                _("keys: {part!r} is invalid; write it like chat.new=f9, with a key such as ctrl+x", part=part)
            )
        if name not in known:
            near = hint(name, known, _("known: {names}", names=", ".join(sorted(known))))
            raise SettingsError(_("keys: there is no action {name!r}: {near}", name=name, near=near))
        found[name] = key
    everywhere: dict[str, str] = {}
    for name, one in known.items():
        if one.priority or name in found:
            for key in found.get(name, one.key).split(","):
                if (other := everywhere.setdefault(key, name)) != name:
                    raise SettingsError(
                        _("keys: {key} is assigned twice: to {other} and {name}", key=key, other=other, name=name)
                    )
    return found


def current_key(binding: Binding, keymap: Mapping[str, str]) -> str:
    """The key of an action, taking the user's changes into account."""
    return keymap.get(binding.id or "", binding.key)


VIM_MOVES = {"h": "left", "j": "down", "k": "up", "l": "right", "g": "home", "G": "end"}
"""Keys that move as in vim, and those that they stand for."""
_BREAKS = {"enter": "\r", "ctrl+j": "\n", "tab": "\t"}
"""Keys that stand for a character of a text."""


@dataclass
class Passed(Message):
    """Follows a key from widget to widget. Where it arrives, the key and what it set off have been handled."""

    arrived: asyncio.Event


class OrderedKeys(App[None]):
    """An application in which a key acts only when the one before has.

    Textual passes a key from the focused widget up to the application, which runs its binding, but a widget inserts a
    character at once. Without this, text typed after Ctrl+U is inserted before it, and so deleted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._keys: deque[Key | Paste] = deque()
        self._key_came = asyncio.Event()
        self._last_key_s = 0.0
        self._typed = False
        self._acting = False
        self.moves: Mapping[str, str] = {}
        """Keys that stand for others where nothing is typed: `VIM_MOVES`, or none."""

    async def on_event(self, event: Event) -> None:
        """Queue keys and pastes."""
        if not isinstance(event, Key | Paste) or event.is_forwarded:
            await super().on_event(event)
            return
        self._keys.append(event)
        self._key_came.set()
        if not self._acting:
            self._acting = True
            self.run_worker(self._act(), group="keys")

    async def _act(self) -> None:
        """Let the queued keys act, one after the other."""
        with contextlib.suppress(ScreenStackError):  # the program is ending
            while self._keys:
                await self._act_on(self._keys.popleft())
        self._acting = False

    async def _act_on(self, event: Key | Paste) -> None:
        while not self.screen.is_mounted:  # noqa: ASYNC110  Textual tells nobody when it is
            await asyncio.sleep(GONE_S / 10)
        self.app_focus = True
        if self.focused is None and self.screen.AUTO_FOCUS != "":  # of which nothing is to be focused unasked
            self.screen.focus_next(self.screen.AUTO_FOCUS or "*")
        field = self.focused if isinstance(self.focused, Input | TextArea) else None
        if isinstance(event, Key) and event.key in self.moves and self._moves_in(self.focused):
            event = Key(self.moves[event.key], None)
        if isinstance(event, Key):
            event = await self._pasted(event, field)
        if isinstance(event, Paste):
            event.text = pasted_text(event.text, one_line=isinstance(field, Input))
        await super().on_event(event)
        if field is None or not (isinstance(event, Paste) or event.is_printable):
            await self._handled(self.focused or self.screen)

    @staticmethod
    def _moves_in(focused: Widget | None) -> bool:
        """Whether letters are not typed there. Where nothing has the focus, a dialog has come up beneath who types."""
        return focused is not None and not (
            isinstance(focused, Input) or (isinstance(focused, TextArea) and not focused.read_only)
        )

    async def _handled(self, target: Widget) -> None:
        """Wait until a key that was sent to a widget has been handled by it or by those above it."""
        for _round in range(ROUNDS):
            passed = Passed(asyncio.Event())
            target = target if self._is_there(target) else self.focused or self.screen
            if not target.post_message(passed):
                return
            while self._is_there(target) and not passed.arrived.is_set():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(passed.arrived.wait(), GONE_S)

    def _is_there(self, target: Widget) -> bool:
        """Whether messages still reach a widget; a screen that was removed before it had its parts stays attached."""
        return target.is_attached and target.screen in self.screen_stack

    @on(Passed)
    def key_passed(self, event: Passed) -> None:
        """Go on to the next key."""
        event.arrived.set()

    async def _pasted(self, key: Key, field: Widget | None) -> Key | Paste:
        """The paste that an Enter belongs to if the terminal does not mark pastes: text follows the line break at once.

        Text with other keys in between was typed.
        """
        self._typed = not _is_text(key) or (self._typed and key.time - self._last_key_s < BURST_S)
        self._last_key_s = key.time
        if key.key != "enter" or self._typed or not isinstance(field, TextArea):
            return key
        keys = [key]
        while (following := await self._following(keys[-1])) is not None and _is_text(following):
            keys.append(following)
            self._keys.popleft()
        if following is not None or len(keys) == 1:
            self._keys.extendleft(reversed(keys[1:]))
            self._typed = True
            return key
        self._last_key_s = keys[-1].time
        return Paste("".join(_BREAKS.get(one.key, one.character or "") for one in keys))

    async def _following(self, key: Key) -> Key | None:
        """The next key of the same burst, which stays in the queue."""
        self._key_came.clear()
        if not self._keys:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._key_came.wait(), ENTER_S)
        found = self._keys[0] if self._keys else None
        return found if isinstance(found, Key) and found.time - key.time < BURST_S else None


def _is_text(key: Key) -> bool:
    return key.is_printable or key.key in _BREAKS


def pasted_text(text: str, *, one_line: bool = False) -> str:
    """A pasted text. Terminals send CR, CRLF or LF for a line break; a field of one line gets spaces instead."""
    return " ".join(text.splitlines()) if one_line else re.sub("\r\n?", "\n", text)
