"""Tables of the pages: they match the results files, and identify the code behind them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.bench import pages
from tests.bench.caches import report as caches_report
from tests.bench.caches.laboratory import Codes
from tests.bench.caches.view import View as CachesView
from tests.bench.quality import report as quality_report
from tests.bench.quality.measure import tuning_code
from tests.bench.quality.points import cases
from tests.bench.quality.view import View as QualityView
from tests.bench.reporting import origin
from tests.bench.reporting.results import Results

PLAIN = '''"""A module."""

from runtime.kv import pages


class One:
    """A class."""

    size: int = 4
    """Bytes."""

    def twice(self) -> int:
        """Twice that."""
        return 2 * self.size
'''
TABLES = list(pages.tables())


def shown(page: Path, name: str) -> str:
    """What stands between the markers of a page, without the line about the code."""
    text = page.read_text(encoding="utf-8")
    inside = text.split(f"<!-- {name}: begin -->")[1].split(f"<!-- {name}: end -->")[0]
    return without_origin(inside)


def without_origin(text: str) -> str:
    """A table without the line about the code, which changes with it."""
    return "\n".join(line for line in text.splitlines() if not line.startswith("*Measured")).strip()


@pytest.mark.parametrize("one", TABLES, ids=[one.name for one in TABLES])
def test_a_page_shows_what_the_results_file_holds(one: pages.Table) -> None:
    assert shown(one.page, one.name) == without_origin(one.content())


def test_the_readme_shows_what_the_results_files_hold() -> None:
    assert shown(pages.README, "numbers") == without_origin(pages.numbers())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quality", "kv"])
def test_a_report_is_what_its_results_file_makes(tmp_path: Path, name: str) -> None:
    page, written = pages.DOCS / f"{name}.md", tmp_path / f"{name}.md"
    results = Results(pages.DOCS / name / "results.json")
    if name == "kv":
        caches_report.write(CachesView(results), written)
    else:
        written.write_text(page.read_text(encoding="utf-8"), encoding="utf-8")  # its section on W4A8 stays
        quality_report.write(QualityView(results, cases()), written)
    found, expected = (without_code(file.read_text(encoding="utf-8")) for file in (page, written))
    assert found == expected


def without_code(text: str) -> str:
    """A report without what it says of the code, which changes with it."""
    return re.sub(r"\S*\d+( of \d+)? entries[^.;]*[.;][^.]*\.?", "", without_origin(text)).replace(origin.OLD, "")


def test_a_digest_misses_no_file_that_was_moved() -> None:
    assert origin.code_of_patterns("runtime", ("errors.py", "kv/*.py")) != origin.code_of_patterns(
        "runtime", ("kv/*.py",)
    )
    with pytest.raises(ValueError, match=r"runtime has no nowhere\.py"):
        origin.code_of_patterns("runtime", ("errors.py", "nowhere.py"))
    assert Codes.now().cpu
    assert tuning_code()


def test_a_digest_is_of_what_code_does(tmp_path: Path) -> None:
    def digest(*sources: str) -> str:
        files = [tmp_path / f"{number}.py" for number in range(len(sources))]
        for file, source in zip(files, sources, strict=True):
            file.write_text(source, encoding="utf-8")
        return origin.digest_code(files)

    told_otherwise = PLAIN.replace("Twice that.", "The double.").replace("Bytes.", "In bytes.") + "\n# The end.\n"
    moved = PLAIN.replace("from runtime.kv import", "from runtime.kv.store import")
    assert {digest(told_otherwise), digest(moved)} == {digest(PLAIN)}
    for old, new in (
        ("2 *", "3 *"),
        ("= 4", "= 8"),
        ("import pages", "import kinds"),
        ("import pages", "import kinds as pages"),
    ):
        assert digest(PLAIN.replace(old, new)) != digest(PLAIN)
    assert digest(PLAIN, "x = 1") == digest("x = 1", PLAIN) != digest(PLAIN)
    empty = 'def f(a, *b):\n    """Text."""\n    return [a, {}]\n\n\nclass C: ...\n'
    assert digest(empty) == "902bd07a26525a2c"  # by every version of Python


def test_a_line_says_when_where_and_whether_the_code_is_still_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "code_of", lambda *rooms: f"now of {rooms}")
    monkeypatch.setattr(origin, "commit", lambda: "abc1234")
    now: dict[str, Any] = {"date": "2026-01-02T03:04:05", **origin.stamp(["runtime"])}
    before, unknown = {**now, "date": "2026-01-01", "code": "before"}, {"date": "2026-01-01"}
    assert [origin.is_old(one) for one in (now, before, unknown)] == [False, True, True]
    same = "*Measured on 2026-01-02 at abc1234, by the code that wrote this page.*"
    assert origin.line([now], 0) == same
    assert origin.line([before], 1) == "*Measured on 2026-01-01 at abc1234; the code has changed since.*"
    assert origin.line([unknown], 1) == "*Measured on 2026-01-01, by a version of the code that was not recorded.*"
    mixed = (
        "*Measured 2026-01-01 to 2026-01-02 at abc1234; of 1 of 2 measurements, marked †, the code has changed since.*"
    )
    assert origin.line([now, before], 1) == mixed
    assert origin.line([], 0) == ""
