"""General dialogs: confirmations and forms."""

from __future__ import annotations

import asyncio
import math
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, TypeVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.events import Key, Paste
from textual.message import Message
from textual.screen import ModalScreen
from textual.suggester import Suggester
from textual.widgets import Button, Input, RadioSet, TextArea

from app.language import _, number
from app.paths import links_dir
from app.tui.plain import Plain
from app.tui.widgets.setting_row import Box, Choice
from models.catalogue import KNOWN, SHORT_NAMES, source_of
from models.elsewhere import PROGRAMS, by_name, found
from models.errors import CheckpointError
from models.recipe import GOOD_FOR, Recipe
from runtime.wire.requests import QuantizeRequest

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(:\w+)?")
CALM_S = 0.7
"""Pause in seconds after which a key may be an answer to a dialog that opened by itself."""
ALONE_S = 0.3
"""Seconds in which no other key may follow such an answer."""
V = TypeVar("V")
KEEP = _("Keep")
C = TypeVar("C")

BITS: Mapping[float | None, str] = {
    None: _("its own, if it is low-bit already; else 4"),
    4.0: _("nearly as good as the original"),
    3.5: _("half of the blocks at 3 bits"),
    3.0: _("smallest, lower quality"),
}
"""The choices of bits per weight, each with a description; None: those of the file, if `run` keeps them."""


class CheckpointSuggester(Suggester):
    """Completes the path of a checkpoint: folders and GGUF files, those of other programs by their names."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        """The first folder or GGUF file that starts with the text."""
        program, colon, _rest = value.partition(":")
        if colon and program in PROGRAMS:
            names = [one.name for one in await asyncio.to_thread(found, [program])]
            return next((name for name in names if name.startswith(value)), None)
        head, slash, tail = value.rpartition("/")
        if not slash:
            return None
        try:
            names = choices_in(head + slash)
        except (OSError, RuntimeError):
            return None
        wanted = [name for name in names if name.startswith(tail) and (tail or not name.startswith("."))]
        return f"{head}{slash}{wanted[0]}" if wanted else None


def choices_in(text: str) -> list[str]:
    """Names of the folders and GGUF files in a folder.

    Raises:
        OSError: it cannot be read.
        RuntimeError: `~user` names an unknown user.
    """
    entries = Path(text).expanduser().iterdir()
    return sorted(entry.name for entry in entries if entry.is_dir() or entry.suffix == ".gguf")


def on_hub(name: str) -> bool:
    """Whether a text is a short name, or one on the Hugging Face hub, and not a path on this machine."""
    if name.lower() in SHORT_NAMES:
        return True
    path = Path(name)
    written_as_path = name.startswith((".", "/", "~")) or name.endswith(".gguf") or path.exists()
    return bool(_HUB_NAME.fullmatch(name)) and not written_as_path


def _local(name: str) -> Path:
    """A path, or another program's file by its name.

    Raises:
        CheckpointError: the program has no such file.
    """
    return by_name(name, links_dir()) or Path(name).expanduser()


def checkpoint_problem(text: str) -> str | None:
    """Why a path holds no checkpoint, by a quick check; None if it may hold one."""
    name = text.strip()
    if not name:
        return _("Enter a folder, a GGUF file, or a checkpoint on the hub as owner/name.")
    if on_hub(name):
        return None
    try:
        path = _local(name)
        if path.is_file():
            with path.open("rb") as file:
                return None if file.read(4) == b"GGUF" else _("{path} is not a GGUF file.", path=path)
        if not path.is_dir():
            return _("No folder or file {path} exists.", path=path)
        if not (path / "config.json").is_file():
            files = sorted(file.name for file in path.glob("*.gguf"))
            if files:
                return _(
                    "{path} contains GGUF files ({names}); choose one of them.", path=path, names=", ".join(files[:3])
                )
            return _("{path} contains no config.json, so it is not a Hugging Face checkpoint.", path=path)
    except CheckpointError as error:
        return str(error)
    except (OSError, RuntimeError, ValueError) as error:
        return _("It can't be read: {error}", error=error)
    return None


class UnaskedDialog(ModalScreen[V]):
    """A dialog that opens by itself, perhaps while the user is typing.

    No answer has the focus at first. A key counts only if it follows a pause and no other key follows it. What belongs
    to typing goes on to the widget below. Escape always counts: it is the answer that permits nothing.
    """

    AUTO_FOCUS = ""
    letters: Mapping[str, str] = MappingProxyType({})
    """The answers by their keys."""
    _shown = math.inf
    _typed = -math.inf
    _pending: tuple[str, asyncio.TimerHandle] | None = None

    @abstractmethod
    def action_answer(self, answer: str) -> None:
        """Answer."""

    def on_mount(self) -> None:
        """Begin to wait for a pause once the user can see the dialog."""
        self.call_after_refresh(self._begin)

    def _begin(self) -> None:
        self._shown = Message().time

    def on_key(self, event: Key) -> None:
        """Tell an answer from typing."""
        if event.key == "escape":
            return
        calm = event.time - max(self._shown, self._typed) >= CALM_S
        if self._pending is not None:  # not alone, then
            letter, timer = self._pending
            timer.cancel()
            self._pending, calm = None, False
            self._pass_on(letter)
        if calm and not event.is_printable and event.key != "backspace":
            return
        event.prevent_default().stop()
        self._typed = event.time
        letter = event.character if event.is_printable and event.character else event.key
        if calm and letter in self.letters:
            # Not Textual's timer: on a busy machine that skips a tick for which it is late, and this is its only one.
            answer = partial(self.action_answer, self.letters[letter])
            self._pending = letter, asyncio.get_running_loop().call_later(ALONE_S, self.call_next, answer)
        else:
            self._pass_on(letter)

    def on_paste(self, event: Paste) -> None:
        """Pass a paste on."""
        event.stop()
        if (below := self.app.screen_stack[-2].focused) is not None:
            below.post_message(Paste(event.text))

    def _pass_on(self, typed: str) -> None:
        """Give a typed character, or a backspace, to the widget below."""
        below = self.app.screen_stack[-2].focused
        if isinstance(below, TextArea | Input) and typed == "backspace":
            below.action_delete_left()
        elif isinstance(below, TextArea) and len(typed) == 1:
            below.replace(typed, *below.selection)
        elif isinstance(below, Input) and len(typed) == 1:
            below.insert_text_at_cursor(typed)


class ConfirmDialog(ModalScreen[bool]):
    """A yes-or-no question."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,n", "answer(False)", _("no"), id="dialog.no"),
        Binding("y", "answer(True)", _("yes"), id="dialog.yes"),
    ]

    def __init__(self, question: str, verb: str, keep: str = KEEP) -> None:
        super().__init__()
        self._question = question
        self._verb, self._keep = verb, keep

    def compose(self) -> ComposeResult:
        """The question and two buttons, the safe one first."""
        with Vertical(classes="dialog"):
            yield Plain(self._question)
            with Horizontal(classes="dialog-buttons"):
                yield Button(self._keep, id="no", compact=True)
                yield Button(self._verb, id="yes", variant="error", compact=True)

    @on(Button.Pressed)
    def decide(self, event: Button.Pressed) -> None:
        """Answer with a button."""
        self.dismiss(event.button.id == "yes")

    def action_answer(self, answer: bool) -> None:
        """Answer with a key."""
        self.dismiss(answer)


