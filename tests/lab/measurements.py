"""docs/measurements.md, made whole from the stored results. Nothing is measured (jobs.py does that).

    python -m tests.lab.measurements

Each table names its command, date, commit and machine. The page begins with the tables that are older than the last
change of the rooms whose code decides them, and those whose run was stopped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from models.recipe import DEFAULT_METHOD, Recipe
from models.store.certificate import CACHE_LIMIT
from runtime.engine.gamma import Costs, break_even
from tests.lab import cpu_code, devices, installations, tasks, tuned
from tests.lab.kernels import on_laptops, products, summary
from tests.lab.models import REAL
from tests.lab.quality import ALL_RESIDUALS, COMPARED, RESIDUALS, SELECTORS
from tests.lab.store import RESULTS, ROOMS, ROOT, is_of, number, read, table

PAGE = ROOT / "docs" / "measurements.md"
PEER = "llama.cpp"
Found = Mapping[str, Any]
"""A results file, or a part of one."""
Entries = Sequence[Found]
_INTRODUCTION = """# Measurements

Every table is made from a file in `tests/lab/results` by `make measurements`; the line below it says what measured
it, when, at which commit (`+`: with changes) and on which machine. SmolLM2 is SmolLM2-135M-Instruct, "full
precision" its Q4_1 weights dequantized, which is the only form of it that is at hand; perplexities are of WikiText-2's
test text, where nothing else is said, and lower is better. `k_chunk` is the number of salient channels of 1024 that are
compensated. Other shapes have random weights. These machines are shared: times are medians, compared within one run."""


@dataclass(frozen=True, slots=True)
class Section:
    """A table of the page."""

    title: str
    file: str
    """The results file, without its ending; several, with commas between; empty: it is computed for the page."""
    make: Callable[[Any], str]
    """Takes what is stored, of several files a list, and makes the table."""
    part: str = ""
    """The part of the file that it gets; or sections of entries, with commas between, that it is of."""
    note: str = ""

    def stored(self) -> Any:
        """What is stored."""
        files = [read(RESULTS / f"{name}.json") for name in self.file.split(",")]
        return files if len(files) > 1 else files[0].get(self.part, files[0])

    def runs(self) -> Entries:
        """The runs that measured it."""
        return [run for name in self.file.split(",") if name for run in runs(name, self.part)]

    def origin(self) -> str:
        """Where the numbers come from, in a line."""
        runs = [run for run in self.runs() if run]
        if not runs:
            return "*Computed with this page: `python -m tests.lab.measurements`*"
        days = sorted({str(run["date"])[:10] for run in runs})
        commits = sorted({str(run["commit"]) for run in runs if run.get("commit")})
        machine = " and ".join(sorted({str(run.get("cpu") or run.get("device", "")) for run in runs}))
        command = str(runs[-1].get("command", f"python -m tests.lab.{self.file.split(',')[0]}"))
        when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        name = command.split("tests.")[1].split()[0].removeprefix("bench.").removeprefix("lab.")
        said = f"`python -m tests.lab.{'compare' if name == 'peers.compare' else name}`"
        return f"*{', '.join(part for part in (when, *commits[:3], machine) if part)}: {said}*"


def runs(file: str, part: str = "") -> Entries:
    """What a results file, or some parts of it, says of date, commit, machine and command, once for each run.

    Args:
        file: Its name, without the ending.
        part: A part of the file; or sections of entries, with commas between. One that is absent is an empty run.
    """
    found = read(RESULTS / f"{file}.json")
    if "sections" in found:  # entries that were measured one by one
        entries = [(name, entry) for name in part.split(",") for entry in found["sections"].get(name) or [{}]]
        late = found.get("unfinished", ())
        about = {**found["about"], "commit": ""}
        return [{**about, **entry, "unfinished": name in late} if entry else {} for name, entry in entries]
    if "models" in found:
        return [found["models"][REAL]["run"]]  # whose rows alone are shown
    own = found.get(part, {}) if part else found
    return [own.get("about", own)]


def is_old(run: Found) -> bool:
    """Whether code that decides the numbers has changed since a run, or is not known, or the run was not finished."""
    return bool(run.get("unfinished")) or not is_of(str(run.get("commit") or ""), tuple(run.get("rooms") or ROOMS))


def chats(found: Found) -> str:
    """SmolLM2 as a chat gets it: bytes, perplexity and KL by what is compensated, beside llama.cpp's types."""
    sections = found["sections"]
    close = _one(sections["closeness"], model=REAL)["rows"]
    full = _one(sections["full"], model=REAL, as_chat=True)["perplexity"]
    rows: list[Sequence[object]] = [
        ("full precision", f"{538060032 / 2e6:.1f}", number(full), *[""] * 5, "1.000", "0", "", "")
    ]
    ways = ((0, 0), (16, 0), (64, 0), (16, ALL_RESIDUALS), (64, ALL_RESIDUALS))
    for bits in (3, 4):
        for method in ("trellis", DEFAULT_METHOD, "rtn"):
            stored = _one(sections["stored"], model=REAL, method=method, bits=bits)
            cells = [_point(found, method, bits, k, as_chat=True, prompt_k_chunk=prompts) for k, prompts in ways]
            bought = _maybe(sections["budgets"], method=method, bits=bits, budget_percent=5.0)
            ratio = f"{cells[-1]['perplexity'] / full:.3f}" if cells[-1] else ""
            size = f"{stored['gpu_bytes'] / 1e6:.1f}"
            apart = (_closeness(close, method=method, bits=bits, k_chunk=k) for k in (0, 16, 64))
            rows.append((f"{bits} bits, {method}", size, *map(_perplexity, cells), _perplexity(bought), ratio, *apart))
    for row in sorted(_one(sections["peers"], model=REAL)["rows"], key=lambda row: row["gpu_bytes"]):
        if row["kind"] != "F32":
            value, size = row["chat"]["perplexity"], f"{row['gpu_bytes'] / 1e6:.1f}"
            name = f"{PEER} {row['kind']}"
            apart = (_closeness(close, method=name), "", "")
            rows.append((name, size, number(value), *[""] * 5, f"{value / full:.3f}", *apart))
    head = ("", "MB", "nothing", "decoding 16", "decoding 64", "and prompts, 16", "64", "within 5 %", "× full")
    return table((*head, "KL, nothing", "KL, 16", "KL, 64"), rows)


