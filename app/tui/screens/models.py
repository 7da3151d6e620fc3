"""The models (F2): pick, make or delete one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Static

from app.amounts import byte_count
from app.errors import ClientError
from app.tui.messages import LoadAsked, QuantizeAsked, RemoveAsked
from app.tui.printable import printable
from app.tui.screens.dialogs import ConfirmDialog, QuantizeDialog
from app.tui.session import Session
from app.tui.widgets.header import HeaderBar
from app.tui.widgets.progress_panel import ProgressPanel
from models.catalogue import KNOWN, KnownModel
from models.recipe import Recipe

if TYPE_CHECKING:
    from models.recipe import Method
    from runtime.wire.answers import ModelEntry
    from runtime.wire.requests import QuantizeRequest

EMPTY = "There are no models yet. Q makes one of a checkpoint: a name on the hub, a folder or a GGUF file."


class ModelTable(DataTable[str]):
    """The table, whose Enter says what it does."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "load", tooltip="Load the model and chat with it", id="models.load"),
    ]


class ModelsScreen(Screen[None]):
    """A table of the stored models, those that can be fetched below them, and what can be done with them."""

    AUTO_FOCUS = "ModelTable"
    HORIZONTAL_BREAKPOINTS = [(0, "-slim"), (60, "-narrow"), (90, "-wide")]  # noqa: RUF012  declared so by Textual
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quantize", "quantize", tooltip="Make a low-bit model of a checkpoint", id="models.quantize"),
        Binding("d,delete", "delete", "delete", tooltip="Delete the stored model", id="models.delete"),
        Binding("s", "app.stop_work", "stop", tooltip="Stop loading or quantizing", id="models.stop", show=False),
        Binding("escape", "dismiss", "back", tooltip="Back to the chat", id="models.back"),
    ]

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._models: Sequence[ModelEntry] = ()
        self._fetchable: Sequence[KnownModel] = ()
        self._seen: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """Header, table, what is said about the chosen one, progress, keys."""
        yield HeaderBar()
        yield ModelTable(cursor_type="row")
        yield Static("", markup=False, id="models-note")
        yield ProgressPanel()
        yield Footer(compact=True, show_command_palette=False)

    def on_mount(self) -> None:
        """Fill the table."""
        self.show_session()

    def show_session(self) -> None:
        """Bring header and progress up to date, and the table when a model came, went or was loaded."""
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
            self._models = await self._session.models()
            here = {model.name for model in self._models}
            self._fetchable = [known for known in KNOWN.values() if known.name not in here]
            note = "" if self._models else EMPTY
        except (ClientError, OSError) as error:
            self._models, self._fetchable, note = (), (), str(error)
        table = self.query_one(ModelTable)
        row = table.cursor_row
        table.clear(columns=True)
        table.add_columns(*self._columns())
        for model in self._models:
            table.add_row(*self._cells(model), key=model.name)
        for known in self._fetchable:
            more = [] if self.has_class("-slim") else ["", byte_count(known.bytes), "", "to fetch"]
            table.add_row("↓", known.name, "", "", *more, key=known.name)
        table.move_cursor(row=min(row, max(0, table.row_count - 1)))
        if note:
            self._note(note, warning=True)
        else:
            self.tell_about()

    def _columns(self) -> list[str]:
        if self.has_class("-slim"):
            return ["", "model", "bits", "size"]
        return ["", "model", "bits", "size", "residuals", "disk", "perplexity", ""]

    def _cells(self, model: ModelEntry) -> list[str]:
        cells = ["●" if model.loaded else " ", printable(model.name), f"{model.bits:g}", byte_count(model.gpu_bytes)]
        if self.has_class("-slim"):
            return cells
        sizes = [byte_count(model.residual_bytes), byte_count(model.disk_bytes)]
        return [*cells, *sizes, perplexity(model), "bundled" if model.bundled else "! " if model.warning else ""]

    def _chosen(self) -> ModelEntry | None:
        row = self.query_one(ModelTable).cursor_row
        return self._models[row] if 0 <= row < len(self._models) else None

    def _chosen_to_fetch(self) -> KnownModel | None:
        row = self.query_one(ModelTable).cursor_row - len(self._models)
        return self._fetchable[row] if 0 <= row < len(self._fetchable) else None

    def _about(self, model: ModelEntry | None) -> str:
        if model is None:
            return ""
        made = f"{model.method}, keys evened out" if model.smooth_attention else model.method
        parts = [made, perplexity(model, words=True) if self.has_class("-slim") else "", model.warning or ""]
        return printable(" · ".join(part for part in parts if part))

    def _note(self, text: str, *, warning: bool = False) -> None:
        note = self.query_one("#models-note", Static)
        note.update(text)
        note.set_class(warning, "-warning")
        note.display = bool(text)

    def on_resize(self) -> None:
        """Show the columns that fit."""
        self.call_after_refresh(self.refill)

    @on(DataTable.RowHighlighted)
    def tell_about(self) -> None:
        """Say what there is to know about the model under the cursor."""
        if (known := self._chosen_to_fetch()) is not None:
            self._note(f"{known.about} · Enter fetches {byte_count(known.bytes)}, makes it low-bit and loads it")
        elif self._models:
            model = self._chosen()
            self._note(self._about(model), warning=model is not None and bool(model.warning))

    @on(DataTable.RowSelected)
    def load(self) -> None:
        """Load the model under the cursor, fetched first if need be, and go back to the chat."""
        if (model := self._chosen()) is not None:
            self.app.post_message(LoadAsked(model.name))
            self.dismiss()
        elif (known := self._chosen_to_fetch()) is not None:
            self.app.post_message(QuantizeAsked(_usual_request(known.name), load=True))
            self.dismiss()

    def action_quantize(self) -> None:
        """Ask for a checkpoint and make a low-bit model of it."""

        def begin(request: QuantizeRequest | None) -> None:
            if request is not None:
                self.app.post_message(QuantizeAsked(request))

        self.app.push_screen(QuantizeDialog(), begin)

    def action_delete(self) -> None:
        """Delete the model under the cursor, if that is confirmed."""
        model = self._chosen()
        if model is None:
            return
        if model.bundled:
            self.notify("The bundled model belongs to the program and cannot be deleted.", severity="warning")
            return

        def delete(confirmed: bool | None) -> None:
            if confirmed:
                self._seen = ()
                self.app.post_message(RemoveAsked(model.name))

        question = (
            f"Delete {model.name} ({byte_count(model.disk_bytes)})? What is kept of chats with it goes too; the "
            "checkpoint it was made of stays."
        )
        self.app.push_screen(ConfirmDialog(question, "Delete"), delete)

    async def action_dismiss(self, result: None = None) -> None:
        """Back to the chat."""
        self.dismiss(result)


def _usual_request(name: str) -> QuantizeRequest:
    """What makes a low-bit model of one that has a short name, as it is usually made and under that name."""
    from runtime.wire.requests import QuantizeRequest

    usual = Recipe()
    return QuantizeRequest(
        source=name,
        name=name,
        bits=usual.bits,
        method=cast("Method", usual.method),
        group_size=usual.group_size,
        residual_bits=usual.residual_bits,
        smooth_attention=usual.smooth_attention,
    )


def perplexity(model: ModelEntry, *, words: bool = False) -> str:
    """Perplexity before and after quantizing: `12.31 → 12.84`."""
    before, after = model.perplexity_before, model.perplexity_after
    if after is None:
        return "" if words else "–"
    numbers = f"{after:.2f}" if before is None else f"{before:.2f} → {after:.2f}"
    return f"perplexity {numbers}" if words else numbers
