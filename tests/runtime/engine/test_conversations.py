"""Reuse of slots: the slot a prompt continues from, evictions, and isolation of other slots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from runtime.engine.conversations import Conversations
from runtime.kv.control import KVCache
from runtime.kv.groups import page_groups
from runtime.kv.kinds import KINDS
from tests.runtime.conftest import make_spec
from tests.runtime.engine.nowhere import Nowhere

CONTEXT, ROWS = 64, 8


class Chats:
    """Conversations over a cache, and steps as the engine does them."""

    def __init__(self, spec: Any, *, slots: int = 3, pages: int | None = None, kv: str = "int8") -> None:
        kind = replace(KINDS[kv], page=4, sinks=0)  # type: ignore[index]
        self.store = Nowhere()
        sizes = {"context": CONTEXT, "slots": slots, "max_rows": ROWS}
        groups = page_groups(kind, spec, **sizes, pages=pages or kind.max_pages(CONTEXT))
        self.cache = KVCache(kind, spec, dict.fromkeys(groups, self.store), **sizes)
        self.known = Conversations(self.cache, slots=slots, context=CONTEXT)

    def say(self, prompt: list[int], answer: int = 0, chat: str | None = None) -> tuple[int, int]:
        """Prompt and some answered tokens, 900 and following, of which the last does not enter the cache."""
        slot, cached = self.known.begin(prompt, chat)
        assert self.cache.length(slot) == cached == len(self.known.tokens(slot))
        for token in [*prompt[cached:], *range(900, 900 + answer)]:
            tokens = self.known.tokens(slot)
            self.known.make_room(slot, len(tokens) + 1)
            self.cache.begin(np.array([slot], np.int32), np.array([len(tokens)], np.int32))
            tokens.append(token)
        self.known.release(slot)
        return slot, cached

    def held(self) -> list[list[int]]:
        return sorted(tokens for slot in range(3) if (tokens := self.known.tokens(slot)))


@pytest.fixture
def chats() -> Chats:
    return Chats(make_spec())


def test_a_chat_goes_on_in_its_own_slot(chats: Chats) -> None:
    slot, cached = chats.say([1, 2, 3], answer=2)
    assert cached == 0
    assert chats.say([1, 2, 3, 900, 901, 4, 5], answer=1) == (slot, 5)
    assert chats.held() == [[1, 2, 3, 900, 901, 4, 5, 900]]
    assert (chats.store.pages, chats.store.windows) == (0, 0)


def test_switching_between_chats_needs_no_prefill(chats: Chats) -> None:
    first, second = [1, 2, 3, 4, 5], [11, 12, 13, 14]
    one, two = chats.say(first)[0], chats.say(second)[0]
    assert one != two
    for _ in range(3):
        first, second = [*first, 7], [*second, 17]
        assert chats.say(first) == (one, len(first) - 1)
        assert chats.say(second) == (two, len(second) - 1)


def test_a_regenerated_answer_and_a_branch_leave_what_they_come_from(chats: Chats) -> None:
    prompt = list(range(1, 11))
    one, _ = chats.say(prompt, answer=3)
    before = chats.cache.table.used
    two, cached = chats.say(prompt, answer=5)
    assert (cached, two != one) == (9, True)
    assert chats.held() == [[*prompt, 900, 901, 902], [*prompt, *range(900, 905)]]
    assert chats.cache.table.used == before + 2  # the page in which they part, and the one behind it
    assert chats.store.pages == 1
    three, cached = chats.say([*prompt[:8], 99, 98])
    assert (cached, three not in (one, two)) == (8, True)
    assert chats.cache.table.references(chats.cache.table.held(one)[0]) == 3
    assert chats.say([*prompt, 900, 901, 902, 50])[:2] == (one, 13)


def test_the_one_unused_for_longest_gives_its_slot(chats: Chats) -> None:
    slots = [chats.say([10 * i, 1, 2])[0] for i in range(1, 4)]
    assert sorted(slots) == [0, 1, 2]
    chats.say([10, 1, 2, 3])
    assert chats.say([40, 1, 2])[0] == slots[1]
    assert chats.held() == [[10, 1, 2, 3], [30, 1, 2], [40, 1, 2]]
    assert chats.say([10, 1, 9])[0] == slots[2]  # a branch never takes the slot that it comes from
    assert chats.held() == [[10, 1, 2, 3], [10, 1, 9], [40, 1, 2]]


def test_pages_are_taken_from_the_one_unused_for_longest() -> None:
    chats = Chats(make_spec(), pages=16)
    first, second = [*range(1, 21)], [*range(101, 121)]
    chats.say(first)
    chats.say(second)
    assert chats.say(list(range(201, 225)))[1] == 0  # 6 pages: 5 + 5 + 6 = 16
    chats.say(list(range(201, 226)))
    assert chats.held() == [second, list(range(201, 226))]


def test_whoever_is_at_work_gives_nothing_up() -> None:
    chats = Chats(make_spec(), pages=16)
    first, second = [*range(1, 21)], [*range(101, 121)]
    chats.say(first)
    slot, _ = chats.known.begin([*first, 50])
    chats.say(second)
    chats.say(list(range(201, 226)))
    assert chats.held() == [first, list(range(201, 226))]
    chats.known.release(slot)
    chats.say(list(range(201, 246)))
    assert chats.held() == [list(range(201, 246))]
    chats.say([*range(301, 364)])
    assert chats.held() == [[*range(301, 364)]]


@pytest.mark.parametrize("kv", ["int4", "hierarchical", "kivi2"])
def test_one_chat_may_fill_the_pool(kv: str) -> None:
    chats = Chats(make_spec(), kv=kv)
    rng = np.random.default_rng(0)
    for _ in range(30):
        prompt = [1, *rng.integers(2, 4, rng.integers(1, CONTEXT)).tolist()]
        chats.say(prompt, answer=CONTEXT - len(prompt))
        assert chats.cache.table.used <= chats.cache.table.capacity


def test_of_equals_the_one_that_can_be_cut_back_without_loss() -> None:
    chats = Chats(make_spec(), kv="kivi2")
    prompt = list(range(1, 41))
    chats.say(prompt, answer=9)
    exact, cached = chats.say([*prompt, 7], answer=1)
    assert (cached, chats.store.restored) == (40, 0)
    other, cached = chats.say([*prompt, 8])
    assert (cached, exact != other, chats.store.restored) == (40, True, 0)


def test_a_page_is_not_opened_for_a_few_tokens() -> None:
    chats = Chats(make_spec(), kv="kivi2")
    chats.say(list(range(1, 41)))
    assert chats.say([1, 2, 3, 99])[1] == 0
    assert chats.say([*range(1, 36), 99])[1] == 35
    assert chats.store.restored == 1


def test_what_a_failed_step_left_is_dropped(chats: Chats) -> None:
    slot, _ = chats.say([1, 2, 3])
    chats.cache.begin(np.full(4, slot, np.int32), np.arange(3, 7, dtype=np.int32))  # and then the step failed
    assert chats.say([1, 2, 3, 4, 5]) == (slot, 3)


def test_everything_can_be_forgotten(chats: Chats) -> None:
    for i in range(3):
        chats.say([10 * i, 1, 2])
    chats.known.forget()
    assert (chats.held(), chats.cache.table.used) == ([], 0)
    assert chats.say([10, 1, 2])[1] == 0


def test_a_chat_can_be_forgotten_and_the_others_stay(chats: Chats) -> None:
    chats.say([1, 2, 3, 4, 5], chat="one")
    chats.say([11, 12, 13], chat="two")
    chats.say([1, 2, 3, 4, 6], chat="three")  # a branch of the first, with a page of its own and a shared one
    chats.known.forget("one")
    assert chats.held() == [[1, 2, 3, 4, 6], [11, 12, 13]]
    chats.say([11, 12, 13, 14])  # nobody said whose, so it is still the second's
    chats.known.forget("nobody")
    assert chats.held() == [[1, 2, 3, 4, 6], [11, 12, 13, 14]]
    chats.known.forget("two")
    chats.say([1, 2, 3, 4, 6, 7], chat="four")  # goes on in the slot, which is its own now
    chats.known.forget("three")
    assert chats.held() == [[1, 2, 3, 4, 6, 7]]
    chats.say([1, 2, 3, 4, 9])  # a branch of a chat is not the chat's
    chats.known.forget("four")
    assert chats.held() == [[1, 2, 3, 4, 9]]
    chats.known.clear(chats.known.begin([1, 2, 3, 4, 9, 9])[0])
    assert chats.cache.table.used == 0
    chats.say([5, 6], chat="five")
    chats.known.clear(chats.known.begin([5, 6, 7])[0])
    chats.say([5, 6])
    chats.known.forget("five")
    assert chats.held() == [[5, 6]], "an emptied slot is nobody's"


def test_a_lent_slot_costs_no_conversation_while_another_is_free(chats: Chats) -> None:
    slot, _ = chats.say([1, 2, 3, 4, 5], chat="one")
    other, _ = chats.say([11, 12, 13])
    used = chats.cache.table.used
    chats.known.vacate(slot, 16)
    assert chats.cache.length(slot) == 0
    assert chats.held() == [[1, 2, 3, 4, 5], [11, 12, 13]]
    assert (chats.cache.table.used, chats.store.pages) == (used, 0)
    chats.cache.begin(np.full(8, slot, np.int32), np.arange(8, dtype=np.int32))  # somebody measures
    chats.known.clear(slot)
    assert (chats.cache.length(slot), chats.cache.table.used) == (0, used)
    assert chats.say([1, 2, 3, 4, 5, 6])[1] == 5
    assert chats.say([11, 12, 13, 14]) == (other, 3)
    chats.known.forget("one")
    assert chats.held() == [[11, 12, 13, 14]], "whose it is moved with it"


def test_where_all_slots_are_taken_the_one_unused_for_longest_gives_way(chats: Chats) -> None:
    slots = [chats.say([10 * i, 1, 2])[0] for i in range(1, 4)]
    for borrow, gone in ((slots[1], 10), (slots[1], None), (slots[0], None)):
        chats.known.vacate(borrow, 8)
        assert chats.known.tokens(borrow) == []
        assert [gone, 1, 2] not in chats.held()
    assert chats.held() == [[20, 1, 2], [30, 1, 2]]
    chats.say([40, 1, 2])
    oldest = next(slot for slot in range(3) if chats.known.tokens(slot) == [20, 1, 2])
    chats.known.vacate(oldest, 8)
    assert chats.held() == [[30, 1, 2], [40, 1, 2]], "the one in the lent slot was the oldest itself"


def test_a_lent_slot_has_room() -> None:
    chats = Chats(make_spec(), pages=16)
    chats.say([*range(1, 40)])
    chats.say([*range(101, 120)])
    chats.known.vacate(2, 24)
    assert chats.cache.has_room(2, 24)
    assert chats.held() == [[*range(101, 120)]]


class Disk:
    """Keeps the tokens that it is asked to save, in their order."""

    def __init__(self) -> None:
        self.asked: list[list[list[int]]] = []

    def longest(self, tokens: Any, *, beyond: int, context: int) -> None: ...

    def save(self, cache: Any, sequences: Any) -> None:
        assert all(cache.length(slot) == len(tokens) for slot, tokens, _ in sequences)
        self.asked.append([list(tokens) for _, tokens, _ in sequences if tokens])


def test_the_latest_is_saved_first(chats: Chats) -> None:
    disk = chats.known.saved = Disk()  # type: ignore[assignment]
    for prompt in ([10, 1, 2], [20, 1, 2], [30, 1, 2], [10, 1, 2, 3]):
        chats.say(prompt)
    chats.known.save()
    assert disk.asked == [[[10, 1, 2, 3], [30, 1, 2], [20, 1, 2]]]


def test_what_gives_way_to_a_lent_slot_is_saved_before() -> None:
    chats = Chats(make_spec(), pages=16)
    disk = chats.known.saved = Disk()  # type: ignore[assignment]
    one, two = list(range(1, 40)), list(range(101, 120))
    chats.say(one)
    chats.say(two)
    chats.known.vacate(2, 24)
    assert (disk.asked, chats.held()) == ([[one]], [two])


def test_what_gives_way_to_another_conversation_is_saved_before() -> None:
    chats = Chats(make_spec(), pages=16, slots=2)
    disk = chats.known.saved = Disk()  # type: ignore[assignment]
    one, two, three, long = [1, 2, 3], [4, 5, 6], list(range(50, 80)), list(range(101, 160))
    for prompt in (one, two, three):
        chats.say(prompt)
    assert disk.asked == [[one]], "no slot was left"
    chats.say(long)
    assert disk.asked[1:] == [[two], [three]], "a slot, and then pages"


def test_one_slot_is_cut_back() -> None:
    chats = Chats(make_spec(), slots=1)
    chats.say([1, 2, 3, 4], answer=2)
    assert chats.say([1, 2, 3, 4]) == (0, 3)
    assert chats.say([9, 8]) == (0, 0)
