"""The benchmark of prompts: products of each kind run; tile registers are timed, or skipped with a reason."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from tests.bench import cpu, prefill


@pytest.mark.parametrize("weights", ["uniform", "codebook", "w4a8"])
@pytest.mark.parametrize("rows", [1, 8, 33])
def test_products_of_each_kind_run(monkeypatch: pytest.MonkeyPatch, weights: str, rows: int) -> None:
    monkeypatch.setattr(cpu, "ROTATED_BYTES", 1 << 14)
    product = cpu.Product(32, 256, 4, rows, weights=weights)
    assert all(seconds > 0 for seconds in product.seconds(2))
    assert product.operations == 2 * 32 * 256 * rows
    assert product.bytes >= 32 * 256 // 2


def test_the_rate_of_dot_products_is_a_processor_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "_SPINS", 1000)
    assert 1e8 < prefill.dot_rate(1) < 1e14


@pytest.mark.parametrize("present", [True, False])
def test_tile_registers_are_timed_or_left_out_with_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], present: bool
) -> None:
    started = []

    @contextmanager
    def program(
        _python: str, kind: str, which: str, *, answer: int, variant: str
    ) -> Iterator[Callable[[int], tuple[float, float]]]:
        started.append((kind, which, answer, variant))
        yield lambda count: (0.25 * count, 0.25 * count)

    monkeypatch.setattr(prefill, "program", program)
    monkeypatch.setattr(prefill, "supported_variants", lambda: ("amx", "avx512") if present else ("avx512",))
    rows = prefill.prefills(["small=folder"], ("file.gguf", "python"), 2)
    variants = ["amx", "avx512"] if present else [""]
    assert started == [*(("ours", "folder", 1, own) for own in variants), ("llama", "file.gguf", 1, "")]
    assert [row["tokens_per_s"] for row in rows] == [2048] * len(started)
    assert ("no tile registers" in capsys.readouterr().out) is not present
