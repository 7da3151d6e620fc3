"""A store of pages that keeps nothing."""

from __future__ import annotations


class Nowhere:
    """A store without numbers."""

    def __init__(self) -> None:
        self.restored = self.windows = self.pages = 0

    def flush(self, slot: int, page: int, rest: int) -> None: ...

    def restore(self, page: int, slot: int, count: int) -> None:
        self.restored += 1

    def copy_window(self, source: int, target: int, count: int) -> None:
        self.windows += 1

    def copy_page(self, source: int, target: int) -> None:
        self.pages += 1
