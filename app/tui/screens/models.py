"""The models screen (F2): choose, download, quantize or delete a model."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen

from app.amounts import byte_count, perplexity
from app.errors import ClientError
from app.language import _
from app.printable import printable_name
from app.prospects import READABLE, RECOMMENDED, question, recommended, room, size_at, words
from app.tui.figures import SEPARATOR, token_count
from app.tui.machine import found_words
from app.tui.messages import LoadAsked, QuantizeAsked, RemoveAsked
from app.tui.plain import Plain
from app.tui.screens.dialogs import ConfirmDialog, QuantizeDialog
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.key_line import KeyLine
from app.tui.widgets.plain_table import PlainTable
from app.tui.widgets.progress_panel import ProgressPanel
from models.catalogue import KNOWN
from models.recipe import GOOD_FOR, SMALLEST_BITS, Recipe
from runtime.wire.answers import CONTINUES

if TYPE_CHECKING:
    from runtime.wire.answers import ModelEntry
    from runtime.wire.device import Prospect
    from runtime.wire.requests import QuantizeRequest

EMPTY = _("There are no models yet. A adds one: a name on the hub, a folder or a GGUF file.")
ROOMY = 116
"""Minimum width in cells at which every figure has its own column."""
_WORDS = {"yes": _("fits"), "tight": _("tight"), "no": _("too large")}
YOURS, TO_GET = _("yours"), _("to get")
"""The headings of the two groups, which are rows of their own."""
_ABOUT = {
    YOURS: _("Models on this machine. A adds one: a file, a folder, what another program has, or a name on the hub."),
    TO_GET: _("Models that can be downloaded, the recommended one first, others by size. A gets any other on the hub."),
}


class ModelTable(PlainTable):
    """The table of models."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", _("load"), tooltip=_("Load the model and chat with it"), id="models.load"),
    ]


