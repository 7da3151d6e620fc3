"""The entries of the command palette, with the keys that do the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from textual.app import SystemCommand

from app.tui import elsewhere
from app.tui.getting import unfinished
from app.tui.keys import KEYS, worn

if TYPE_CHECKING:
    from app.tui.app import ChatApp


def commands(app: ChatApp) -> Iterator[SystemCommand]:
    """What can be done now."""
    entries = [
        ("New chat", "Begin anew", "new_chat", app.action_new_chat),
        ("Regenerate", "Another answer to the last prompt, beside the one there", "regenerate",
         app.action_regenerate),
        ("Edit", "Another prompt beside the last one", "edit", app.action_edit),
        ("Continue", "Go on with an answer that ended early", "continue", app.action_continue),
        ("Stop", "Stop the answer; what came stays", "stop", app.action_stop),
        ("Copy answer", "Copy the last answer", "copy_answer", app.action_copy_answer),
        ("Attach a file", "Send a text file with the message", "attach", app.action_attach),
        ("This chat", "System prompt and sampling of this chat alone", "chat_settings", app.action_chat_settings),
        ("Presets", "Choose a system prompt for this chat, or keep another", "presets", app.action_presets),
        ("Tokens", "How likely each token of the last answer was", "inspect", app.action_inspect),
        ("Models", "Pick, get, make or delete a model", "models", app.action_models),
        ("Settings", "Budget, sampling, memory, looks", "settings", app.action_settings),
        ("Device", "What was detected, and how the model is tuned to it", "device", app.action_device),
        ("Endpoint", "Let a server elsewhere answer, or this machine again", "", app.action_endpoint),
        ("Log", "What the runtime wrote, and why it ended", "log", app.action_log),
        ("Restart the runtime", "Load the model again; the chat is kept", "", app.action_restart_runtime),
        ("Keys", "List every key", "help", app.action_help),
        ("Quit", "End the program", "quit", app.action_quit),
    ]  # fmt: skip
    if app.session.kept is not None:
        entries.insert(1, ("Chats", "Find, open, rename or delete a chat", "chats", app.action_chats))
    if app.session.working:
        stop = ("Stop the work", "Stop loading, quantizing or tuning", "stop_work", app.action_stop_work)
        entries.insert(-3, stop)
    elif unfinished() is not None:
        resume = ("Go on with the model", "Go on fetching and making it", "resume_work", app.action_resume_work)
        entries.insert(-3, resume)
    keys = {one.action: app.get_key_display(one.with_key(worn(one, app.keymap))) for one in KEYS}
    for title, words, action, act in entries:
        if app.session.remote is not None and action in elsewhere.OWN_ALONE:
            continue
        yield SystemCommand(f"{title}  {keys[action]}" if action in keys else title, words, act)
