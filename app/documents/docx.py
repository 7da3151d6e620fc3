"""DOCX: the paragraphs of a Word document, with the standard library.

The file is a zip archive with XML in it. Both may be bombs: the XML is read up to a limit, whatever size the archive
claims, by a parser that builds no tree and refuses document types, and with them entities.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from typing import BinaryIO, NoReturn
from xml.parsers import expat

from app.documents.sections import Section
from app.errors import DocumentError

PART = "word/document.xml"
MAX_XML = 64_000_000
"""Maximum length of the XML in bytes."""
_WORD = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
_STRICT = "http://purl.oclc.org/ooxml/wordprocessingml/main"
_BLANKS = {"tab": "\t", "br": "\n", "cr": "\n", "noBreakHyphen": "-"}


class _Body:
    """Collects paragraphs from a parser's events."""

    def __init__(self) -> None:
        self.paragraphs: list[str] = []
        self._said: list[str] = []
        self._in_text = False

    def start(self, name: str, attributes: dict[str, str]) -> None:
        del attributes
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
            raise DocumentError("is an archive, not a Word document: unpack it and attach the folder")
        if archive.getinfo(PART).flag_bits & 1:
            raise DocumentError("is encrypted: save a copy without a password and attach that")
        with archive.open(PART) as part:
            content = part.read(MAX_XML + 1)
    if len(content) > MAX_XML:
        raise DocumentError(f"has more than {MAX_XML // 1_000_000} MB of text when it is unpacked")
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
    space, _, tag = name.rpartition(" ")
    return tag if space in (_WORD, _STRICT) else ""


def _refuse_doctype(*_: object) -> NoReturn:
    raise DocumentError("has a document type, which no Word document has")