def _closeness(rows: Entries, **wanted: object) -> str:
    """KL in nats a token, and how often the same token leads; empty where it was not measured."""
    own = _maybe(rows, **wanted)
    return f"{own['kl']:.3f} · {own['same']:.0f} %" if own else ""


def closeness(found: Found) -> str:
    """How close a real model's next tokens are to full precision's, by bytes; perplexity where it was measured."""
    entries = [row for one in found["sections"]["closeness"] for row in one.get("rows", [one])]
    with_perplexity = all("perplexity" in one for one in entries)
    rows = [
        (
            one["method"] if "bits" not in one else f"{one['bits']} bits, {one['method']}, k_chunk {one['k_chunk']}",
            f"{one['gpu_bytes'] / 1e6:.1f}" if "gpu_bytes" in one else "",
            f"{one['kl']:.3f}",
            f"{one['same']:.1f} %",
            *([_perplexity(one)] if with_perplexity else ()),
        )
        for one in sorted(entries, key=lambda one: (one.get("gpu_bytes", 1e12), -one["kl"]))
    ]
    head = ("", "MB", "KL, nats a token", "same top token", *(["perplexity"] if with_perplexity else ()))
    return table(head, rows)


def budgets(found: Found) -> str:
    """What slowdown budgets buy."""
    full = _one(found["sections"]["full"], model=REAL, as_chat=True)["perplexity"]
    rows = [
        (
            *(f"{one['bits']:g}, {one['method']}", f"{one['budget_percent']:g} %", number(one["perplexity"])),
            f"{one['perplexity'] / full:.3f}",
            *(f"{one[name]:.1f} %" for name in ("slowdown_percent", "prompt_slowdown_percent")),
        )
        for one in sorted(
            found["sections"]["budgets"], key=lambda one: (one["bits"], one["method"], one["budget_percent"])
        )
    ]
    return table(("bits", "budget", "perplexity as a chat", "× full", "tuner's slowdown", "of prompts"), rows)


def methods(found: Found) -> str:
    """All methods at 3 bits, plain and as a chat."""
    rows = []
    for method in dict.fromkeys(one["method"] for one in found["sections"]["points"] if one["model"] == REAL):
        cells = [_point(found, method, 3, k, as_chat=False) for k in (0, 16, 64)]
        cells += [
            _point(found, method, 3, k, as_chat=True, prompt_k_chunk=ALL_RESIDUALS * (k > 0)) for k in (0, 16, 64)
        ]
        made = _maybe(found["sections"]["stored"], model=REAL, method=method, bits=3, residual_bits=4)
        took = (f"{made['seconds']:.0f}", f"{made['peak_bytes'] / 2**20:.0f}") if made else ("", "")
        rows.append((method, *map(_perplexity, cells), *took))
    return table(("", "plain, 0", "16", "64", "chat, 0", "16", "64", "seconds to quantize", "peak MiB"), rows)