class ModelsScreen(Screen[None]):
    """A table of the stored models, followed by those that can be downloaded."""

    AUTO_FOCUS = "ModelTable"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "a,q", "quantize", _("add"), tooltip=_("Add a file, a folder, or a name on the hub"), id="models.quantize"
        ),
        Binding("d,delete", "delete", _("delete"), tooltip=_("Delete the stored model"), id="models.delete"),
        Binding("s", "app.stop_work", _("stop"), tooltip=_("Stop loading or quantizing"), id="models.stop", show=False),
        Binding("escape", "dismiss", _("back"), tooltip=_("Back to the chat"), id="models.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._models: Sequence[ModelEntry] = ()
        self._fetchable: Sequence[Prospect] = ()
        self._best: Prospect | None = None
        self._seen: tuple[object, ...] = ()
        self._filled = False

    def compose(self) -> ComposeResult:
        """Header, detected machine, table, note on the selected model, progress, keys."""
        yield HeaderBar()
        yield Plain("", id="models-found")
        yield ModelTable(cursor_type="row")
        yield Plain("", id="models-note")
        yield ProgressPanel()
        yield KeyLine()

    def on_mount(self) -> None:
        """Fill the table."""
        self.show_session()

    def show_session(self) -> None:
        """Update header and progress, and the table when a model was added, deleted or loaded."""
        if not self.query(ProgressPanel):
            return
        session = self._session
        self.query_one(HeaderBar).show(session)
        self.query_one(ProgressPanel).show(session.job)
        seen = (session.ready, session.status.model if session.status else None, session.working)
        if seen != self._seen:
            self._seen = seen
            self.refill()

    def refill(self) -> None:
        """Ask for the models again."""
        self.run_worker(self._refill(), group="models", exclusive=True, exit_on_error=False)

    async def _refill(self) -> None:
        try:
            self._models, note = await self._session.client().models(), ""
            note = "" if self._models else EMPTY
        except (ClientError, OSError) as error:
            self._models, note = (), str(error)
        if note or self._filled or not self._session.newcomer:
            self._fill(note)
        if not note:
            await self._look()
        self._fill(note)

    async def _look(self) -> None:
        """Add the models that can be downloaded."""
        try:
            report, found = await self._session.client().device(), await self._session.client().prospects()
        except (ClientError, OSError):
            return
        line = self.query_one("#models-found", Plain)
        line.update(found_words(report))
        line.display = True
        here = {model.name for model in self._models}
        self._fetchable = [one for one in found if not any(_made_of(one, name) for name in here)]

    def _fill(self, note: str) -> None:
        """Fill the table. Newcomers begin on the recommended model; what is found later does not move the cursor."""
        rows: dict[str, Sequence[str | Text]] = {}
        if self._models:
            rows[YOURS] = ["", Text(YOURS, "bold")]
            rows |= {model.name: self._cells(model) for model in self._models}
        self._best = best = recommended(self._fetchable)
        if self._fetchable:
            rows[TO_GET] = ["", Text(TO_GET, "bold")]
            for one in sorted(self._fetchable, key=lambda one: one is not best):
                rows[f"↓{one.source}"] = self._cells_to_fetch(one)
        table, columns = self.query_one(ModelTable), self._columns()
        table.fill(rows, columns, shrinks=1)
        if not self._filled and rows:
            loaded = next((model.name for model in self._models if model.loaded), YOURS)
            table.move_cursor(row=list(rows).index(f"↓{best.source}" if self._session.newcomer and best else loaded))
        self._filled = self._filled or bool(rows)
        if note:
            self._note(note, warning=True)
        else:
            self.tell_about()

    def _columns(self) -> list[str]:
        if self.has_class("-slim"):
            return ["", _("model"), _("size"), ""]
        if self.size.width < ROOMY:
            return ["", _("model"), _("memory"), _("disk"), _("quality, speed"), ""]
        figures = [_("at 3 · 3.5 · 4 bits"), _("residuals"), _("context"), _("tokens/s"), _("perplexity"), _("disk")]
        return ["", _("model"), *figures, ""]

    def _cells(self, model: ModelEntry) -> list[str]:
        size = _("{size} at {bits:g}", size=byte_count(model.gpu_bytes), bits=model.bits)
        cells = ["●" if model.loaded else " ", printable_name(model.name), size]
        note = _("bundled") if model.bundled else _("see below") if model.warning else _("base") if model.base else ""
        loss = perplexity(model.perplexity_before, model.perplexity_after)
        if self.has_class("-slim"):
            return [*cells, note]
        if self.size.width < ROOMY:
            return [*cells, byte_count(model.disk_bytes), loss or "–", note]
        speed = self._session.recent.last_speed if model.loaded else None
        more = [byte_count(model.residual_bytes), token_count(model.context), "" if speed is None else f"{speed:.0f}"]
        return [*cells, *more, loss or "–", byte_count(model.disk_bytes), note]

    def _cells_to_fetch(self, one: Prospect) -> list[str]:
        slow = one.fits == "yes" and one.tokens_per_s is not None and one.tokens_per_s < READABLE
        fits = _("best here") if one is self._best else _("slow") if slow else _WORDS[one.fits]
        speed = "" if one.tokens_per_s is None else f"≈ {one.tokens_per_s:.0f}"
        cells = ["↓", one.title]
        if self.has_class("-slim"):
            return [*cells, byte_count(one.sizes[-1]), fits]
        if self.size.width < ROOMY:
            bits = one.bits or SMALLEST_BITS
            held = _("{size} at {bits:g}", size=byte_count(size_at(one, bits)), bits=bits)
            return [
                *cells,
                held,
                f"↓ {byte_count(one.download_bytes)}",
                _("{speed} tokens/s", speed=speed) if speed else "",
                fits,
            ]
        more = [byte_count(one.residual_bytes), token_count(one.max_context), speed]
        return [*cells, _sizes(one.sizes), *more, "", f"↓ {byte_count(one.download_bytes)}", fits]

    def _chosen(self) -> ModelEntry | None:
        under = self.query_one(ModelTable).under
        return next((model for model in self._models if model.name == under), None)

    def _chosen_to_fetch(self) -> Prospect | None:
        under = self.query_one(ModelTable).under
        return next((one for one in self._fetchable if f"↓{one.source}" == under), None)

    def _about(self, model: ModelEntry | None) -> str:
        if model is None:
            return ""
        words = next((_(words) for method, words in GOOD_FOR.items() if method == model.method), "")
        made = f"{re.split('[,，]', words)[0]} ({model.method})"
        if model.smooth_attention:
            made = _("{made}, smoothed keys", made=made)
        loss = perplexity(model.perplexity_before, model.perplexity_after)
        parts = [
            printable_name(model.name),
            made,
            _(CONTINUES) if model.base else "",
            _("perplexity {loss}", loss=loss) if loss and self.has_class("-slim") else "",
            model.warning or "",
            *(model.certificate or "").splitlines(),
        ]
        return SEPARATOR.join(part for part in parts if part)

    def _note(self, text: str, *, warning: bool = False) -> None:
        note = self.query_one("#models-note", Plain)
        note.update(text)
        note.set_class(warning, "-warning")
        note.display = bool(text)

    def on_resize(self) -> None:
        """Show the columns that fit."""
        self.call_after_refresh(self.refill)

    @on(PlainTable.RowHighlighted)
    def tell_about(self) -> None:
        """Show the details of the model under the cursor."""
        if (one := self._chosen_to_fetch()) is not None:
            why = f"{RECOMMENDED} " if one is self._best else ""
            parts = [why + words(one)]
            if one.bits is not None:
                parts.append(_("Enter downloads it at {bits:g} bits, A with other options", bits=one.bits))
            self._note(SEPARATOR.join(parts), warning=one.bits is None)
        elif (about := _ABOUT.get(self.query_one(ModelTable).under or "")) is not None:
            self._note(about)
        elif self._models:
            model = self._chosen()
            self._note(self._about(model), warning=model is not None and bool(model.warning))

    @on(PlainTable.RowSelected)
    def load(self) -> None:
        """Load the model under the cursor, after a question if it is to be downloaded, and go back to the chat."""
        if (model := self._chosen()) is not None:
            self.app.post_message(LoadAsked(model.name))
            self.dismiss()
        elif (one := self._chosen_to_fetch()) is not None:
            if one.bits is None:
                self.notify(f"{one.title} {room(one)}.", severity="warning")
                return
            self._make(_usual_request(one.source, one.bits), self.dismiss)
        else:
            self.action_quantize()  # a heading

    def _make(self, request: QuantizeRequest, then: Callable[[], object] = lambda: None) -> None:
        """Make a model. What costs gigabytes is asked first."""

        def decided(confirmed: bool | None) -> None:
            if confirmed:
                self.app.post_message(QuantizeAsked(request))
                then()

        asked = question(request.source, request.bits, self._fetchable)
        if asked is None:
            decided(confirmed=True)
        else:
            verb = _("Quantize") if Path(request.source).exists() else _("Download")
            self.app.push_screen(ConfirmDialog(asked, verb, _("Cancel")), decided)

    def action_quantize(self) -> None:
        """Ask for a checkpoint and quantize it."""

        def begin(request: QuantizeRequest | None) -> None:
            if request is not None:
                self._make(request)

        one = self._chosen_to_fetch()
        self.app.push_screen(QuantizeDialog("" if one is None else one.source), begin)

    def action_delete(self) -> None:
        """Delete the model under the cursor after a confirmation."""
        model = self._chosen()
        if model is None:
            return
        if model.bundled:
            self.notify(_("The bundled model is part of the program and can't be deleted."), severity="warning")
            return

        def delete(confirmed: bool | None) -> None:
            if confirmed:
                self._seen = ()
                self.app.post_message(RemoveAsked(model.name))

        asked = _(
            "Delete {name} ({size})? Caches of chats with it are deleted too; the checkpoint it was made from stays.",
            name=model.name,
            size=byte_count(model.disk_bytes),
        )
        self.app.push_screen(ConfirmDialog(asked, _("Delete")), delete)

    async def action_dismiss(self, result: None = None) -> None:
        """Back to the chat."""
        self.dismiss(result)


def _usual_request(source: str, bits: float) -> QuantizeRequest:
    """The default request for a checkpoint. A model with a short name keeps it at its default bits."""
    from runtime.wire.requests import QuantizeRequest

    named = source in KNOWN and bits == Recipe().bits
    return QuantizeRequest(source=source, name=source if named else None, bits=bits)


def _made_of(one: Prospect, name: str) -> bool:
    """Whether a stored model was made from it, judging by its name."""
    source = one.source
    return name == source or name.startswith(f"{source}-")


def _sizes(sizes: Sequence[int]) -> str:
    """Sizes in a common unit: `767 · 855 · 943 MB`."""
    words = [byte_count(size).split(" ") for size in sizes]
    if len({unit for _, unit in words}) > 1:
        return SEPARATOR.join(" ".join(pair) for pair in words)
    return f"{SEPARATOR.join(number for number, _ in words)} {words[0][1]}"
