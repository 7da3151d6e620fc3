"""Speed of a long history: listing, searching, opening and writing.

    python -m tests.lab.history --chats 10000 --turns 100

Words are drawn as often as in a language (Zipf), so that common ones are in nearly every message. Medians of many, from
a file that was closed and opened again. At last chats are opened in the real screen, in a headless terminal of 120 ×
40: from the wish until the last words of the chat stand on the screen, without the looking for them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from app.conversation import Conversation
from app.history.store import History
from app.tui.preload import preload
from tests.lab.streaming import scripted_runtime

_WORDS = 20_000
_LENGTH = 40
_ROUNDS = 20


def vocabulary() -> list[str]:
    """Words of three to nine letters, the most frequent first."""
    rng = np.random.default_rng(1)
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    share = 1 / np.arange(4, 4 + len(letters))
    drawn = ("".join(rng.choice(letters, rng.integers(3, 10), p=share / share.sum())) for _ in range(4 * _WORDS))
    return list(dict.fromkeys(drawn))[:_WORDS]


def fill(history: History, chats: int, turns: int) -> list[str]:
    """Keep chats of random words.

    Returns:
        Their ids.
    """
    rng, words = np.random.default_rng(0), np.array(vocabulary())
    share = 1 / np.arange(1, _WORDS + 1)
    share /= share.sum()
    ids = []
    for _ in range(chats):
        drawn = words[rng.choice(_WORDS, (turns, _LENGTH), p=share)]
        conversation = Conversation()
        for turn, line in enumerate(drawn):
            role = "assistant" if turn % 2 else "user"
            conversation.add(role, " ".join(line), parent=conversation.head, model="demo")  # type: ignore[arg-type]
        history.record(conversation.id, conversation.head, conversation.path())
        ids.append(conversation.id)
    return ids


def milliseconds(act: Callable[[int], object]) -> tuple[float, float]:
    """Median and worst of what an act takes, given the round's number."""
    times = []
    for turn in range(_ROUNDS):
        begin = time.perf_counter()
        act(turn)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times), max(times)


def on_screen(path: Path) -> list[float]:
    """Milliseconds that opening chats takes, of the terminal UI."""
    return asyncio.run(_on_screen(path))


async def _on_screen(path: Path) -> list[float]:
    scripted = scripted_runtime()
    runtime = scripted.Runtime()
    history = History(path)
    chats = history.chats()[:_ROUNDS]
    ends = [history.messages(chat.id)[-1].text.split()[-1] for chat in chats]
    history.close()
    app, times = scripted.make_app(runtime, kept=path), []
    async with app.run_test(size=(120, 40)) as pilot:
        stage = scripted.Stage(app, pilot, runtime)
        await stage.ready()
        await asyncio.to_thread(preload, freeze=True)  # as the program does outside tests
        for chat, end in zip(chats, ends, strict=True):
            begin, looking = time.perf_counter(), 0.0
            await app.chat.open_chat(chat)
            there = False
            while not there:
                await asyncio.sleep(0)
                looked = time.perf_counter()
                there = end in stage.screen_text()
                looking += time.perf_counter() - looked
            times.append(1e3 * (time.perf_counter() - begin - looking))
            await stage.settled()
    return times


def main() -> None:
    """Fill a history and print what its acts take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chats", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=100)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "history.db"
        history = History(path)
        begin = time.perf_counter()
        ids = fill(history, asked.chats, asked.turns)
        seconds, history = time.perf_counter() - begin, (history.close(), History(path))[1]
        size = sum(file.stat().st_size for file in path.parent.iterdir()) / 1e6
        print(f"{len(ids)} chats, {len(ids) * asked.turns} messages, {size:.0f} MB, written in {seconds:.0f} s")
        words = vocabulary()
        message = history.messages(ids[0])[0]
        acts: dict[str, Callable[[int], object]] = {
            "list": lambda _: history.chats(),
            "search, a letter": lambda turn: history.search(words[turn][0]),
            "search, a common word begun": lambda turn: history.search(words[turn][:3]),
            "search, two words": lambda turn: history.search(f"{words[turn]} {words[2 * turn + 50]}"),
            "search, a rare word": lambda turn: history.search(words[-1 - turn]),
            "open a chat": lambda turn: history.messages(ids[turn * len(ids) // _ROUNDS]),
            "keep a message": lambda _: history.record(ids[0], message.id, [message]),
        }
        for name, act in acts.items():
            median, worst = milliseconds(act)
            print(f"{name:32}{median:9.1f} ms{worst:9.1f} ms")
        history.close()
        times = on_screen(path)
        print(f"{'open a chat on the screen':32}{statistics.median(times):9.1f} ms{max(times):9.1f} ms")


if __name__ == "__main__":
    main()
