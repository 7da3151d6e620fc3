"""`make measurements` with a small instrument in a repository of its own: stopped, resumed, and what makes it old."""

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.lab import jobs, measurements, store
from tests.lab.jobs import Job

INSTRUMENT = """
import sys
from pathlib import Path
from tests.lab.store import RESULTS, Entries

entries = Entries(RESULTS / "counter.json")
entries.about = {"rooms": ["models", "tests/lab/counter.py"]}


def measured(number):
    if number == 1 and Path("stop").exists():
        sys.exit(130)
    with Path("log").open("a") as log:
        log.write(f"{number} ")
    return number


for number in range(3):
    entries.known("numbers", number, lambda: {"value": measured(number)})
entries.finish()
"""
COUNTER = Job("counter", 1, "counter", "numbers")
PEER = Job("other", 1, "other --peer-python {peer}")


def git(*words: str) -> None:
    names = ("-c", "user.name=test", "-c", "user.email=test@example.org")
    subprocess.run(["git", *names, *words], cwd=store.ROOT, check=True, capture_output=True)
    for known in (store.commit, store.is_of):
        known.cache_clear()


def commit(**files: str) -> None:
    for name, text in files.items():
        file = store.ROOT / name.replace("__", "/").replace("_py", ".py").replace("_po", ".po")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    git("add", ".")
    git("commit", "-m", "a step")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with an instrument, and the jobs that know it."""
    results = tmp_path / "tests" / "lab" / "results"
    for module in (store, jobs):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    for module in (measurements, jobs):
        monkeypatch.setattr(module, "RESULTS", results)
    monkeypatch.setattr(jobs, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(jobs, "page", lambda: "the page")
    monkeypatch.setattr(jobs, "JOBS", (PEER, COUNTER))
    results.mkdir(parents=True)
    shutil.copy(Path(store.__file__), tmp_path / "tests" / "lab" / "store.py")
    for folder in (tmp_path / "tests", tmp_path / "tests" / "lab"):
        (folder / "__init__.py").touch()
    (tmp_path / ".gitignore").write_text("log\nstop\n__pycache__\n", encoding="utf-8")
    git("init")
    commit(tests__lab__counter_py=INSTRUMENT, models__code_py="1", docs__page="old")
    yield tmp_path
    for known in (store.commit, store.is_of):
        known.cache_clear()


def log(repository: Path) -> str:
    return (repository / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize("job", jobs.JOBS, ids=str)
def test_an_instrument_can_be_told_which_file_to_fill(job: Job) -> None:
    """`Job.words` names it to all that are not called like their file."""
    module = job.command.split()[0]
    source = (store.ROOT / "tests" / "lab" / f"{module}.py").read_text(encoding="utf-8")
    assert module == job.file or "parser(__doc__" in source


def test_a_stopped_run_goes_on_where_it_was(repository: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (repository / "stop").touch()
    assert jobs.main([]) == 1
    said = capfd.readouterr()
    assert "counter: numbers: ended with status 130" in said.err
    assert "other: left out: needs llama.cpp" in said.out
    assert log(repository) == "0 "

    (repository / "stop").unlink()
    assert jobs.main([]) == 0
    assert log(repository) == "0 1 2 "
    assert (repository / "page.md").read_text(encoding="utf-8") == "the page"


def test_what_is_of_this_code_is_not_measured_again(repository: Path) -> None:
    assert COUNTER.is_old()
    jobs.main([])
    (repository / "docs" / "page").write_text("new", encoding="utf-8")
    commit(tests__lab__results__note="results are written")
    assert not COUNTER.is_old()
    assert jobs.main([]) == 0
    assert log(repository) == "0 1 2 "


def test_words_that_changed_keep_results(repository: Path) -> None:
    jobs.main([])
    told = INSTRUMENT.replace("def measured(number):", 'def measured(  # how\n    number):\n    """It counts."""')
    commit(tests__lab__counter_py=told, models__code_py='"""A number."""\n\n1  # one', models__notes_po="eins")
    assert not COUNTER.is_old()


@pytest.mark.parametrize(
    ("changed", "to"),
    [
        ("models__code_py", '"""A number."""\n2'),
        ("models__other_py", ""),
        ("models__table_json", "[]"),
        ("tests__lab__counter_py", INSTRUMENT.replace("range(3)", "range(0, 3)")),
    ],
)
def test_code_that_changed_makes_its_results_old(repository: Path, changed: str, to: str) -> None:
    jobs.main([])
    commit(**{changed: to})
    assert COUNTER.is_old()
    jobs.main([])
    assert log(repository) == "0 1 2 0 1 2 "


def test_nothing_is_measured_by_code_that_is_not_committed(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "models" / "code.py").write_text("2", encoding="utf-8")
    store.commit.cache_clear()
    assert jobs.main([]) == 2
    assert "commit the code" in capsys.readouterr().err
    assert not (repository / "log").exists()


def test_a_list_measures_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs.main(["--list"]) == 0
    said = capsys.readouterr().out
    assert "| counter: numbers | 1 min |" in said
    assert "0 h 01 min" in said
    assert not (repository / "log").exists()


def test_a_wrong_name_is_said(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        jobs.main(["--only", "counters"])
    assert "no result is called counters" in capsys.readouterr().err


def test_every_table_has_a_job() -> None:
    """What the page shows is measured by `make measurements`."""
    measured = {(job.file, part) for job in jobs.JOBS for part in job.part.split(",")}
    for section in measurements.SECTIONS:
        for file in filter(None, section.file.split(",")):
            parts = section.part.split(",")
            assert {(file, part) for part in parts} <= measured | {(file, "")}, section.title


def test_every_job_names_what_there_is() -> None:
    for job in jobs.JOBS:
        module = jobs.ROOT / "tests" / "lab" / f"{job.command.split()[0]}.py"
        assert module.is_file(), job
