"""Reading documents: every format, its places, and what a hostile file costs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.documents import folders, formats, reading
from app.documents.folders import survey
from app.documents.formats import MAX_CHARACTERS
from app.documents.reader import Reader
from app.documents.sections import MOST, Section, chunks
from app.errors import DocumentError
from tests.app.documents.making import WORD, docx, pdf, zipped


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    found = Reader(section_s=10)
    yield found
    found.close()


def write(folder: Path, name: str, content: bytes | str) -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


HTML = """<!DOCTYPE html>
<html><head><title>Lamps</title><style>p { color: red }</style></head>
<body><h1>Oil &amp; light</h1>
<p>Whale <b>oil</b>
burns.</p><script>alert('x')</script>
<ul><li>one<li>two</ul><a href="http://127.0.0.1:9/x">a link</a><pre>a
  b</pre></body></html>"""


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.txt", "one\r\ntwo\n", [("line", 1, "one\ntwo\n")]),
        ("a.py", b"\xef\xbb\xbfx = 1\n", [("line", 1, "x = 1\n")]),
        ("utf16.txt", "é\n".encode("utf-16"), [("line", 1, "é\n")]),
        ("escape.txt", "a\x1b[31mb\u202ec\x07", [("line", 1, "a␛[31mbc␇")]),
        ("a.pdf", pdf(["Page (one)\nmore", "", "three"]), [("page", 1, "Page (one)\nmore"), ("page", 3, "three")]),
        ("a.docx", docx(["Dear <you>", "", "Yours"]), [("paragraph", 1, "Dear <you>"), ("paragraph", 3, "Yours")]),
        (
            "a.html",
            HTML,
            [
                ("line", 2, "Lamps"), ("line", 3, "Oil & light"), ("line", 4, "Whale oil burns."), ("line", 6, "one"),
                ("line", 6, "two"), ("line", 6, "a link"), ("line", 6, "a\n  b"),
            ],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.startswith(("a.", "utf", "esc")) else "",
)  # fmt: skip
def test_formats(reader: Reader, tmp_path: Path, name: str, content: bytes | str, found: list[object]) -> None:
    path = write(tmp_path, name, content)
    assert [(one.unit, one.first, one.text) for one in reader.read(path)] == found


def bomb() -> bytes:
    """A Word document of some kilobytes that unpacks to 72 MB."""
    text = f'<w:document xmlns:w="{WORD}"><w:body>'.encode() + b"<w:p/>" * 12_000_000
    return zipped({"word/document.xml": text})


ENTITIES = b'<!DOCTYPE a [<!ENTITY b "bb"><!ENTITY c "&b;&b;">]><a>&c;</a>'


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("picture.txt", b"\x89PNG\r\n\0\0", "picture.txt is a binary file"),
        ("latin.txt", "é".encode("latin-1"), "latin.txt is neither UTF-8 nor UTF-16 text"),
        ("empty.md", "\n \n", "empty.md has no text"),
        ("bomb.docx", None, "bomb.docx has more than 64 MB of text when it is unpacked"),
        ("entities.docx", zipped({"word/document.xml": ENTITIES}), "entities.docx has a document type"),
        ("program.zip", zipped({"a": b"b"}), "program.zip is an archive, not a Word document"),
        ("cut.docx", docx(["a"])[:-30], "cut.docx is a binary file"),
        ("cut.pdf", pdf(["a"])[:40], "cut.pdf is damaged: "),
        ("scan.pdf", pdf(["", ""]), "scan.pdf has no text on its 2 pages; pictures of text are not read"),
        ("long.pdf", pdf(["x"] * 5001), "long.pdf has 5,001 pages, and at most 5,000 are read: attach a part of it"),
        ("locked.pdf", None, "locked.pdf is encrypted: save a copy without a password and attach that"),
        ("big.log", None, "big.log has 65 MB, and at most 64 MB are read: attach a part"),
        ("pipe", None, "pipe is a device or a pipe, not a file"),
        ("gone", None, "gone can't be opened: No such file or directory"),
        ("folder", None, "folder is a folder, not a file"),
        ("escape\x1b[2J.txt", b"\0", "escape␛[2J.txt is a binary file"),
    ],
    ids=lambda value: value.partition(".")[0].partition("\x1b")[0] if isinstance(value, str) else "",
)
def test_what_cannot_be_read_costs_one_sentence(
    reader: Reader, tmp_path: Path, name: str, content: bytes | str | None, said: str
) -> None:
    path = tmp_path / name
    if content is not None:
        write(tmp_path, name, content)
    elif name == "bomb.docx":
        path.write_bytes(bomb())
    elif name == "locked.pdf":
        lock(path)
    elif name == "big.log":
        with path.open("wb") as file:
            file.truncate(65_000_000)
    elif name == "pipe":
        os.mkfifo(path)
    elif name == "folder":
        path.mkdir()
    with pytest.raises(DocumentError) as raised:
        reader.text(path)
    assert str(raised.value).startswith(said)
    assert "\n" not in str(raised.value)


def lock(path: Path) -> None:
    """Write a PDF file with a password."""
    import io

    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf(["secret"]))))
    writer.encrypt("password", algorithm="RC4-128")
    writer.write(path)


def test_deep_html_is_read(reader: Reader, tmp_path: Path) -> None:
    text, problem = reader.text(write(tmp_path, "deep.html", "<div>" * 200_000 + "bottom"))
    assert (text, problem) == ("bottom", "")


def test_a_text_that_is_too_long_is_cut_with_a_word(reader: Reader, tmp_path: Path) -> None:
    text, problem = reader.text(write(tmp_path, "long.txt", "word " * (MAX_CHARACTERS // 5 + 10)))
    assert len(text) == MAX_CHARACTERS
    assert problem == "long.txt is longer than 16,777,216 characters; the rest was left out"


def test_a_file_that_changes_while_it_is_read_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "log.txt", "one\n")

    def grows(*_: object) -> Iterator[Section]:
        yield Section("line", 1, "one\n")
        with path.open("a") as file:
            file.write("two\n")

    monkeypatch.setattr(reading, "sections", grows)
    with pytest.raises(DocumentError, match="changed while it was read: attach it again"):
        list(reading.read(path))


def replace_parser(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Let the child find another module that reads PDF files."""
    module = folder / "path" / "pypdf" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(folder / "path"))


