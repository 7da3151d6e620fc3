"""Which tokens each slot of a cache holds, and where a prompt begins: the sequences that several chats left there.

A prompt goes on from the slot that has the longest beginning in common with it. Where the prompt begins with all of
that slot's tokens and nobody is at work there, the slot's own chat goes on; where not (a regenerated answer, a branch,
a chat with the same system prompt, one that is being answered), another slot forks from it, so that both stay, sharing
pages. Slots and pages that are needed are taken from whoever was not used for longest.

A slot is *busy* from `begin` to `release`: its tokens stay, and pages for as many as it may come to have are reserved.
Idle slots are what a memory that is free anyway is used for; they give way.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.engine.conversations.saved_folder import SavedCaches, SavedSequence
from runtime.kv.control import KVCache

_WORTH_OPENING = 32
"""With fewer tokens in common, a quantized page is not opened for them: they are computed again."""


class Conversations:
    """The sequences in a decoder's slots. Not thread-safe: the engine asks between steps.

    Args:
        cache: The decoder's cache.
        slots: Slots of the decoder.
        context: Tokens of a slot.
    """

    def __init__(self, cache: KVCache, *, slots: int, context: int) -> None:
        self._cache, self._context = cache, context
        self._tokens: list[list[int]] = [[] for _ in range(slots)]
        self._chats: list[str | None] = [None] * len(self._tokens)
        self._used = [0] * len(self._tokens)
        self._clock = 0
        self._ends: dict[int, int] = {}  # what each busy slot may grow to
        self._forgotten: set[int] = set()  # busy slots that are cleared when they are released
        self.saved: SavedCaches | None = None
        """Sequences on disk, where a prompt may begin from too."""

    def tokens(self, slot: int) -> list[int]:
        """What a slot holds; whoever runs a step of the slot appends what has entered the cache."""
        return self._tokens[slot]

    @property
    def busy(self) -> int:
        """Slots that somebody is at work in."""
        return len(self._ends)

    def has_room_for(self, prompt: Sequence[int], end: int) -> bool:
        """Whether a prompt can begin now and grow to `end` tokens, whatever the busy slots grow to.

        Args:
            prompt: Its tokens.
            end: Tokens that prompt and answer may have together, at most the context.
        """
        if self.busy == len(self._tokens):
            return False
        source, shared = self._longest(prompt[:-1])
        return self._cache.has_room_beside(self._ends, end, source=source, shared=shared)

    def begin(self, prompt: Sequence[int], chat: str | None = None, *, end: int | None = None) -> tuple[int, int]:
        """Make a slot hold the beginning of a prompt, as much of it as is known; its last token is never counted.

        The slot is busy until it is released.

        Args:
            prompt: Its tokens.
            chat: Whose it is, for `forget`: a name that its client chose. A prompt without one that goes on in a
                chat's slot leaves it that chat's.
            end: As `has_room_for` was asked; None: the context.

        Returns:
            The slot, and how many of the prompt's tokens it holds.
        """
        wanted = prompt[:-1]
        slot, shared = self._longest(wanted)
        if self.saved is not None:
            found = self.saved.longest(wanted, beyond=shared, context=self._context)
            if found is not None:
                self._restore(found, self._spare(slot if shared else None))
                slot, shared = self._longest(wanted)
        if shared < len(self._tokens[slot]) or slot in self._ends:
            source, slot = slot, self._spare(slot if shared else None)
            self._fork(source, slot, shared)
        self.cut(slot, shared)
        self._chats[slot] = chat or self._chats[slot]
        self._ends[slot] = self._context if end is None else end
        self._touch(slot)
        return slot, shared

    def release(self, slot: int) -> None:
        """Nobody is at work in a slot any longer. What it holds stays as long as there is room."""
        self.cut(slot, len(self._tokens[slot]))
        del self._ends[slot]
        self._touch(slot)
        if slot in self._forgotten:
            self.clear(slot)

    def make_room(self, slot: int, end: int) -> None:
        """See to it that a slot can go on up to `end` tokens: idle ones are dropped, those unused for longest first.

        Where nobody is left to be dropped, the step itself is refused.
        """
        cache = self._cache
        if cache.has_room(slot, end):
            return
        for other in sorted(self._idle(but=slot), key=self._used.__getitem__):
            self.clear(other)
            if cache.has_room(slot, end):
                return

    def forget(self, chat: str | None = None) -> None:
        """Drop what belongs to a chat; everything, where none is named. Files stay: see `saved_folder.forget`.

        What is in a busy slot is dropped when it is released.
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
        """Drop a slot's tokens, and whatever else was written into it. It is idle afterwards."""
        self._ends.pop(slot, None)
        self._forgotten.discard(slot)
        self._tokens[slot] = []
        self._chats[slot] = None
        self._cache.clear(slot)

    def vacate(self, slot: int, room: int) -> None:
        """Empty a slot for somebody who writes up to `room` tokens into it. What it held moves to another slot.

        Where all are taken, the one unused for longest is dropped, on disk first if it is worth a file.
        """
        if self._tokens[slot]:
            self.cut(slot, len(self._tokens[slot]))
            others = [other for other in range(len(self._tokens)) if other != slot]
            spare = min([*others, slot], key=lambda other: (bool(self._tokens[other]), self._used[other]))
            if self._tokens[spare]:
                self._save([spare])
            if spare != slot:
                self._fork(slot, spare, len(self._tokens[slot]))
                self._chats[spare], self._used[spare] = self._chats[slot], self._used[slot]
            self.clear(slot)
        if not self._cache.has_room(slot, room):
            self.save()
            self.make_room(slot, room)

    def save(self) -> None:
        """Write to disk what is worth it, the latest first."""
        self._save(sorted(range(len(self._tokens)), key=self._used.__getitem__, reverse=True))

    def _save(self, slots: Sequence[int]) -> None:
        """Write to disk what is worth it of some slots, the most important first."""
        if self.saved is None:
            return
        for slot in slots:
            self.cut(slot, len(self._tokens[slot]))
        self.saved.save(self._cache, [(slot, self._tokens[slot], self._chats[slot]) for slot in slots])

    def _longest(self, wanted: Sequence[int]) -> tuple[int, int]:
        """The slot that has most of some tokens, and how many; of equals one that can be cut back without loss."""
        found = []
        for slot, tokens in enumerate(self._tokens):
            shared = common_prefix(tokens, wanted)
            exact = self._is_exact(slot, shared)
            found.append((shared if exact or shared >= _WORTH_OPENING else 0, exact, self._used[slot], slot))
        shared, _, _, slot = max(found)
        return slot, shared

    def _is_exact(self, slot: int, length: int) -> bool:
        """Whether a slot can be cut back to a length without opening a quantized page."""
        return length >= self._cache.exact_from(slot)

    def _spare(self, source: int | None) -> int:
        """An idle slot: an empty one, or the one unused for longest; not `source` where there are others."""
        others = self._idle(but=source) or self._idle()
        return min(others, key=lambda slot: (bool(self._tokens[slot]), self._used[slot]))

    def _idle(self, but: int | None = None) -> list[int]:
        """Slots that nobody is at work in, without one."""
        return [slot for slot in range(len(self._tokens)) if slot not in self._ends and slot != but]

    def _fork(self, source: int, target: int, length: int) -> None:
        """Let a slot begin as another does."""
        if length:
            self._cache.fork(source, target, length)
        else:
            self._cache.clear(target)
        self._tokens[target] = self._tokens[source][:length]
        self._chats[target] = None

    def _restore(self, found: SavedSequence, slot: int) -> None:
        """Let a slot hold what is in a file, or nothing where that cannot be used."""
        assert self.saved is not None
        self.clear(slot)
        self.make_room(slot, len(found.tokens))
        if not self._cache.has_room(slot, len(found.tokens)):
            return
        self._tokens[slot] = self.saved.load(found, self._cache, slot)
        self._chats[slot] = found.chat
        self._touch(slot)

    def cut(self, slot: int, length: int) -> None:
        """Drop what a slot holds behind its first `length` tokens, and what a draft or a failed step has left there."""
        del self._tokens[slot][length:]
        if self._cache.length(slot) > length:
            self._cache.trim(slot, length)

    def _touch(self, slot: int) -> None:
        """Note that a slot is used now."""
        self._clock += 1
        self._used[slot] = self._clock


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens both begin with."""
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))
