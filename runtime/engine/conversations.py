"""Conversations: reuses the KV cache across chats, so that a prompt computes only the tokens that no slot holds yet.

A prompt continues from the slot with the longest common prefix. If the prompt contains all of that slot's tokens and
the slot is idle, the same slot continues. Otherwise (a regenerated answer, a branch, a chat with the same system
prompt, a chat that is being answered) another slot forks from it, and the two share pages. The least recently used
slots and pages are evicted first, and saved to disk if they are worth a file.

A slot is *busy* from `begin` to `release`: it keeps its tokens, and pages for the longest it may become are reserved.
Idle slots only use memory that would otherwise be free, and can be evicted at any time.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engine.saved import SavedCaches, SavedSequence
from runtime.kv.control import KVCache

_WORTH_OPENING = 32
"""With fewer common tokens than this, reopening a quantized page is not worth it: the tokens are recomputed."""


class Conversations:
    """The sequences in a decoder's slots. Not thread-safe: the engine calls it between steps."""

    def __init__(self, cache: KVCache, *, slots: int, context: int) -> None:
        self._cache, self._context = cache, context
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._chats: list[str | None] = [None] * len(self._tokens)
        self._used = [0] * len(self._tokens)
        self._clock = 0
        self._ends: dict[int, int] = {}  # the length each busy slot may reach
        self._forgotten: set[int] = set()  # busy slots that are cleared when they are released
        self.saved: SavedCaches | None = None
        """Saved sequences from which a prompt may also begin."""

    def tokens(self, slot: int) -> list[int]:
        """The tokens a slot holds. Whoever runs a step of the slot appends the tokens that entered the cache."""
        return self._tokens[slot]

    @property
    def busy(self) -> int:
        """Slots in use by a request."""
        return len(self._ends)

    def has_room_for(self, prompt: Sequence[int], end: int) -> bool:
        """Whether a prompt can begin now and grow to `end` tokens, even if every busy slot grows to its limit.

        Args:
            prompt: Its tokens.
            end: Tokens that prompt and answer may have together, at most the context.
        """
        if self.busy == len(self._tokens):
            return False
        source, shared = self._longest(prompt[:-1])
        return self._cache.has_room_beside(self._ends, end, source=source, shared=shared)

    def begin(self, prompt: Sequence[int], chat: str | None = None, *, end: int | None = None) -> tuple[int, int]:
        """Assign a slot to a prompt and reuse as much of its prefix as is cached. The last token is always recomputed.

        The slot is busy until it is released.

        Args:
            prompt: Its tokens.
            chat: The chat it belongs to, for `forget`: a name chosen by the client. A prompt without a name that
                continues in a chat's slot leaves the slot with that chat.
            end: The limit passed to `has_room_for`; None: the context.

        Returns:
            The slot, and how many of the prompt's tokens it holds.
        """
        wanted = prompt[:-1]
        slot, shared = self._longest(wanted)
        if self.saved is not None:
            file = self.saved.longest(wanted, beyond=shared, context=self._context)
            if file is not None:
                self._restore(file, self._spare(slot if shared else None))
                slot, shared = self._longest(wanted)
        if shared < len(self._tokens[slot]) or slot in self._ends:
            source, slot = slot, self._spare(slot if shared else None)
            self._save([slot])
            self._fork(source, slot, shared)
        self.cut(slot, shared)
        self._chats[slot] = chat or self._chats[slot]
        self._ends[slot] = self._context if end is None else end
        self._touch(slot)
        return slot, shared

    def release(self, slot: int) -> None:
        """Mark a slot idle. It keeps its contents until the room is needed."""
        self.cut(slot, len(self._tokens[slot]))
        del self._ends[slot]
        self._touch(slot)
        if slot in self._forgotten:
            self.clear(slot)

    def make_room(self, slot: int, end: int) -> None:
        """Make room for a slot to grow to `end` tokens: evicts idle slots, least recently used first.

        If nothing is left to evict, the step itself fails.
        """
        cache = self._cache
        if cache.has_room(slot, end):
            return
        for other in sorted(self._idle(but=slot), key=self._used.__getitem__):
            self._save([other])
            self.clear(other)
            if cache.has_room(slot, end):
                return

    def forget(self, chat: str | None = None) -> None:
        """Drop the cached tokens of a chat, or of all chats. Saved files stay: see `runtime.engine.saved.forget`.

        A busy slot is dropped when it is released.
        """
        for slot, owner in enumerate(self._chats):
            if chat is None or owner == chat:
                self.forget_slot(slot)

    def forget_slot(self, slot: int) -> None:
        """Drop a slot's tokens, now or when it is released."""
        if slot in self._ends:
            self._forgotten.add(slot)
        else:
            self.clear(slot)

    def clear(self, slot: int) -> None:
        """Drop a slot's tokens and anything else written into it. The slot is idle afterwards."""
        self._ends.pop(slot, None)
        self._forgotten.discard(slot)
        self._tokens[slot] = []
        self._chats[slot] = None
        self._cache.clear(slot)

    def vacate(self, slot: int, room: int) -> None:
        """Empty a slot for a caller that writes up to `room` tokens into it. Its contents move to another slot."""
        if self._tokens[slot]:
            self.cut(slot, len(self._tokens[slot]))
            others = [other for other in range(len(self._tokens)) if other != slot]
            spare = min([*others, slot], key=lambda other: (bool(self._tokens[other]), self._used[other]))
            self._save([spare])
            if spare != slot:
                self._fork(slot, spare, len(self._tokens[slot]))
                self._chats[spare], self._used[spare] = self._chats[slot], self._used[slot]
            self.clear(slot)
        self.make_room(slot, room)

    def has_spare(self, room: int) -> bool:
        """Whether `vacate` would evict nothing: a slot is empty, and pages for `room` tokens are free."""
        empty = [slot for slot, tokens in enumerate(self._tokens) if not tokens]
        return bool(empty) and self._cache.has_room(empty[0], room)

    def save(self) -> None:
        """Save the sequences worth a file to disk, latest first."""
        self._save(sorted(range(len(self._tokens)), key=self._used.__getitem__, reverse=True))

    def _save(self, slots: Sequence[int]) -> None:
        """Save those of the given slots that are worth a file, most important first."""
        slots = [slot for slot in slots if self._tokens[slot]]
        if self.saved is None or not slots:
            return
        for slot in slots:
            self.cut(slot, len(self._tokens[slot]))
        self.saved.save(self._cache, [(slot, self._tokens[slot], self._chats[slot]) for slot in slots])

    def _longest(self, wanted: Sequence[int]) -> tuple[int, int]:
        """The slot with most of a prompt's first tokens, and how many can be used; prefers one that loses nothing."""
        candidates = []
        for slot, tokens in enumerate(self._tokens):
            shared = self._cache.reach(slot, common_prefix(tokens, wanted))
            exact = self._is_exact(slot, shared)
            candidates.append((shared if exact or shared >= _WORTH_OPENING else 0, exact, self._used[slot], slot))
        shared, _, _, slot = max(candidates)
        return slot, shared

    def _is_exact(self, slot: int, length: int) -> bool:
        """Whether a slot can be truncated to a length without reopening a quantized page."""
        return length >= self._cache.exact_from(slot)

    def _spare(self, source: int | None) -> int:
        """An idle slot: an empty one, or the least recently used; `source` only if there is no other."""
        others = self._idle(but=source) or self._idle()
        return min(others, key=lambda slot: (bool(self._tokens[slot]), self._used[slot]))

    def _idle(self, but: int | None = None) -> list[int]:
        return [slot for slot in range(len(self._tokens)) if slot not in self._ends and slot != but]

    def _fork(self, source: int, target: int, length: int) -> None:
        """Start a slot from another one's first `length` tokens."""
        if length:
            self._cache.fork(source, target, length)
        else:
            self._cache.clear(target)
        self._tokens[target] = self._tokens[source][:length]
        self._chats[target] = None

    def _restore(self, file: SavedSequence, slot: int) -> None:
        """Load a saved file into a slot; leaves the slot empty if the file cannot be used."""
        assert self.saved is not None
        self._save([slot])
        self.clear(slot)
        self.make_room(slot, len(file.tokens))
        if not self._cache.has_room(slot, len(file.tokens)):
            return
        self._tokens[slot] = self.saved.load(file, self._cache, slot)
        self._chats[slot] = file.chat
        self._touch(slot)

    def cut(self, slot: int, length: int) -> None:
        """Truncate a slot to its first `length` tokens, including anything left there by a draft or a failed step.

        Behind a failed step fewer may stay, if the memory cannot go back to where that began.
        """
        if self._cache.length(slot) > length:
            length = self._cache.reach(slot, length)
            self._cache.trim(slot, length)
        del self._tokens[slot][length:]

    def _touch(self, slot: int) -> None:
        """Mark a slot as used now."""
        self._clock += 1
        self._used[slot] = self._clock


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
