"""Mutation tests: `python -m tests.lab.mutations` breaks the code on purpose, one place at a time.

mutations.toml lists the mutations, each with the test files that must catch it. All is done in a copy, never in the
working tree: tests are run there as they are and have to pass, then for each break until the first of them fails: the
test that noticed it last time, by mutations.json, and only where that does not, or is not there any more, all tests of
the break's files. Two copies are worked on at the same time. A break that no test notices is a gap in the suite.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

from tests.lab.store import RESULTS, ROOMS, ROOT, commit, parser, read, today, write

LIST = Path(__file__).with_name("mutations.toml")
COPIES = 2
LONGEST_S = 3600
"""Unbroken tests that take longer hang."""
SLOWER, GRACE_S = 3, 60
"""Broken tests hang, which counts as noticed, after so many times what the unbroken ones took, and this on top."""
_FAILED, _NOT_COLLECTED = 1, 2
"""How pytest ends when a test fails, or when a module cannot be imported."""


class MutationError(Exception):
    """The list of breaks does not fit the code, or the tests fail without any break."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """A defect: a text that occurs in a file exactly once, and its replacement."""

    name: str
    """What is wrong then, in a few words; unique."""
    room: str
    """Part of the program."""
    file: str
    """Path in the repository."""
    old: str
    """The text."""
    new: str
    """What it becomes."""
    tests: tuple[str, ...]
    """Files of tests that are to notice it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the tests made of a break."""

    name: str
    room: str
    file: str
    tests: tuple[str, ...]
    caught: bool
    by: str
    """The first test that failed; empty where none did."""
    seconds: float


def read_breaks(file: Path = LIST) -> tuple[Break, ...]:
    """The list of breaks.

    Raises:
        MutationError: two have one name, or a key is missing or unknown.
    """
    found = []
    for entry in tomllib.loads(file.read_text(encoding="utf-8"))["break"]:
        try:
            found.append(Break(**{**entry, "tests": tuple(entry["tests"])}))
        except (KeyError, TypeError) as error:
            raise MutationError(
                f"{file.name}: the break {entry.get('name', '?')!r} is not complete: {error}"
            ) from error
    names = [one.name for one in found]
    if twice := {name for name in names if names.count(name) > 1}:
        raise MutationError(f"{file.name}: two breaks are called {min(twice)!r}")
    return tuple(found)


def check(one: Break, folder: Path) -> None:
    """See that a break fits a copy of the repository.

    Raises:
        MutationError: its text stands nowhere, or more than once, or a file of its tests is not there.
    """
    if absent := [name for name in (one.file, *one.tests) if not (folder / name).is_file()]:
        reason = f"{absent[0]} is not there"
    elif (count := (folder / one.file).read_text(encoding="utf-8").count(one.old)) != 1:
        reason = f"{one.file} holds its text {count} times"
    elif one.new == one.old:
        reason = "it changes nothing"
    else:
        return
    raise MutationError(f"the break {one.name!r} does not fit: {reason}. Bring {LIST.name} up to date")


def make_copy(folder: Path) -> Path:
    """A copy of the working tree with nothing that was built; compiled kernels of earlier runs stay.

    Args:
        folder: Where; its former copy is replaced.

    Returns:
        The copy. The real models and texts, where they lie beside the repository, lie beside it too.
    """
    copy, kept = folder / "repository", folder / "kept"
    shutil.rmtree(copy, ignore_errors=True)
    copy.mkdir(parents=True)
    kept.mkdir(exist_ok=True)
    for name in filter(None, _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    subprocess.run(["git", "init", "-q"], cwd=copy, check=True)  # some tests ask git for the files of a clone
    (copy / ".pytest_cache").symlink_to(kept)
    if (ROOT.parent / "shared").is_dir() and not (folder / "shared").exists():
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
    return copy


def run_tests(copy: Path, files: Sequence[str], longest_s: float = LONGEST_S) -> tuple[bool, str]:
    """Run test files of a copy until one fails. Returns whether all passed, and what pytest said at its end."""
    command = (sys.executable, "-m", "pytest", "-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist")
    try:
        # Bytecode is told apart by a file's time and size, which a break may leave as they were.
        with tempfile.TemporaryDirectory() as bytecode:
            done = subprocess.run(
                [*command, *files],
                cwd=copy,
                env={**os.environ, "PYTHONPATH": str(copy), "PYTHONPYCACHEPREFIX": bytecode},
                capture_output=True,
                text=True,
                timeout=longest_s,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return False, f"FAILED (still running after {longest_s:.0f} s)"
    if done.returncode < 0:
        return False, f"FAILED (ended by signal {-done.returncode})"
    if done.returncode not in (0, _FAILED, _NOT_COLLECTED):
        raise MutationError(
            f"pytest {' '.join(files)} ended with {done.returncode}: {(done.stdout + done.stderr)[-2000:]}"
        )
    return done.returncode == 0, done.stdout[-4000:]


def try_break(one: Break, copy: Path, longest_s: float = LONGEST_S, tests: Sequence[str] = ()) -> Outcome:
    """Break a copy in one place, run its tests, or the ones given, for so long at most, and mend it again."""
    file = copy / one.file
    stamp, whole = file.stat(), file.read_text(encoding="utf-8")
    begin = time.monotonic()
    try:
        file.write_text(whole.replace(one.old, one.new), encoding="utf-8")
        passed, said = run_tests(copy, tests or one.tests, longest_s)
    finally:
        file.write_text(whole, encoding="utf-8")
        os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # what was compiled of it fits again
    by = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", said, re.MULTILINE)
    return Outcome(
        name=one.name,
        room=one.room,
        file=one.file,
        tests=one.tests,
        caught=not passed,
        by="" if passed else by[1] if by else "(no summary)",
        seconds=round(time.monotonic() - begin, 1),
    )


def measure(breaks: Sequence[Break], copy: Path, noticed: Mapping[str, str] | None = None) -> list[Outcome]:
    """Try all breaks, one after the other.

    Args:
        breaks: What to try.
        copy: The code, and its tests.
        noticed: The tests that noticed breaks before, by their names.

    Raises:
        MutationError: a break does not fit, or the tests fail without one.
    """
    for one in breaks:
        check(one, copy)
    first = {one.name: test for one in breaks if _is_there(test := (noticed or {}).get(one.name, ""), copy)}
    took: dict[tuple[str, ...], float] = {}

    def longest_s(*tests: str) -> float:
        """What broken tests may take, by what they take as they are."""
        if tests not in took:
            begin = time.monotonic()
            passed, said = run_tests(copy, tests)
            took[tests] = time.monotonic() - begin
            print(f"unbroken: {', '.join(tests)}: {said.splitlines()[-1] if said else ''}", flush=True)
            if not passed:
                raise MutationError(f"{', '.join(tests)} fails without any break:\n{said}")
        return GRACE_S + SLOWER * took[tests]

    outcomes = []
    for number, one in enumerate(breaks, 1):
        outcome = None
        if test := first.get(one.name, ""):
            file = test.partition("::")[0]  # a file's tests are run unbroken together
            alike = dict.fromkeys(other for other in first.values() if other.startswith(f"{file}::"))
            outcome = try_break(one, copy, longest_s(*alike), [test])
        if outcome is None or not outcome.caught:
            outcome = try_break(one, copy, sum(longest_s(file) for file in one.tests))
        outcomes.append(outcome)
        verdict = f"caught by {outcome.by}" if outcome.caught else "SURVIVED"
        print(f"{number:3}/{len(breaks)} {outcome.seconds:6.1f} s  {one.room}: {one.name}: {verdict}", flush=True)
    return outcomes


def _is_there(test: str, copy: Path) -> bool:
    """Whether a test, `file::name`, is in a copy."""
    file, _, name = test.partition("::")
    return bool(name) and (copy / file).is_file() and f"def {name}(" in (copy / file).read_text(encoding="utf-8")


def report(outcomes: Sequence[Outcome]) -> dict[str, object]:
    """What is written down of a run."""
    return {
        "command": "python -m tests.lab.mutations",
        "commit": commit(),
        "rooms": ["app", *ROOMS],
        "date": today(),
        "python": platform.python_version(),
        "caught": sum(outcome.caught for outcome in outcomes),
        "survived": [outcome.name for outcome in outcomes if not outcome.caught],
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 1),
        "breaks": [asdict(outcome) for outcome in outcomes],
    }


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns its exit status."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", metavar="TEXT", help="breaks whose room or name holds one of these")
    place = Path(tempfile.gettempdir()) / "lowbit-chat-mutations"
    options.add_argument("--folder", type=Path, default=place, help="where the copy is made")
    given = options.parse_args(arguments)
    try:
        breaks = read_breaks()
        if given.only:
            breaks = tuple(one for one in breaks if any(part in f"{one.room}: {one.name}" for part in given.only))
        before = read(RESULTS / "mutations.json").get("breaks", ())
        noticed = {one["name"]: one["by"].partition("[")[0] for one in before}
        files = list(dict.fromkeys(one.tests[0] for one in breaks))
        shares = [[one for one in breaks if files.index(one.tests[0]) % COPIES == copy] for copy in range(COPIES)]
        copies = [make_copy(given.folder.resolve() / str(copy)) for copy in range(COPIES)]
        with ThreadPoolExecutor(COPIES) as pool:
            outcomes = [*chain(*pool.map(lambda own, copy: measure(own, copy, noticed), shares, copies))]
    except MutationError as error:
        print(error, file=sys.stderr)
        return 2
    found = report(outcomes)
    print(f"{found['caught']} of {len(outcomes)} breaks caught in {found['seconds']} s", *found["survived"], sep="\n")
    write(given.out or (None if given.only else RESULTS / "mutations.json"), found)
    return 1 if found["survived"] else 0


if __name__ == "__main__":
    sys.exit(main())
