"""The messages of the chat; only a window of them is mounted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll

from app.conversation import Conversation, Message
from app.language import _
from app.tui.figures import SEPARATOR
from app.tui.plain import Plain
from app.tui.widgets.message_view import MessageView
from app.tui.window import Window

SINCE = _("the model no longer sees the messages above, which don't fit in the context")
WELCOME = _(
    "Ask anything.\n\n"
    "⏎ sends · Ctrl+J starts a new line · ↑ recalls earlier prompts\n"
    "F1 lists the keys · F2 picks or downloads a model · F3 sets quality and speed · Ctrl+P finds everything else"
)


class Transcript(VerticalScroll):
    """A scrolling list of messages that follows its end until the user scrolls away."""

    def __init__(self, conversation: Callable[[], Conversation], inspects: Callable[[], bool]) -> None:
        super().__init__(id="transcript")
        self._conversation, self._inspects = conversation, inspects
        self._greeting = WELCOME
        self._window = Window.at_end(0)
        self._views: dict[str, MessageView] = {}
        self._moving = False
        self._column = Vertical(id="messages")

    def _messages(self) -> Sequence[Message]:
        return self._conversation().path()

    def compose(self) -> ComposeResult:
        """A column at least as tall as the view, so that a short chat stays at the top."""
        yield self._column

    async def on_mount(self) -> None:
        """Show the messages and follow the end."""
        await self.reopen()

    @property
    def following(self) -> bool:
        """Whether the end is visible."""
        return self.scroll_offset.y >= self.max_scroll_y

    def view(self, message_id: str) -> MessageView | None:
        """The view of a message, if it is mounted."""
        view = self._views.get(message_id)
        return view if view is not None and view.is_mounted else None

    @property
    def mounted(self) -> list[str]:
        """Ids of the mounted messages, from top to bottom."""
        return [view.message.id for view in self.query(MessageView)]

    async def reopen(self) -> None:
        """Show the newest messages and follow the end."""
        if not self._column.is_attached:  # not mounted yet, or the program is ending
            return
        messages = self._messages()
        self._window = Window.at_end(len(messages))
        async with self.batch():
            self._views.clear()
            await self._column.remove_children()
            if not messages:
                await self._column.mount(Plain(self._greeting, id="welcome"))
            await self._column.mount_all([self._make(message) for message in messages[self._window.start :]])
        self.mark()
        self.anchor()
        self.call_after_refresh(self._fill_up)

    def _fill_up(self) -> None:
        """Mount more messages if there is little to scroll back to or the screen isn't full."""
        if not self._moving and self._window.roomy and self.max_scroll_y <= self.size.height / 2:
            self._moving = True
            self.run_worker(self._earlier(), group="window", exit_on_error=False)

    def greet(self, words: str) -> None:
        """Show a greeting above the keys in an empty chat; an empty text removes it."""
        self._greeting = f"{words}\n\n{WELCOME}" if words else WELCOME
        for welcome in self.query("#welcome").results(Plain):
            welcome.update(self._greeting)

    async def extend(self) -> None:
        """Show the messages that were added at the end, and follow the end."""
        messages = self._messages()
        added = len(messages) - self._window.total
        if self._window.end != self._window.total or added <= 0:
            await self.reopen()
            return
        async with self.lock:  # scrolling mounts messages too
            for welcome in self.query("#welcome"):
                await welcome.remove()
            await self._column.mount_all([self._make(message) for message in messages[-added:]])
            await self._move(self._window.grown(added), keep_place=False)
        self.mark()
        self.anchor()

    def watch_scroll_y(self, old_value: float, new_value: float) -> None:
        """Mount more when the view comes near an end of the mounted range."""
        super().watch_scroll_y(old_value, new_value)
        if self._moving or old_value == new_value:
            return
        if new_value < old_value and new_value <= self.size.height / 2 and self._window.start > 0:
            self._moving = True
            self.run_worker(self._earlier(), group="window", exit_on_error=False)
        elif self._window.end < self._window.total and new_value >= self.max_scroll_y - self.size.height / 2:
            self._moving = True
            self.run_worker(self._move_and_release(Window.later), group="window", exit_on_error=False)

    async def _earlier(self) -> None:
        streaming = bool(self._messages()) and self._messages()[-1].state == "streaming"
        await self._move_and_release(partial(Window.earlier, keep_end=streaming))

    async def _move_and_release(self, moved: Callable[[Window], Window]) -> None:
        try:
            async with self.lock:
                await self._move(moved(self._window))
        finally:
            self.call_after_refresh(self._release)

    def _release(self) -> None:
        self._moving = False
        self._fill_up()

    async def _move(self, window: Window, *, keep_place: bool = True) -> None:
        """Mount and unmount messages to match `window`; visible ones stay in place."""
        self._window = window
        shown = self._messages()[window.start : window.end]
        wanted = {message.id for message in shown}
        mounted = list(self.query(MessageView))
        fixed = next((view for view in mounted if view.message.id in wanted and self._in_sight(view)), None)
        above_sight = 0.0 if fixed is None else fixed.virtual_region.y - self.scroll_y
        first = next((at for at, message in enumerate(shown) if message.id in self._views), len(shown))
        above = [self._make(message) for message in shown[:first]]
        below = [self._make(message) for message in shown[first:] if message.id not in self._views]
        if above:
            await self._column.mount_all(above, before=mounted[0] if mounted else None)
        if below:
            await self._column.mount_all(below)
        for view in mounted:
            if view.message.id not in wanted:
                self._views.pop(view.message.id, None)
                await view.remove()
        if keep_place and fixed is not None:
            self.call_after_refresh(self._put_back, fixed, above_sight)

    def _in_sight(self, view: MessageView) -> bool:
        return view.virtual_region.bottom > self.scroll_y

    def _put_back(self, view: MessageView, above_sight: float) -> None:
        if view.is_attached:
            self.scroll_to(y=view.virtual_region.y - above_sight, animate=False, immediate=True)

    def _make(self, message: Message) -> MessageView:
        view = self._views[message.id] = MessageView(message, self._inspects)
        return view

    def mark(self) -> None:
        """Update every mounted message's position: branch, whether it is the last, where the model's view begins."""
        conversation = self._conversation()
        messages, extras = conversation.path(), conversation.extras
        branches = conversation.branches()
        for view in self._views.values():
            if view.message.id not in conversation:
                continue
            siblings = branches[view.message.parent]
            parts = [SINCE, _("summary: {summary}", summary=extras.summary) if extras.summary else ""]
            since = SEPARATOR.join(filter(None, parts)) if view.message.id == extras.since else ""
            branch = (siblings.index(view.message.id) + 1, len(siblings))
            view.mark(last=view.message.id == messages[-1].id, branch=branch, since=since)