@pytest.mark.parametrize("fault", ["hangs", "grows", "crashes"])
def test_a_parser_out_of_control_is_ended_and_the_next_file_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The module that reads PDF files is replaced in the child, as a parser with a defect."""
    body = {
        "hangs": "while True: pass",
        "grows": "x = [b'x' * (1 << 20) for _ in range(5000)]",
        "crashes": "os._exit(3)",
    }
    parser = f"import os\nclass PdfReader:\n    def __init__(self, _): \n        {body[fault]}\n"
    replace_parser(tmp_path, monkeypatch, parser)
    own = Reader(section_s=2.5 if fault == "hangs" else 30)  # a busy machine reads good.txt in this time, too
    try:
        with pytest.raises(DocumentError) as raised:
            own.text(write(tmp_path, "evil.pdf", pdf(["x"])))
        told = "needs too much memory to be read" if fault == "grows" else "was given up: reading it took too long"
        assert str(raised.value).startswith(f"evil.pdf {told}")
        assert own.text(write(tmp_path, "good.txt", "fine")) == ("fine", "")
    finally:
        own.close()


def test_reading_can_be_ended_from_another_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parser(tmp_path, monkeypatch, "while True: pass\n")
    own = Reader()
    children = {child.pid for child in psutil.Process().children()}
    timer = threading.Timer(0.5, own.kill)
    timer.start()
    begun = time.monotonic()
    with pytest.raises(DocumentError, match="was given up"):
        own.text(write(tmp_path, "evil.pdf", pdf(["x"])))
    assert time.monotonic() - begun < 15
    own.close()
    timer.join()
    assert {child.pid for child in psutil.Process().children()} <= children


def test_a_folder_is_walked_without_following_anything(tmp_path: Path) -> None:
    for name in ("b/c/deep.txt", "a.txt", ".git/config", "node_modules/x.js", "env/pyvenv.cfg", "cache/CACHEDIR.TAG"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "b" / "loop").symlink_to(tmp_path, target_is_directory=True)
    (tmp_path / "link.txt").symlink_to(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "pipe")
    found = survey(tmp_path)
    assert [file.name for file in found.files] == ["a.txt", "b/c/deep.txt"]
    assert found.skipped == {"links": 2, "devices and pipes": 1}


def test_a_folder_has_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MAX_FILES", 3)
    monkeypatch.setattr(folders, "DEEPEST", 2)
    for n in range(5):
        (tmp_path / f"{n}.txt").write_text("x")
    (tmp_path / "1" / "2" / "3").mkdir(parents=True)
    found = survey(tmp_path)
    assert len(found.files) == 3
    assert found.skipped == {"files beyond the first 3": 2, "folders more than 2 deep": 1}


def test_unreadable_folders_and_names_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "secret").mkdir()
    (tmp_path / "fine.txt").write_text("x")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff.txt"))).write_text("x")
    scan = os.scandir

    def denied(path: Path) -> object:
        if path.name == "secret":
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", denied)
    found = survey(tmp_path)
    assert [file.name for file in found.files] == ["fine.txt"]
    assert found.skipped == {"unreadable folders": 1, "names that are not valid Unicode": 1}
    with pytest.raises(DocumentError, match="secret can't be read: Permission denied"):
        survey(tmp_path / "secret")


def test_passages_keep_their_lines() -> None:
    lines = [f"line {n} " + "x" * (n % 90) if n % 7 else "" for n in range(1, 400)]
    cut = list(chunks([Section("line", 1, "\n".join(lines))]))
    assert all(len(one.text) <= MOST for one in cut)
    for one in cut:
        assert one.text == "\n".join(lines[one.first - 1 : one.last])
    kept = [line for one in cut for line in one.text.split("\n") if line]
    assert kept == [line for line in lines if line]


def test_a_long_line_is_not_copied_for_each_of_its_passages() -> None:
    class Line(str):
        taken: list[int]

        def split(self, *_: Any) -> list[str]:  # type: ignore[override]
            return [self]

        def __getitem__(self, place: Any) -> str:
            part = super().__getitem__(place)
            self.taken.append(len(part))
            return part

    line = Line("😀" * 100_000)
    line.taken = []
    assert "".join(one.text for one in chunks([Section("line", 1, line)])) == line
    assert sum(line.taken) == len(line)


def test_documents_of_very_many_parts_are_given_up_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert formats.MAX_ELEMENTS == formats.MAX_TAGS == 2_000_000
    monkeypatch.setattr(formats, "MAX_ELEMENTS", 200_000)
    monkeypatch.setattr(formats, "MAX_TAGS", 200_000)
    many = zipped({"word/document.xml": b"<a>" + b"<b/>" * 200_001 + b"</a>"})
    for name, content in (("a.docx", many), ("a.html", "<p>" * 200_001)):
        with pytest.raises(DocumentError, match="more than 200,000"):
            list(reading.read(write(tmp_path, name, content)))
    monkeypatch.setattr(reading, "MAX_SECTIONS", 3)
    found = []
    with pytest.raises(DocumentError, match="more than 3 paragraphs; the rest"):
        found.extend(reading.read(write(tmp_path, "b.docx", docx(["x"] * 9))))
    assert len(found) == 3


def test_passages_of_a_single_long_line() -> None:
    text = "word " * 2000
    cut = list(chunks([Section("line", 5, text)]))
    assert {(one.first, one.last) for one in cut} == {(5, 5)}
    assert "".join(one.text for one in cut).replace("\n", "") == text
    (pages,) = chunks([Section("page", 3, "x" * 10), Section("page", 4, "y")])
    assert (pages.first, pages.last) == (3, 4)
    assert list(chunks([Section("line", 1, " \n\n")])) == []
