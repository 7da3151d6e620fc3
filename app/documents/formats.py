"""Formats of documents: finds out what a file is, and reads its text: plain text, DOCX, HTML, PDF (with `pypdf`).

This runs in the reader's child process (`app.documents.reading`), which limits time and memory. The libraries used here
may raise anything on a damaged file; whoever calls turns that into a `DocumentError`.

A DOCX file is a zip archive with XML in it. Both may be bombs: the XML is read up to a limit, whatever size the archive
claims, by a parser that builds no tree and refuses document types, and with them entities. Of HTML the visible text is
read, by lines of the source; nothing is fetched, and nesting costs nothing.
"""

from __future__ import annotations

import codecs
import logging
import zipfile
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import BinaryIO, NoReturn
from xml.parsers import expat

from app.documents.sections import Section
from app.errors import DocumentError
from app.language import _, ngettext
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
        return pages(stream)
    if head.startswith(b"PK\x03\x04") and zipfile.is_zipfile(stream):
        stream.seek(0)
        return paragraphs(stream)
    text = _decoded(head, stream)
    if name.lower().endswith(_HTML) or head.lstrip()[:15].lower().startswith((b"<!doctype html", b"<html")):
        return blocks(text)
    return iter((Section("line", 1, text.replace("\r\n", "\n").replace("\r", "\n")),))


def _decoded(head: bytes, stream: BinaryIO) -> str:
    """The file as text, if it is text."""
    mark, encoding = next(((mark, name) for mark, name in _BOMS if head.startswith(mark)), (b"", "utf-8"))
    if encoding == "utf-8" and b"\0" in head:
        raise DocumentError(_("is a binary file"))
    try:
        return stream.read()[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise DocumentError(_("is neither UTF-8 nor UTF-16 text")) from error


PART = "word/document.xml"
MAX_XML = 64_000_000
"""Maximum length of the XML in bytes."""
MAX_ELEMENTS = 2_000_000
"""Maximum number of elements in it: a thousand pages have some hundred thousand."""
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"
_BLANKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


class _Body:
    """Collects paragraphs from a parser's events."""

    def __init__(self) -> None:
        self.paragraphs: list[str] = []
        self._said: list[str] = []
        self._in_text = False
        self._elements = 0

    def start(self, name: str, attributes: dict[str, str]) -> None:
        del attributes
        self._elements += 1
        if self._elements > MAX_ELEMENTS:
            raise DocumentError(_("has more than {most:,} elements when it is unpacked", most=MAX_ELEMENTS))
        tag = _tag(name)
        self._in_text = tag == "t"
        if tag in _BLANKS:
            self._said.append(_BLANKS[tag])
        elif tag == "p" and self._said:  # a paragraph inside another one, as in a text box
            self.end_paragraph()

    def end(self, name: str) -> None:
        tag = _tag(name)
        if tag == "t":
            self._in_text = False
        elif tag == "p":
            self.end_paragraph()

    def text(self, data: str) -> None:
        if self._in_text:
            self._said.append(data)

    def end_paragraph(self) -> None:
        self.paragraphs.append("".join(self._said))
        self._said.clear()


def paragraphs(stream: BinaryIO) -> Iterator[Section]:
    """The paragraphs of a document's body.

    Raises:
        DocumentError: it is another kind of archive, too large, or has a document type.
    """
    with zipfile.ZipFile(stream) as archive:
        if PART not in archive.namelist():
            raise DocumentError(_("is an archive, not a Word document: unpack it and attach the folder"))
        if archive.getinfo(PART).flag_bits & 1:
            raise DocumentError(_("is encrypted: save a copy without a password and attach that"))
        with archive.open(PART) as part:
            content = part.read(MAX_XML + 1)
    if len(content) > MAX_XML:
        raise DocumentError(_("has more than {most} MB of text when it is unpacked", most=MAX_XML // 1_000_000))
    body = _Body()
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = _refuse_doctype
    parser.StartElementHandler, parser.EndElementHandler = body.start, body.end
    parser.CharacterDataHandler = body.text
    parser.Parse(content, True)
    return (Section("paragraph", number, text) for number, text in enumerate(body.paragraphs, 1))


def _tag(name: str) -> str:
    """The local name of an element of Word; empty for any other."""
    space, _sign, tag = name.rpartition(" ")
    return tag if space in (_WORD, _STRICT) else ""


def _refuse_doctype(*_arguments: object) -> NoReturn:
    raise DocumentError(_("has a document type, which no Word document has"))


MAX_TAGS = 2_000_000
"""Maximum number of tags in a page."""
_HIDDEN = frozenset({"script", "style", "template", "noscript", "svg", "math", "select", "datalist"})
_INLINE_TAGS = """
a abbr acronym b bdi bdo big cite code data del dfn em font i ins kbd label mark q s samp small span strike strong sub
sup time tt u var wbr
"""
_INLINE = frozenset(_INLINE_TAGS.split())


class _Text(HTMLParser):
    """Collects the visible text of a page in blocks."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Section] = []
        self._said: list[str] = []
        self._line = 1
        self._hidden = ""
        self._depth = 0
        self._verbatim = 0
        self._tags = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002  the base has it
        self._tags += 1
        if self._tags > MAX_TAGS:
            raise DocumentError(_("has more than {most:,} tags", most=MAX_TAGS))
        if tag in _HIDDEN and self._hidden in ("", tag):
            self._hidden, self._depth = tag, self._depth + 1
        elif tag not in _INLINE:
            self.end_block()
        self._verbatim += tag == "pre"

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:  # noqa: ARG002
        if tag not in _INLINE:
            self.end_block()

    def handle_endtag(self, tag: str) -> None:
        if tag == self._hidden:
            self._depth -= 1
            self._hidden = tag if self._depth else ""
        elif tag not in _INLINE:
            self.end_block()
        self._verbatim -= tag == "pre" and self._verbatim > 0

    def handle_data(self, data: str) -> None:
        if self._hidden:
            return
        if not self._said:
            if not data.strip():
                return
            self._line = self.getpos()[0] + data[: len(data) - len(data.lstrip())].count("\n")
        self._said.append(data)

    def end_block(self) -> None:
        """End the block of text that was begun."""
        said, self._said = "".join(self._said), []
        text = said.strip("\n") if self._verbatim else " ".join(said.split())
        if text:
            self.blocks.append(Section("line", self._line, text))


def blocks(text: str) -> Iterator[Section]:
    """The blocks of visible text of a page, each with its line in the source."""
    page = _Text()
    page.feed(text)
    page.close()
    page.end_block()
    return iter(page.blocks)


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
        raise DocumentError(_("is encrypted: save a copy without a password and attach that"))
    count = len(reader.pages)
    if count > MAX_PAGES:
        raise DocumentError(
            _(
                "has {count:,} pages, and at most {most:,} are read: attach a part of it",
                count=count,
                most=MAX_PAGES,
            )
        )
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
        raise DocumentError(
            ngettext(
                "has {count:,} damaged page of {pages:,}, which can't be read",
                "has {count:,} damaged pages of {pages:,}, which can't be read",
                broken,
                pages=count,
            )
        )
    if empty:
        raise DocumentError(
            ngettext(
                "has no text on its {count:,} page; pictures of text are not read",
                "has no text on its {count:,} pages; pictures of text are not read",
                count,
            )
        )


def _opened(reader: object) -> bool:
    """Whether a file opens with an empty password, as most protected files do."""
    from pypdf import PdfReader
    from pypdf.errors import DependencyError

    assert isinstance(reader, PdfReader)
    try:
        return bool(reader.decrypt(""))
    except (DependencyError, NotImplementedError):
        return False