class FormDialog(ModalScreen[V | None]):
    """A form with a button `yes` that accepts it and another that cancels, as Escape does."""

    AUTO_FOCUS = "Input"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "cancel", _("cancel"), id="dialog.cancel")]

    @abstractmethod
    def submit(self) -> None:
        """Return the values if they are valid."""

    @on(Button.Pressed)
    def decide(self, event: Button.Pressed) -> None:
        """Accept or cancel with a button."""
        if event.button.id == "yes":
            self.submit()
        else:
            self.dismiss(None)

    def action_cancel(self) -> None:
        """Cancel."""
        self.dismiss(None)


class TitleDialog(FormDialog[str]):
    """Asks for a chat's title."""

    def __init__(self, title: str) -> None:
        super().__init__()
        self._before = title

    def compose(self) -> ComposeResult:
        """An input line and buttons."""
        with Vertical(classes="dialog"):
            yield Plain(_("Chat title"))
            yield Input(self._before, compact=True)
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Rename"), id="yes", variant="primary", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Accept the title unless it is empty."""
        title = self.query_one(Input).value
        self.dismiss(title if title.strip() else None)


class QuantizeDialog(FormDialog[QuantizeRequest]):
    """Asks which checkpoint to quantize, to how many bits, by which method, and whether to smooth keys."""

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self._source = source

    def compose(self) -> ComposeResult:
        """Checkpoint, bits, method, key smoothing, buttons."""
        with Vertical(classes="dialog"):
            yield Plain(_("A name on the Hugging Face hub, a folder with a checkpoint, or a GGUF file"))
            hint = _("owner/name, /path/to/model or file.gguf; ollama:, lmstudio: or hub: finds others' files")
            yield Input(self._source, placeholder=hint, suggester=CheckpointSuggester(), compact=True)
            yield Plain("", classes="dialog-problem")
            yield Plain(_("Bits per weight"))
            with RadioSet(compact=True, id="quantize-bits"):
                for bits, words in BITS.items():
                    yield Choice(words if bits is None else f"{number(bits, 'g')} · {words}", value=bits is None)
            yield Plain(_("Method"))
            with RadioSet(compact=True, id="quantize-method"):
                for method, words in GOOD_FOR.items():
                    yield Choice(f"{_(words)} ({method})", value=method == "auto")
            yield Box(_("smooth keys, for a KV cache of 4 bits or fewer"), compact=True, id="quantize-smooth")
            with Horizontal(classes="dialog-buttons"):
                yield Button(_("Quantize"), id="yes", variant="primary", compact=True)
                yield Button(_("Cancel"), id="no", compact=True)

    @on(Input.Submitted)
    def submit(self) -> None:
        """Start if the source looks like a checkpoint."""
        text = self.query_one(Input).value
        if (problem := checkpoint_problem(text)) is not None:
            line = self.query_one(".dialog-problem", Plain)
            line.update(problem)
            line.display = True
            return
        name = text.strip()
        source = source_of(name) if on_hub(name) else str(_local(name).absolute())
        bits, method = self._chosen("#quantize-bits", tuple(BITS)), self._chosen("#quantize-method", tuple(GOOD_FOR))
        smooth = self.query_one(Box).value
        keep = bits is None and method == "auto" and not smooth and source not in KNOWN
        bits = Recipe().bits if bits is None else bits
        self.dismiss(QuantizeRequest(source=source, bits=bits, keep=keep, method=method, smooth_attention=smooth))

    def _chosen(self, radios: str, values: Sequence[C]) -> C:
        """The value of the selected button; one always is."""
        return values[max(0, self.query_one(radios, RadioSet).pressed_index)]
