"""The entries of the command palette, each with its key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from textual.app import SystemCommand
from textual.command import Hit, Hits
from textual.system_commands import SystemCommandsProvider

from app.tui.endpoint import LOCAL_ACTIONS
from app.tui.keys import KEYS, current_key
from app.tui.model_setup import unfinished
from app.tui.work_app import WorkApp

SYNONYMS: Mapping[str, str] = {
    "attach": "file pdf upload @",
    "chat_settings": "temperature thinking seed",
    "chats": "history search pin sidebar",
    "continue": "resume",
    "copy_answer": "clipboard",
    "device": "gpu cpu doctor tune",
    "editor": "vim nano",
    "endpoint": "remote api vllm",
    "export": "save backup",
    "help": "shortcuts slash",
    "inspect": "logits probability",
    "log": "error crash debug",
    "models": "gguf get pull load hub",
    "new_chat": "clear reset",
    "presets": "template persona",
    "quit": "exit bye",
    "regenerate": "retry again",
    "restart_runtime": "reload crash",
    "settings": "temperature theme colours dark light sidebar system prompt cache kv context history",
    "stop": "cancel",
    "tools": "mcp functions",
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
        for (title, about, act, _), words in commands(self.app):
            known = f"{title} {about} {words}".lower().replace(",", " ").split()
            if score := max(matcher.match(title), WORD_SCORE * any(word.startswith(begun) for word in known)):
                yield Hit(score, matcher.highlight(title), act, help=about)


def commands(app: WorkApp) -> Iterator[tuple[SystemCommand, str]]:
    """The commands that are available now, each with other words for it."""
    session = app.session
    entries = [
        ("New chat", "Start a new chat", "new_chat"),
        ("Regenerate", "Get another answer to the last prompt; the current one stays", "regenerate"),
        ("Edit", "Edit the last prompt as a new branch", "edit"),
        ("Continue", "Continue an answer that ended early", "continue"),
        ("Stop", "Stop the answer; what was written stays", "stop"),
        ("Copy answer", "Copy the last answer", "copy_answer"),
        ("Attach", "Send a document with the message, or have a long one or a folder searched", "attach"),
        ("Editor  ^X ^E", "Edit the draft in $VISUAL or $EDITOR", "editor"),
        ("Export", "Write this chat to a Markdown file, as /save does", "export"),
        ("This chat", "System prompt and sampling of this chat only", "chat_settings"),
        ("Presets", "Choose a system prompt for this chat, or save a new one", "presets"),
        ("Tools", "Tool servers, and which tools this chat may use", "tools"),
        ("Tokens", "How likely each token of the last answer was", "inspect"),
        ("Models", "Choose, download, quantize or delete a model", "models"),
        ("Settings", "Budget, sampling, memory, appearance", "settings"),
        ("Device", "The detected hardware, and how the model is tuned to it", "device"),
        ("Endpoint", "Use another OpenAI-compatible server, or this machine again", "endpoint"),
        ("Log", "Messages of the runtime, and why it stopped", "log"),
        ("Restart the runtime", "Load the model again; the chat is kept", "restart_runtime"),
        ("Keys", "List every key", "help"),
        ("Quit", "Quit the program", "quit"),
    ]
    if session.history is not None:
        entries.insert(1, ("Chats", "Find, open, rename or delete a chat", "chats"))
    if session.working:
        entries.insert(-3, ("Stop the work", "Stop loading, quantizing or tuning", "stop_work"))
    elif unfinished() is not None:
        entries.insert(-3, ("Resume the model", "Continue downloading and quantizing it", "resume_work"))
    keys = {one.action: app.get_key_display(one.with_key(current_key(one, app.keymap))) for one in KEYS}
    for title, words, action in entries:
        if session.remote is None or action not in LOCAL_ACTIONS:
            name = f"{title}  {keys[action]}" if action in keys else title
            yield SystemCommand(name, words, getattr(app, f"action_{action}")), SYNONYMS.get(action, "")
