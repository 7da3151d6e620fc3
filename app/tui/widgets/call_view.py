"""One call of a tool: a line, with its arguments and its result folded under it."""

from __future__ import annotations

import json

from textual.app import ComposeResult
from textual.containers import Vertical

from app.conversation import Call
from app.language import _, ngettext
from app.printable import printable, printable_name
from app.tui.plain import Plain

WORDS = {
    "asked": _("waits for your permission"),
    "running": _("running"),
    "done": _("done"),
    "failed": _("failed"),
    "refused": _("not allowed"),
    "stopped": _("stopped"),
}
MOST_LINES = 200
"""Lines of a result that are shown; the model has all of it."""
LINE = 400
"""Most characters of the arguments in the line."""


class CallLine(Plain):
    """The line; a click unfolds the rest."""

    def on_click(self) -> None:
        """Unfold or fold."""
        view = self.parent
        assert isinstance(view, CallView)
        view.unfold(not view.unfolded)


class CallView(Vertical):
    """A call, folded at first."""

    def __init__(self, call: Call) -> None:
        super().__init__(classes="call")
        self.call = call
        self.unfolded = False

    def compose(self) -> ComposeResult:
        """The line, and what is folded."""
        yield CallLine(self._line(), classes="call-line")
        yield Plain("", classes="call-body")

    def on_mount(self) -> None:
        """Fold it."""
        self.show(self.call)

    def show(self, call: Call) -> None:
        """Show a later state of the call."""
        self.call = call
        if self.query(CallLine):
            self.query_one(CallLine).update(self._line())
            self.set_class(call.state in ("failed", "refused", "stopped"), "-failed")
            body = self.query_one(".call-body", Plain)
            body.display = self.unfolded
            if self.unfolded:
                body.update(self._body())

    def unfold(self, unfolded: bool) -> None:
        """Show or hide arguments and result."""
        self.unfolded = unfolded
        self.show(self.call)

    def _line(self) -> str:
        call = self.call
        place = f"{printable_name(call.server)} · " if call.server else ""
        arguments = " ".join(printable(call.arguments).split())[:LINE]
        lines = call.result.count("\n") + 1
        said = WORDS[call.state]
        if call.state == "done" and lines > 1:
            said += ", " + ngettext("{count:,} line", "{count:,} lines", lines)
        elif call.state == "failed":
            said += f": {' '.join(printable(call.result).split())[:120]}"
        sign = "▾" if self.unfolded else "▸"
        return f"{sign} {place}{printable_name(call.name)} · {said} · {arguments}"

    def _body(self) -> str:
        call = self.call
        lines = call.result.split("\n")
        shown = "\n".join(lines[:MOST_LINES])
        if (more := len(lines) - MOST_LINES) > 0:
            shown += "\n" + ngettext("… {count:,} more line", "… {count:,} more lines", more)
        return f"{pretty(call.arguments)}\n\n{shown}" if call.result else pretty(call.arguments)


def pretty(arguments: str) -> str:
    """Arguments on several lines, if they are JSON."""
    try:
        return json.dumps(json.loads(arguments), indent=2, ensure_ascii=False)
    except (ValueError, RecursionError):
        return arguments
