"""PDF files, read page by page with `pypdf`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import BinaryIO

from app.documents.sections import Section
from app.errors import DocumentError

MAX_PAGES = 5000


def pages(stream: BinaryIO) -> Iterator[Section]:
    """The text of each page.

    Raises:
        DocumentError: it is encrypted, has no text, or more pages than are read.
    """
    from pypdf import PdfReader

    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it would tell of every flaw
    reader = PdfReader(stream)
    if reader.is_encrypted and not _opened(reader):
        raise DocumentError("is encrypted: save a copy without a password and attach that")
    count = len(reader.pages)
    if count > MAX_PAGES:
        raise DocumentError(f"has {count:,} pages, and at most {MAX_PAGES:,} are read: attach a part of it")
    broken, empty = 0, True
    for number in range(count):
        try:
            text = reader.pages[number].extract_text().strip()
        except Exception:  # noqa: BLE001  # a damaged page makes the library raise anything; the others can be read
            broken += 1
            continue
        empty = empty and not text
        yield Section("page", number + 1, text)
    if broken:
        raise DocumentError(f"has {broken:,} damaged page{'s'[: broken != 1]} of {count:,}, which can't be read")
    if empty:
        raise DocumentError(f"has no text on its {count:,} page{'s'[: count != 1]}; pictures of text are not read")


def _opened(reader: object) -> bool:
    """Whether a file opens with an empty password, as most protected files do."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    assert isinstance(reader, PdfReader)
    try:
        return bool(reader.decrypt(""))
    except (DependencyError, NotImplementedError):
        return False
