"""Formats of documents: finds out what a file is, and reads its text.

This runs in the reader's child process (`app.documents.reading`), which limits time and memory. The libraries used here
may raise anything on a damaged file; whoever calls turns that into a `DocumentError`.
"""

from __future__ import annotations

import codecs
import zipfile
from collections.abc import Iterator
from typing import BinaryIO

from app.documents.sections import Section
from app.errors import DocumentError
from app.printable import printable
from runtime.system.foreign import encodable

MAX_BYTES = 64_000_000
"""Maximum size of a file."""
MAX_CHARACTERS = 1 << 24
"""Maximum length of a document's text; the rest is left out."""
_SNIFFED = 8192
"""Bytes that decide what a file is."""
_HTML = (".html", ".htm", ".xhtml")
_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))


def sections(stream: BinaryIO, name: str) -> Iterator[Section]:
    """Read the text of a document.

    Args:
        stream: Its bytes, seekable, at the beginning.
        name: Its file name, whose suffix tells HTML from text.

    Returns:
        Its sections, with control characters replaced; a section without text is left out.

    Raises:
        DocumentError: it holds no text that can be read.
    """
    head = stream.read(_SNIFFED)
    stream.seek(0)
    for section in _of_kind(stream, head, name):
        text = encodable(printable(section.text.replace("\f", "\n")))
        if text.strip():
            yield Section(section.unit, section.first, text)


def _of_kind(stream: BinaryIO, head: bytes, name: str) -> Iterator[Section]:
    if b"%PDF-" in head[:1024]:
        from app.documents.pdf import pages

        return pages(stream)
    if head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(stream):
        from app.documents.docx import paragraphs

        stream.seek(0)
        return paragraphs(stream)
    text = _decoded(head, stream)
    if name.lower().endswith(_HTML) or head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        from app.documents.html import blocks

        return blocks(text)
    return iter((Section("line", 1, text.replace("\r\n", "\n").replace("\r", "\n")),))


def _decoded(head: bytes, stream: BinaryIO) -> str:
    """The file as text, if it is text."""
    mark, encoding = next(((mark, name) for mark, name in _BOMS if head.startswith(mark)), (b"", "utf-8"))
    if encoding == "utf-8" and b"\0" in head:
        raise DocumentError("is not text: it has bytes that no text has")
    try:
        return stream.read()[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError("is not text in UTF-8 or UTF-16") from error
