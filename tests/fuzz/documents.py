"""Readers of documents: PDF, Word, HTML and text files, as the reader's child process reads them."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hypothesis import strategies as st

from app.conversation import Passage
from app.documents.prompt import with_passages
from app.documents.reading import read
from app.documents.sections import chunks
from app.errors import DocumentError
from tests.app.documents.making import docx, pdf
from tests.fuzz.mutation import damaged
from tests.fuzz.reader import Reader

HTML = b"""<!DOCTYPE html><html><head><title>A</title><style>p { }</style></head><body><!-- c --><h1>B &amp; &#x41;</h1>
<p>C <b>d</b><br/><script>e</script><pre>f\n  g</pre><table><tr><td>h</table><![CDATA[i]]><?j k?></body></html>"""
TEXT = "# A\n\nb ```c``` d\r\ne\u2028f \u65e5\u672c\n".encode()
PIECES = ("<div>" * 2000, "<!", "<![", "<?", "</", "&#", "&#99999999;", "<script>", "<p " + "a=" * 500, "\0", "\x1b[2J")
PDF = pdf(["One (two)\nthree", "four"])
DOCX = docx(["One", "two & three"])


def repacked(document: bytes) -> bytes:
    """A damaged XML document in a sound archive."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("word/document.xml", document)
    return file.getvalue()


def _xml() -> bytes:
    with zipfile.ZipFile(io.BytesIO(DOCX)) as archive:
        return archive.read("word/document.xml")


def inserted(sound: bytes) -> st.SearchStrategy[bytes]:
    """A text with pieces of markup in some places."""
    places = st.lists(st.tuples(st.integers(0, len(sound)), st.sampled_from(PIECES)), max_size=4)

    def put(found: list[tuple[int, str]]) -> bytes:
        text = sound
        for at, piece in found:
            text = text[:at] + piece.encode() + text[at:]
        return text

    return places.map(put)


@contextmanager
def documents(folder: Path) -> Iterator[Reader]:
    """A file of the name in the first line, read, cut into passages and quoted."""

    def read_one(content: bytes) -> None:
        name, _, body = content.partition(b"\n")
        path = folder / name.decode()
        path.write_bytes(body)
        try:
            for one in chunks(read(path)):
                passage = Passage(file=path.name, unit=one.unit, first=one.first, last=one.last, text=one.text)
                quoted = with_passages("q", [passage])
                assert "\x1b" not in quoted
                quoted.encode()
        finally:
            path.unlink()

    kinds = {
        b"a.pdf": damaged(PDF),
        b"a.docx": damaged(DOCX) | damaged(_xml()).map(repacked),
        b"a.html": damaged(HTML) | inserted(HTML),
        b"a.txt": damaged(TEXT) | inserted(TEXT) | st.binary(max_size=200),
    }
    sound = tuple(
        name + b"\n" + body for name, body in {b"a.pdf": PDF, b"a.docx": DOCX, b"a.html": HTML, b"a.txt": TEXT}.items()
    )
    inputs = [made.map(lambda body, name=name: name + b"\n" + body) for name, made in kinds.items()]
    yield Reader(sound=sound, inputs=st.one_of(inputs), read=read_one, errors=(DocumentError,))