def selectors(found: Found) -> str:
    """How salient channels are chosen (QDEC Fig. 15 and 16)."""
    rows = []
    for method, k_chunk in itertools.product(COMPARED, (16, 64)):
        entries = [_point(found, method, 3, k_chunk, as_chat=False, select=select) for select in SELECTORS]
        if all(entries):
            recall = f"{100 * entries[0]['recall']:.0f} %" if entries[0]["recall"] else ""
            rows.append((method, k_chunk, *map(_perplexity, entries), recall))
    return table(("", "k_chunk", "approximate", "exact", "static", "random", "recall"), rows)


def residuals(found: Found) -> str:
    """Bits of the residuals at equal bytes (QDEC Table 1)."""
    rows = []
    for method, place in itertools.product(COMPARED, (0, 1)):
        entries = [
            (_point(found, method, 3, numbers[place], as_chat=False, residual_bits=bits), numbers[place])
            for bits, numbers in RESIDUALS.items()
        ]
        if all(entry for entry, _ in entries):
            rows.append([method, *(f"{_perplexity(entry)} ({k_chunk})" for entry, k_chunk in entries)])
    return table(["", *(f"{bits} bits" for bits in RESIDUALS)], rows)


def w4a8(found: Found) -> str:
    """QoQ beside AWQ over a 4-bit cache (QServe Table 2, Fig. 12)."""
    cells: dict[str, list[str]] = {}
    for entry in sorted(found["sections"]["qoq"], key=lambda one: one["as_chat"]):
        if entry["model"] == REAL and entry["kv"] == "int4":
            recipe = Recipe.from_json(entry["recipe"])
            steps = ", ".join(name for name, on in entry["recipe"].items() if on is True)
            kind = f"group of {recipe.group_size}" if recipe.group_size else "per channel"
            cells.setdefault(f"{recipe.method}, {kind}{': ' * bool(steps)}{steps}", []).append(_perplexity(entry))
    return table(("", "plain", "as a chat"), sorted((name, *own) for name, own in cells.items()))


def caches(found: Found) -> str:
    """Bytes, losses of SmolLM2 by length of the window, and speeds at 32k."""
    sections = found["sections"]
    losses = [one for one in sections["perplexity"] if one["backend"] == "cpu" and one["weights"] == "4-bit"]
    speed = {row["kind"]: row["p50"] for row in _one(sections["speed"], tokens=32768)["rows"]}
    rows = []
    for kind in ("fp16", "int8", "hierarchical", "int4", "gear4", "gear2", "kivi2", *(k for k in speed if PEER in k)):
        cells = []
        for model in ("smollm2", "smollm2-2k", "smollm2-4k", "smollm2-8k", "smollm2-book"):
            own, base = (_maybe(losses, model=model, kind=name) for name in (kind, "fp16"))
            loss = f"{100 * (own['perplexity'] / base['perplexity'] - 1):+.2f} %" if own and base else ""
            cells.append(_perplexity(own) if kind == "fp16" else loss)
        size = _maybe(sections["size"], kind=kind, head_dim=64)
        percent = f"{size['reference 32768']:.0f} %" if size else ""
        check = _one(sections["checks"], model=REAL).get(kind)
        cells.append(f"{check['kl']:.3f} · {check['same_percent']:.0f} %" if check else "")
        rows.append((kind, percent, *cells, f"{1 / speed[kind]:.0f}" if kind in speed else ""))
    return table(("", "bytes", "1k", "2k", "4k", "8k", "Moby-Dick, 1k", "KL", "tokens/s at 32k"), rows)


def cache_steps(found: Found) -> str:
    """GEAR's corrections over backbones as the paper has them, and as they are here (GEAR Fig. 1, Table 1)."""
    entries = found["sections"]["steps"]
    ways = list(dict.fromkeys((one["rank"], one["outliers_percent"]) for one in entries))
    rows = []
    for name, n_b in dict.fromkeys((one["backbone"], one["n_b"]) for one in entries):
        own = (_maybe(entries, backbone=name, n_b=n_b, rank=rank, outliers_percent=share) for rank, share in ways)
        rows.append((name, n_b, *map(_perplexity, own)))
    return table(("backbone", "n_b", *(f"rank {rank}, {share} % outliers" for rank, share in ways)), rows)


