"""The entries of the command palette, each with its key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from textual.app import SystemCommand
from textual.command import Hit, Hits
from textual.system_commands import SystemCommandsProvider

from app.language import _
from app.tui.keys import KEYS, current_key
from app.tui.model_setup import unfinished
from app.tui.work_app import LOCAL_ACTIONS, WorkApp

SYNONYMS: Mapping[str, str] = {
    "attach": _("file pdf upload @"),
    "chat_settings": _("temperature thinking seed"),
    "chats": _("history search pin sidebar"),
    "continue": _("resume"),
    "copy_answer": _("clipboard"),
    "device": _("gpu cpu doctor tune"),
    "editor": _("vim nano"),
    "endpoint": _("remote api vllm"),
    "export": _("save backup"),
    "help": _("shortcuts slash"),
    "inspect": _("logits probability"),
    "log": _("error crash debug"),
    "models": _("gguf get pull load hub"),
    "new_chat": _("clear reset"),
    "presets": _("template persona"),
    "quit": _("exit bye"),
    "regenerate": _("retry again"),
    "restart_runtime": _("reload crash"),
    "settings": _("temperature theme colours dark light sidebar system prompt cache kv context history"),
    "stop": _("cancel"),
    "tools": _("mcp functions"),
}
"""What else people call what an action does, by the action."""
WORD_SCORE = 100.0
"""More than any match of single letters."""


class Finder(SystemCommandsProvider):
    """Finds a command by its title, by words of its description, and by what else people call it."""

    async def search(self, query: str) -> Hits:
        """The commands that a query finds. A word that begins with it counts more than its letters in a title."""
        matcher, begun = self.matcher(query), query.lower().strip()
        assert isinstance(self.app, WorkApp)
        found = False
        for (title, about, act, *_rest), words in commands(self.app):
            known = f"{title} {about} {words}".lower().replace(",", " ").split()
            if score := max(matcher.match(title), WORD_SCORE * any(word.startswith(begun) for word in known)):
                found = True
                yield Hit(score, matcher.highlight(title), act, help=about)
        if not found:  # Textual would say so in English
            yield Hit(WORD_SCORE, _("no matches"), lambda: None)


def commands(app: WorkApp) -> Iterator[tuple[SystemCommand, str]]:
    """The commands that are available now, each with other words for it."""
    session = app.session
    entries = [
        (_("New chat"), _("Start a new chat"), "new_chat"),
        (_("Regenerate"), _("Get another answer to the last prompt; the current one stays"), "regenerate"),
        (_("Edit"), _("Edit the last prompt as a new branch"), "edit"),
        (_("Continue"), _("Continue an answer that ended early"), "continue"),
        (_("Stop"), _("Stop the answer; what was written stays"), "stop"),
        (_("Copy answer"), _("Copy the last answer"), "copy_answer"),
        (_("Attach"), _("Send a document with the message, or have a long one or a folder searched"), "attach"),
        (_("Editor") + "  ^X ^E", _("Edit the draft in $VISUAL or $EDITOR"), "editor"),
        (_("Export"), _("Write this chat to a Markdown file, as /save does"), "export"),
        (_("This chat"), _("System prompt and sampling of this chat only"), "chat_settings"),
        (_("Presets"), _("Choose a system prompt for this chat, or save a new one"), "presets"),
        (_("Tools"), _("Tool servers, and which tools this chat may use"), "tools"),
        (_("Tokens"), _("How likely each token of the last answer was"), "inspect"),
        (_("Models"), _("Choose, download, quantize or delete a model"), "models"),
        (_("Settings"), _("Budget, sampling, memory, appearance"), "settings"),
        (_("Device"), _("The detected hardware, and how the model is tuned to it"), "device"),
        (_("Endpoint"), _("Use another OpenAI-compatible server, or this machine again"), "endpoint"),
        (_("Log"), _("Messages of the runtime, and why it stopped"), "log"),
        (_("Restart the runtime"), _("Load the model again; the chat is kept"), "restart_runtime"),
        (_("Keys"), _("List every key"), "help"),
        (_("Quit"), _("Quit the program"), "quit"),
    ]
    if session.history is not None:
        entries.insert(1, (_("Chats"), _("Find, open, rename or delete a chat"), "chats"))
    if session.working:
        entries.insert(-3, (_("Stop the work"), _("Stop loading, quantizing or tuning"), "stop_work"))
    elif unfinished() is not None:
        entries.insert(-3, (_("Resume the model"), _("Continue downloading and quantizing it"), "resume_work"))
    keys = {one.action: app.get_key_display(one.with_key(current_key(one, app.keymap))) for one in KEYS}
    for title, words, action in entries:
        if session.remote is None or action not in LOCAL_ACTIONS:
            name = f"{title}  {keys[action]}" if action in keys else title
            yield SystemCommand(name, words, getattr(app, f"action_{action}")), SYNONYMS.get(action, "")
