"""The real program in a real terminal, driven by keys through tmux: `python -m tests.app.terminal [--model NAME]`.

First run, chat, stop, regenerate, branch, search, another budget, a full context, quit, reopen; and nothing left
running. Prints each step. The model has to be in the home folder, which is left as it is: chats go to a new one beside
its models; `demo` is the bundled one and needs nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

PATIENCE_S = 240.0
TRIES = 24
"""An answer may have ended before it could be stopped."""
COLUMNS, ROWS = 90, 30


class Terminal:
    """A tmux server of its own, with the program in its only window."""

    def __init__(self, home: Path, model: str, *, context: int) -> None:
        self._home, self._name = home, f"lowbit-chat-{uuid.uuid4().hex[:8]}"
        self._settings = {
            "LOWBIT_CHAT_HOME": str(home),
            "LOWBIT_CHAT_MODEL": model,
            "LOWBIT_CHAT_CONTEXT": str(context),
            "LOWBIT_CHAT_MAX_TOKENS": "200",
            "HF_HUB_OFFLINE": "1",
            "ESCDELAY": "10",  # milliseconds after which Escape is no Alt; many an answer takes less than the usual 100
        }

    def _tmux(self, *words: str, check: bool = True) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._name, "-f", os.devnull, *words],
            check=check,
            capture_output=True,
            text=True,
            timeout=20,
        )
        return done.stdout

    def start(self) -> None:
        """Start the program."""
        settings = [f"{key}={value}" for key, value in self._settings.items()]
        words = ["env", *settings, sys.executable, "-c", "from app.cli.start import main; main()"]
        root = Path(__file__).resolve().parents[2]
        self._tmux("new-session", "-d", "-x", str(COLUMNS), "-y", str(ROWS), "-c", str(root), *words)

    def press(self, *keys: str, pause_s: float = 0.15) -> None:
        """Press keys, as tmux names them."""
        for key in keys:
            self._tmux("send-keys", key)
            time.sleep(1.0 if key == "Escape" else pause_s)  # a letter right behind Escape would count as Alt

    def type(self, text: str) -> None:
        """Type a text."""
        self._tmux("send-keys", "-l", text)
        time.sleep(0.3)

    def write(self, text: str) -> None:
        """Type a text and send it."""
        self.type(text)
        self._tmux("send-keys", "Enter")

    def stop(self, seconds: float) -> None:
        """Send what was typed, and press Escape so many seconds later, by one command, however busy the machine is."""
        self._tmux("send-keys", "Enter", ";", "run-shell", "-d", f"{seconds:.2f}", ";", "send-keys", "Escape")
        time.sleep(1.0)

    def screen(self) -> str:
        """What the terminal shows."""
        return self._tmux("capture-pane", "-p", check=False)

    def until(self, true: Callable[[str], object], what: str) -> str:
        """Wait until something holds for what the terminal shows.

        Raises:
            TimeoutError: it does not.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not true(screen := self.screen()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited in vain for {what}; the terminal shows\n{screen}")
            time.sleep(0.1)
        return screen

    def shows(self, text: str) -> str:
        """Wait for a text."""
        return self.until(lambda screen: text in screen, repr(text))

    def runtime(self) -> psutil.Process | None:
        """The runtime's process."""
        try:
            return psutil.Process(json.loads((self._home / "runtime.json").read_text())["pid"])
        except (OSError, ValueError, psutil.Error):
            return None

    def ended(self) -> bool:
        """Whether the program is gone."""
        return not self._tmux("list-sessions", check=False)

    def kill(self) -> None:
        """End the tmux server, whatever it runs."""
        self._tmux("kill-server", check=False)


def step(name: str) -> None:
    """Say what is done next."""
    print(f"· {name}", flush=True)


def answered(terminal: Terminal) -> None:
    """Wait for the end of an answer."""
    time.sleep(0.5)
    terminal.until(lambda screen: "Esc stops" not in screen and "details" in screen, "the end of the answer")


def stopped(terminal: Terminal) -> None:
    """Ask until an answer is long enough to be stopped, with Escape sooner or later behind the prompt."""
    for attempt in range(TRIES):
        terminal.type(f"Tell me a long story about {attempt} dogs and a boat.")
        terminal.stop(0.01 * (attempt % 8))
        answered(terminal)
        if "stopped" in terminal.screen():
            return
    raise TimeoutError(f"no answer could be stopped: all were written too quickly\n{terminal.screen()}")


def leave(terminal: Terminal) -> None:
    """Quit, and see that nothing is left running."""
    runtime = terminal.runtime()
    assert runtime is not None
    terminal.press("C-q")
    deadline = time.monotonic() + PATIENCE_S
    while not terminal.ended() or runtime.is_running():
        if time.monotonic() > deadline:
            raise TimeoutError(f"still running: terminal {not terminal.ended()}, runtime {runtime}")
        time.sleep(0.1)


def budget_of(screen: str) -> str:
    """The budget shown in the header; empty if none is shown."""
    found = re.search(r"budget (off|[\d.]+ %)", screen.split("\n")[0])
    return found[1] if found else ""


def play(terminal: Terminal, model: str) -> None:
    """All steps."""
    step("first run")
    terminal.start()
    terminal.shows("Ask anything")
    terminal.until(lambda screen: model in screen.split("\n")[0] and "Loading" not in screen, "the model")
    terminal.until(lambda screen: "Tuning" not in screen and "bit" in screen.split("\n")[0], "a tuned model")
    step("chat")
    terminal.write("What is the capital of France?")
    answered(terminal)
    step("stop")
    stopped(terminal)
    step("regenerate")
    terminal.press("C-r")
    terminal.shows("2/2")
    answered(terminal)
    step("branch")
    terminal.press("C-Up", "Left")
    terminal.shows("1/2")
    terminal.press("Escape")
    step("fill the context")
    for _ in range(3 * TRIES):
        terminal.write("And then? " + "Tell me more about the dog, the boat and the sea. " * 6)
        answered(terminal)
        if "no longer sees" in terminal.screen():
            break
        terminal.press("PPage")
        if "no longer sees" in terminal.screen():
            break
        terminal.press("C-End")
    else:
        raise TimeoutError(f"nothing was ever left out\n{terminal.screen()}")
    step("search")
    terminal.press("C-n")
    terminal.shows("Ask anything.")
    terminal.press("C-b")
    terminal.shows("Search all messages")
    terminal.type("capital of Fr")
    terminal.shows("What is the cap")  # cut where what matches stands beside it
    terminal.press("Enter")
    terminal.until(lambda screen: "Search" not in screen, "the chat")
    step("another budget")
    before = budget_of(terminal.screen())
    terminal.press("F3")
    terminal.shows("Quality and speed")
    terminal.press("Right", "Enter")
    time.sleep(1.0)
    terminal.press("Escape")
    terminal.until(lambda screen: "Ask anything" in screen, "the chat")
    terminal.until(lambda screen: budget_of(screen) not in ("", before), f"another budget than {before!r}")
    step("quit")
    leave(terminal)
    step("reopen")
    terminal.start()
    terminal.until(lambda screen: model in screen.split("\n")[0], "the model")
    terminal.press("C-b")
    terminal.shows("What is the capital")
    terminal.press("Escape")
    leave(terminal)


def home_with(model: str, folder: Path) -> Path:
    """A home without chats, with the models and profiles of the person's own."""
    from app import paths

    home = folder / "home"
    home.mkdir(mode=0o700)
    for part in ("models", "profiles", "cache"):
        if (own := paths.home() / part).is_dir() and (model != "demo" or part == "cache"):
            (home / part).symlink_to(own)
    return home


def main() -> int:
    """Run all steps on a model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a stored model; demo is the bundled one")
    parser.add_argument("--context", type=int, default=512, help="context length in tokens")
    asked = parser.parse_args()
    if shutil.which("tmux") is None:
        print("tmux is not installed, and this drives the program through it")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        terminal = Terminal(home_with(asked.model, Path(folder)), asked.model, context=asked.context)
        try:
            play(terminal, asked.model)
        except (TimeoutError, AssertionError) as error:
            print(error)
            return 1
        finally:
            terminal.kill()
            if (left := terminal.runtime()) is not None and left.is_running():
                left.kill()
    print("all steps done, nothing left running")
    return 0


if __name__ == "__main__":
    sys.exit(main())