def cache_checks(found: Found) -> str:
    """What each kind loses along answers of a model, and the kind that follows as its default."""
    rows = []
    for one in found["sections"]["checks"]:
        losses = (f"{one[kind]['kl']:.3f} · {one[kind]['same_percent']:.0f} %" for kind in ("int4", "int8", "fp16"))
        rows.append((one["model"], *losses, f"`{one['default']}`", f"{one['processor_s']:.1f}"))
    return table(("", "int4: KL, same top token", "int8", "fp16", "default", "processor s"), rows)


def cache_memory(found: Found) -> str:
    """Bytes of caches and peaks of processes, by context."""
    entries = found["sections"]["memory"]
    contexts = sorted({one["context"] for one in entries})
    rows = []
    for kind in dict.fromkeys(one["kind"] for one in entries):
        known = [_maybe(entries, kind=kind, context=context) for context in contexts]
        rows.append((kind, *(f"{one[field] / 1e6:.0f}" if one else "" for one in known for field in _MB)))
    head = (f"{context:,} tokens: {what} MB" for context in contexts for what in ("cache", "peak"))
    return table(("", *head), rows)


_MB = ("kv_bytes", "peak_bytes")


def speeds(found: Entries) -> str:
    """Decoding and prompts of several models, beside llama.cpp."""
    rows = []
    for one in found:
        own = {row["program"].removeprefix("lowbit-chat "): row for row in one["rows"]}
        names = [
            name
            for bits, peer in (("4-bit", "Q4_K_M"), ("3-bit", "Q3_K_M"))
            for name in (bits, f"{bits}, k_chunk 16", f"{bits}, k_chunk 64", f"{PEER} {peer}")
        ]
        prefill = (f"{own[name]['prefill_tokens_per_s']:,.0f}" for name in ("4-bit", f"{PEER} Q4_K_M"))
        limit = f"{own['4-bit']['percent_of_read_bandwidth']:.0f} %"
        rows.append((one["model"], *(f"{own[name]['decode_tokens_per_s']:.0f}" for name in names), limit, *prefill))
    head = [f"{bits} bits{k_chunk}" for bits in (4, 3) for k_chunk in ("", ", 16", ", 64", f": {PEER}")]
    return table(("tokens/s", *head, "4 bits: of the limit", "prefill, 4 bits", PEER), rows)


def processor_times(found: Entries) -> str:
    """What a core would do alone, beside llama.cpp."""
    rows = []
    for one in found:
        peer, own = one["rows"][-1], one["rows"][0]
        cells = []
        for part in ("decode", "prefill"):
            ours, theirs = (float(row[f"{part}_tokens_per_s"]) for row in (own, peer))
            cells += [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f} ×"]
        rows.append((one["model"].removesuffix(", random weights"), *cells))
    return table(("tokens a core-second", "decoded", PEER, "", "of a prompt", PEER, ""), rows)


def busy(found: Found) -> str:
    """Decoding beside competing processes."""
    speeds: dict[str, list[str]] = {}
    for row in sorted(found["rows"], key=lambda row: row["spinners"]):
        speeds.setdefault(row["program"], []).append(f"{row['decode_tokens_per_s']:.0f}")
    numbers = sorted({row["spinners"] for row in found["rows"]})
    return table(("competing processes", *numbers), [(name, *own) for name, own in speeds.items()])


