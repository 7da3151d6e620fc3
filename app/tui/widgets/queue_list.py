"""The prompts that wait for the answer to end, above the composer, which keeps the focus."""

from __future__ import annotations

from collections.abc import Sequence

from textual import on
from textual.widgets.option_list import Option

from app.language import _, ngettext
from app.tui.messages import TakenBack
from app.tui.plain import PlainList, plain


class QueueList(PlainList, can_focus=False):
    """The queue: a line on what happens to it, and the first line of each prompt. A click takes one back."""

    def __init__(self) -> None:
        super().__init__(compact=True, markup=False, id="queue")
        self.display = False
        self.texts: Sequence[str] = ()
        self._sends = False

    def show(self, texts: Sequence[str], *, sends: bool) -> None:
        """Show a queue.

        Args:
            texts: The prompts.
            sends: Whether the end of an answer sends the first one.
        """
        if (texts, sends) == (self.texts, self._sends):
            return
        self.texts, self._sends, self.display = texts, sends, bool(texts)
        count = ngettext("{count} queued", "{count} queued", len(texts))
        head = _("sent when the answer ends") if sends else _("not sent: ⏎ sends the first")
        lines = [text.strip().partition("\n") for text in texts]
        self.set_options(
            [
                Option(_("{count}, {head} · ↑ takes the last one back", count=count, head=head), disabled=True),
                *(Option(plain(f"  {first}{' …' if more else ''}")) for first, more, _ in lines),
            ]
        )

    @on(PlainList.OptionSelected)
    def take_back(self, event: PlainList.OptionSelected) -> None:
        """Give the prompt that was clicked back to the composer."""
        event.stop()
        self.post_message(TakenBack(event.option_index - 1))