def compensation(found: Entries) -> str:
    """What compensation costs, over many starts of the program."""
    rows = []
    for one in found:
        for row in one["rows"]:
            if (quartiles := row.get("longer_than_uncompensated_percent")) and "before" not in row["program"]:
                low, middle, high = quartiles
                program = row["program"].removeprefix("lowbit-chat ")
                rows.append((one["model"], program, f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"))
    return table(("", "", "a token takes longer than without"), rows)


def servers(found: Found) -> str:
    """Requests at once, over HTTP."""
    rows = []
    for row in found["rows"]:
        both = (row["ours"], row[PEER])
        cells = [f"{each['tokens_per_s']:.0f}" for each in both] + [f"{each['first_token_s']:.1f}" for each in both]
        rows.append((row["in_flight"], *cells))
    return table(("in flight", "tokens/s", PEER, "last first word, s", PEER), rows)


def acceptance(rows: Entries) -> str:
    """What is accepted, and tokens a verification (QuantSpec, Table 6)."""
    cells: dict[tuple[object, ...], dict[tuple[int, float], str]] = {}
    for row in rows:
        names = (row["model"], row["prompt"], row["target"])
        said = f"{100 * row['acceptance_rate']:.0f} % · {row['tokens_per_verify']:.2f}"
        cells.setdefault(names, {})[row["gamma"], row["temperature"]] = said
    ways = sorted({way for own in cells.values() for way in own}, key=lambda way: (way[1], way[0]))
    head = [f"γ {gamma}, T {temperature:g}" for gamma, temperature in ways]
    body = [(*names, *(own.get(way, "") for way in ways)) for names, own in cells.items()]
    return table(("model", "prompt", "target", *head), body)


def costs(rows: Entries) -> str:
    """Costs of steps, and at which acceptance rounds begin to pay."""
    body = []
    for row in rows:
        verify = [each / 1e3 for each in row["verify_ms"]]
        edge = break_even(Costs(plain=row["plain_ms"] / 1e3, draft=row["draft_ms"] / 1e3, verify=verify))
        times = (row["plain_ms"], row["draft_ms"], row["verify_ms"][2], row["verify_ms"][6])
        pays = "never" if edge is None else f"{100 * edge:.0f} %"
        body.append((row["model"], f"{row['context']:,}", row["target"], *(f"{each:.1f}" for each in times), pays))
    head = ("model", "context", "target", "plain ms", "draft ms", "verify 4 ms", "verify 8 ms", "pays from")
    return table(head, body)


def copied(rows: Entries) -> str:
    """Drafts copied from the text: medians over tasks."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        groups.setdefault((row["target"], row["kind"], row["way"]), []).append(row["speedup"])
    body = [
        (*key, len(gains), f"{median(gains):.2f}", f"{min(gains):.2f} to {max(gains):.2f}")
        for key, gains in groups.items()
    ]
    return table(("target", "tasks", "tokens", "count", "median speedup", "from, to"), body)


def drafted(make: Callable[[Entries], str]) -> Callable[[Found], str]:
    """Of rows on speculation those of SmolLM2 at 4 bits and of the 1.1 B shape, whose draft is not compensated."""

    def text(found: Found) -> str:
        rows = [row for row in found["rows"] if row["model"] in ("smollm2-4", "1.1 B shape, 3 bits")]
        return make([row for row in rows if row.get("draft", "both") == "both"])

    return text


def plain(*fields: str, keep: Callable[[Found], object] = lambda row: True) -> Callable[[Any], str]:
    """A table of some fields of the rows: `name`, or `name:heading:format`, `%` of which multiplies by 100."""

    def cell(row: Found, field: str) -> str:
        name, _, shown = [*field.split(":"), "", ""][:3]
        value = row[name]
        if shown.startswith("*"):  # *1000 .0f: multiplied
            factor, _, shown = shown[1:].partition(" ")
            value = float(factor) * value
        return f"{value:{shown}}"

    def text(found: Any) -> str:
        rows: Iterable[Found] = [row for row in (found if isinstance(found, list) else found["rows"]) if keep(row)]
        heads = [field.split(":")[1] if ":" in field else field for field in fields]
        return table(heads, [[cell(row, field) for field in fields] for row in rows])

    return text


def tightest(found: Found) -> str:
    """The Triton kernels that spill, or of which a multiprocessor holds two programs at most."""
    tight = {row["operation"] for row in found["rows"] if row["spill_bytes"] or row["programs"] <= 2}
    return summary([row for row in found["rows"] if row["operation"] in tight])


def soak(found: Found) -> str:
    """How requests of many clients ended."""
    ends = ", ".join(f"{what} {count:,}" for what, count in found["ends"].items())
    row: dict[str, Any] = {
        "clients": found["clients"],
        "requests": f"{found['requests']:,}",
        "ended by": ends,
        "wrong": len(found["wrong"]),
        "MiB a minute, second half": f"{found['growth_mib_per_minute']:.2f}",
    }
    if "planned_mib" in found:
        row["planned for weights and caches, MiB"] = f"{found['planned_mib']:.0f}"
        row["all that the server took, MiB"] = f"{max(taken for _, taken, _ in found['memory']):.0f}"
        row["first word, s: median, 95 %, last"] = ", ".join(f"{value:.2f}" for value in found["first_s"].values())
    return table(list(row), [list(row.values())])


def agents(runs: Sequence[Found]) -> str:
    """Seconds to the first token, turn by turn, by the kind of cache; and how many answers are those from nothing."""
    rows: list[Sequence[object]] = []
    for found in runs:
        for row in found["rows"]:
            if row["turn"] in (1, 2, 10, 11, 12, 20):
                tokens = (f"{row['prompt']:,}", f"{row['cached']:,}", f"{row['first_s']:.2f}")
                rows.append((found["kv"], row["turn"], *tokens, f"{row.get('fresh_s', 0):.0f}".lstrip("0")))
        same = [row["same"] for row in found["rows"] if "same" in row]
        rows[-1] = (*rows[-1], f"{sum(same)} of {len(same)}")
    head = ("cache", "turn", "tokens", "found in the cache", "first token, s", "from nothing, s", "same answers")
    return table(head, [(*row, "")[: len(head)] for row in rows])


def killed(found: Found) -> str:
    """What random kills broke."""
    ends = ", ".join(f"{what} {count}" for what, count in found["killed"].items())
    return table(("rounds", "killed", "broken"), [(found["rounds"], ends, len(found["broken"]))])


def mutated(found: Found) -> str:
    """How many defects the tests notice."""
    row = (len(found["breaks"]), found["caught"], ", ".join(found["survived"]) or "none")
    return table(("defects", "caught", "survived"), [row])


def _perplexity(entry: Found | None) -> str:
    return "" if entry is None else number(entry["perplexity"])


def _point(found: Found, method: str, bits: float, k_chunk: int, **wanted: object) -> Found | None:
    usual = {"model": REAL, "residual_bits": 4, "select": "approx", "prompt_k_chunk": 0}
    fields = {**usual, "method": method, "bits": bits, "k_chunk": k_chunk, **wanted}
    return _maybe(found["sections"]["points"], **fields)


def _maybe(entries: Entries, **wanted: object) -> Found | None:
    """The entry with these fields, if there is one."""
    return next((one for one in entries if all(one.get(name) == value for name, value in wanted.items())), None)


def _one(entries: Entries, **wanted: object) -> Found:
    found = _maybe(entries, **wanted)
    assert found is not None, f"nothing was stored of {wanted}"
    return found


_MIXTURES = ",".join(f"peers-{model}" for model in ("lfm2-moe", "glm4-flash", "granite4-h"))
_SPEED = ",".join(f"peers-{model}" for model in ("smollm2", "1b", "mixture", "qwen3.5", "gemma3"))
_MEMORY = plain(
    *("model", "context::,", "kind:cache", "k_chunk:target's k_chunk", "drafts", "weight_bytes:weights MB:*1e-6 .0f"),
    *("residual_bytes:residuals MB:*1e-6 .0f", "kv_bytes:cache MB:*1e-6 .0f", "peak_bytes:peak MB:*1e-6 .0f"),
)
_GAINS = plain(
    *("model", "target", "temperature", "plain_tokens_per_s:plain tok/s:.0f", "tokens_per_s:speculated tok/s:.0f"),
    *("speedup::.2f", "acceptance_rate:accepted, %:*100 .0f", "gamma:γ at the end"),
)
_HEADS = plain(
    *("head", "way:tokens", "step_ms:step, ms:.1f", "draft_ms:draft, ms:.1f", "acceptance_rate:accepted, %:*100 .0f"),
    *(
        "plain_tokens_per_s:plain tok/s:.0f",
        "tokens_per_s:drafted tok/s:.0f",
        "speedup::.2f",
        "same_tokens:same tokens",
    ),
)
_PROMPTS = plain(
    *("model", "tokens", "without_s:without, ms:*1000 ,.0f", "with_s:with, ms:*1000 ,.0f"),
    "slowdown_percent:slower, %:.1f",
    keep=lambda row: row["tokens"] >= 64,
)
_CALLS = plain(
    *("kind", "requests", "called", "again:asked again", "valid", "tool:the right tool"),
    "right:right in every argument",
    keep=lambda row: row["kind"] != "prose",
)
_LATE = "Compiled for eight devices; those that spill, or of which a multiprocessor holds two programs at most."
SECTIONS = (
    Section(
        "Quality of a chat",
        "quality",
        chats,
        "full,points,stored,budgets,peers,closeness",
        "KL from full precision in nats a token, and how often the same token leads, with prompts compensated alike.",
    ),
    Section("Token by token", "quality", closeness, "closeness", "As a chat; prompts have all residuals, if any."),
    Section(
        *("Token by token, Gemma 3 270M", "quality-gemma3", closeness, "closeness"),
        note="A base model, as a chat; prompts have all residuals, if any. Full precision is its Q4_K_M file, "
        "dequantized, so that llama.cpp on that file differs by its rounded activations.",
    ),
    Section("What a budget buys", "quality", budgets, "budgets"),
    Section(
        *("Budgets, measured", "tuned", lambda found: tuned.report({REAL: found["models"][REAL]})),
        note="What a budget promises: the median, over nine starts of the program, of a token's time with compensation "
        "over that without, in turns; from the lowest to the highest start. Beside it, the best uniform `k_chunk` "
        "whose own median fits.",
    ),
    Section("Methods at 3 bits", "quality", methods, "points,stored"),
    Section(
        *(
            "Experts of real weights",
            "mixture",
            plain("bits", "method", "mb:MB", "k_chunk", "kl:KL:.3f", "same_percent:same token, %:.1f"),
        ),
        note="SmolLM2 with each MLP cut into four experts, of which a token goes to all; along answers, as its "
        "certificate has them.",
    ),
    Section("How salient channels are chosen", "quality", selectors, "points", "3 bits, plain."),
    Section(
        *("Bits of the residuals at equal bytes", "quality", residuals, "points"),
        note="3 bits, plain; `k_chunk` in brackets.",
    ),
    Section(
        *("W4A8KV4", "quality", w4a8, "qoq"),
        note="Weights and cache of 4 bits. Activations have 8 bits: with a scale a token for QoQ, a group for AWQ.",
    ),
    Section(
        *("KV caches", "caches", caches, "perplexity,checks,size,speed"),
        note="Loss against fp16 by length of the window (fp16: its perplexity); KL and the same top token beside an "
        "exact cache along three answers of 192 tokens (fp16 has another kernel); speeds of a small random shape.",
    ),
    Section(
        *("KV caches: GEAR step by step", "caches", cache_steps, "steps"),
        note="Perplexity of SmolLM2 at 4 bits, windows of 1,024 tokens. n_b = 64: as in the paper, keys in their own "
        "basis, no first tokens kept; 128: as here, keys turned, 64 first tokens kept.",
    ),
    Section(
        *("KV caches: checked for each model", "caches", cache_checks, "checks"),
        note=f"Weights of 4 bits, rounded plainly. Up to {CACHE_LIMIT} nats a token the default is `int4`, beyond "
        "it `int8`, and `fp16` where `int8` loses more than that, too. Processor seconds are those of the check when "
        "a model is prepared, kernels compiled: `--only checks`.",
    ),
    Section(
        *("KV caches: memory", "caches", cache_memory, "memory"),
        note="SmolLM2 at 4 bits: the cache's buffers, and the peak of a process that decodes at the end of a full "
        "context, weights (71 MB), machine code and Python with torch, which the program does not load, included.",
    ),
    Section(
        *("Tasks, by cache", "tasks", tasks.by_cache, "keys,drift"),
        note="Over weights of 4 bits with `k_chunk` 64. Pass-key: a key among lines that say nothing, at four depths. "
        "Retrieval: keys of four cities in prose, three texts of each length. A key is right if greedy decoding finds "
        "it; *nats a key more* is what it loses against fp16, on average of both tasks at all lengths. Sums: those of "
        "16 chains of five behind 24 examples. Objects: JSON of 16 sentences behind 24 examples. KL: from fp16 along "
        "four sampled texts, by part (GEAR Fig. 1b). ± is the interval of 95 % of a mean of pairs; where it spans 0, "
        "it is a tie.",
    ),
    Section(
        *("Tasks, by bits", "tasks", tasks.by_bits, "keys,chats,forms"),
        note="Over an exact cache; pass-key and retrieval in 1,000 tokens. Chats: 20 questions of MT-Bench and "
        "Vicuna-bench, up to 200 tokens along the greedy answer in full precision: how many agree before the first "
        "that does not, KL, and the same top token. JSON: 20 requests for an object of three keys, freely and by its "
        "grammar. Calls: 25 requests, of which each must call a tool. Full precision of JSON and calls is the Q4_1 "
        "file, kept bit for bit.",
    ),
    Section(
        *("Speed beside llama.cpp", _SPEED, speeds),
        note="Models but SmolLM2 have random weights. The limit is memory bandwidth.",
    ),
    Section(
        *("Mixtures beside llama.cpp, by processor time", _MIXTURES, processor_times),
        note="At 4 bits, llama.cpp's Q4_K_M; one core, random weights. On two cores, by the clock and beside other "
        "processes, LFM2's decodes 1.1 times as fast as llama.cpp and reads prompts 1.3 times as fast.",
    ),
    Section("Cost of compensation", "peers-smollm2-starts,peers-1b-starts", compensation),
    Section("Beside other processes", "peers-spinners", busy, note="Tokens/s decoded."),
    Section("Several requests, over HTTP", "servers", servers),
    Section("Prompts, compensated", "prompts", _PROMPTS),
    Section(
        *("Starts", "start", plain("what:", "median_s:seconds:.2f", keep=lambda row: row["program"] == "now")),
    ),
    Section(
        *("Speculation: acceptance", "speculation", drafted(acceptance), "acceptance"),
        note="Share of drafts that are accepted, and tokens a verification.",
    ),
    Section("Speculation: memory", "speculation", drafted(_MEMORY), "memory"),
    Section("Speculation: costs", "speculation", drafted(costs), "costs"),
    Section("Speculation: speed", "speculation", drafted(_GAINS), "speed"),
    Section(
        *("Speculation: heads", "speculation", _HEADS, "heads"),
        note="A made shape of 24 blocks (hidden 1024) whose next token mostly follows from the last, and a head that "
        "knows that; in the other rows the model goes its own way. Answers of 512 tokens, one thread's processor time; "
        "steps as timed at load, by the clock of a shared machine.",
    ),
    Section("Speculation: copied", "speculation", lambda found: copied(found["rows"]), "copied"),
    Section("Simulated devices beside Table 3", "", devices.simulated),
    Section(
        *("Cards that a model does not fit", "", devices.on_cards),
        note="Computed, on no device: the plans of F2 with 48 GiB of free main memory, which is read at 60 GB/s, and "
        "tokens a second without compensation by the cost model of simulated devices. The cards are an RTX 4050 and an "
        "RTX 4060 of laptops and an RTX 4070 SUPER, of whose memory 5 % are in use.",
    ),
    Section(
        *("Missed experts by the processor", "", devices.missed_on_processor),
        note="Computed, on no device, for the same cards and memory, at 4 bits: what a token misses, tokens a second "
        "where that crosses the link, as the program plans today (the faster of that and shared blocks), and where the "
        "processor multiplies it, which the program does not: 30 µs to hand a row over and back and to start the rest "
        "of the graph, in every block, and nothing side by side. *Times*: beside today's plan. *µs a block*: what all "
        "of that may take until the link is as fast.",
    ),
    Section("Tool calls", "tool_calls", _CALLS),
    Section(
        *("Other programs, unchanged", "clients", plain("client", "version", "model", "hi", "tool", "schema", "stop")),
        note="The newest versions, with their defaults: they say hi, let a tool be called and read its result, have a "
        "schema filled, and stop an answer. The model is a script, or SmolLM2 at 4 bits (`small`), which calls a tool "
        "only where it is made to. Of the agents' prompts Codex's fits into SmolLM2's context of 8,192 tokens; Claude "
        "Code and opencode (11,701) say that theirs is too long.",
    ),
    Section(
        *("Products of a token on cards", "products", lambda found: products(found["rows"])),
        note="Compiled, on no device: instructions a weight, KiB of weights on their way to a multiprocessor, programs "
        "that it holds, and bytes that spill.",
    ),
    Section(
        *("A token on laptops' cards", "products", lambda found: on_laptops(found["rows"])),
        note="Computed, on no device: Llama 3 8B without compensation, behind no prompt. Products take as long as the "
        "larger of two terms: reading at 80 % of the data sheet's bandwidth, and their compiled instructions in "
        "three quarters of the issue slots at the data sheet's clock. The others take 3.5 µs each, as on an H200.",
    ),
    Section("Triton kernels", "kernels", tightest, note=_LATE),
    Section(
        *("A row's product on processors", "cpu-code", cpu_code.table),
        note="Compiled, for processors that are not at hand: instructions a weight of the loop of one row.",
    ),
    Section("Installations", "installations", installations.table),
    Section(
        *("An agent's turns", "agent-short,agent,agent-fp16", agents),
        note="SmolLM2. For the long prompts its file says 16,384 tokens of context instead of 8,192: its answers make "
        "no sense there, which times and comparisons do not need. Before turn 11 the server is started again. *From "
        "nothing*: the same request to a model without any cache.",
    ),
    Section("Twelve clients for ten minutes", "soak", soak),
    Section("Two models, eight clients, ten minutes", "soak-two", soak),
    Section("A hundred kills", "killing", killed),
    Section("Defects on purpose", "mutations", mutated),
)


def page() -> str:
    """The page."""
    shown = [section for section in SECTIONS if not section.file or any(section.runs())]
    old = [section.title for section in shown if any(map(is_old, section.runs()))]
    fresh = [section.title for section in shown if section.file and section.title not in old]
    which = "; ".join(old) if len(old) <= len(fresh) else " but ".join(filter(None, ("all", "; ".join(fresh))))
    parts = [
        _INTRODUCTION,
        f"Older than the last change of the code that decides them, or not finished: {which}." if old else "",
    ]
    for section in shown:
        parts += [f"## {section.title}", section.note, section.make(section.stored()), section.origin()]
    return "\n\n".join(part for part in parts if part) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
