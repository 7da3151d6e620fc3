"""Cutting pages off windows and restoring them, compiled, against `runtime.backends.operations.pages`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import assets
from models.store import StoredModel
from runtime.backends.cpu.cache import CpuStore
from runtime.backends.cpu.data.records import CONTROL_WORDS, parameters_of
from runtime.backends.cpu.pool import Pool
from runtime.backends.decoder import DecoderOptions, Step
from runtime.backends.operations.pages import dequantize_page, quantize_page
from runtime.backends.reference.decoder import ReferenceDecoder
from runtime.kv.kinds import KINDS, PARTS, KVKind, Part
from runtime.text.tokenizer import Tokenizer
from tests.close import Tolerance, assert_close
from tests.guarded import aligned_zeros
from tests.runtime.conftest import make_spec

WINDOWED: list[KVKind] = [name for name, kind in KINDS.items() if kind.windowed]
LAYERS, HEADS, SLOT, PAGE = 2, 3, 1, 4
HALF_STEP = 2**-10
"""Relative distance of neighbours in half precision, at most."""
TWO_ROUNDINGS = Tolerance(span=4 * HALF_STEP, why="of half precision, codes and factors each")
MEANS = Tolerance(span=HALF_STEP, why="a mean's sum runs in another order, which may round it to the neighbour")
Windows = Mapping[Part, npt.NDArray[np.float16]]


def filled(name: KVKind, windows: Windows) -> CpuStore:
    """A store whose slot 1 has these tokens in its window: float16 [layers, heads, tokens, D]."""
    layers, heads, tokens, dim = windows["keys"].shape
    spec = make_spec(num_layers=layers, num_heads=heads, num_kv_heads=heads, head_dim=dim)
    store = CpuStore(KINDS[name], spec, pages=PAGE + 1, slots=2, window=-(-tokens // 64) * 64)
    for part in PARTS:
        store._write_window(part, SLOT, windows[part])
    return store


def random_windows(dim: int, tokens: int) -> Windows:
    """Random numbers with what is awkward planted: equal numbers, constant vectors, zeros, and large channels."""
    rng = np.random.default_rng(dim)
    windows: dict[Part, npt.NDArray[np.float16]] = {}
    for part in PARTS:
        x = rng.standard_normal((LAYERS, HEADS, tokens, dim)).astype(np.float16)
        x[0, 0] = np.round(x[0, 0])
        x[0, 1, :, 3] = 0.5
        x[0, 1, 7] = -2.0
        x[0, 2] = 0.0
        x[1, 0, :, 1] *= 40
        x[1, 1] = rng.integers(0, 2, x[1, 1].shape)
        windows[part] = x
    return windows


def expected_fields(name: KVKind, part: Part, window: npt.NDArray[np.float16]) -> dict[str, npt.NDArray[Any]]:
    kind = KINDS[name]
    page = torch.from_numpy(window[:, :, kind.sinks : kind.sinks + kind.page].astype(np.float32))
    return {field: array.numpy() for field, array in quantize_page(kind, part, page).items()}


def read_back(name: KVKind, part: Part, fields: Mapping[str, npt.NDArray[Any]], dim: int) -> npt.NDArray[np.float32]:
    tensors = {field: torch.from_numpy(np.ascontiguousarray(array)) for field, array in fields.items()}
    return dequantize_page(KINDS[name], part, tensors, dim).numpy()


def check_flush(name: KVKind, windows: Windows) -> None:
    """Flush a page and compare what is stored, and what the page reads back as, with the reference."""
    kind, dim, tokens = KINDS[name], windows["keys"].shape[-1], windows["keys"].shape[2]
    store, rest = filled(name, windows), tokens - kind.sinks - kind.page
    store.flush(SLOT, PAGE, rest)
    record = aligned_zeros(store.records[:, PAGE].shape, np.uint8)
    for part in PARTS:
        fields = expected_fields(name, part, windows[part])
        stored = {field: array[:, 0] for field, array in store.fields(part, [PAGE]).items()}
        assert stored.keys() == fields.keys()
        for field, array in fields.items():
            if field == "scales" and kind.code(part).exact_mean:
                np.testing.assert_array_equal(stored[field][..., 0], array[..., 0], err_msg=f"{part} scales")
                assert_close(stored[field][..., 1], array[..., 1], MEANS, what=f"{part} zeros")
            elif field not in ("a", "b", "outliers"):
                np.testing.assert_array_equal(stored[field], array, err_msg=f"{part} {field}")
        store.layout.write(record, part, stored)
        # Of GEAR, sums are added up in another order: what the numbers read back as is a rounding or two away.
        theirs, mine = (read_back(name, part, found, dim) for found in (fields, stored))
        assert_close(mine, theirs, TWO_ROUNDINGS if kind.rank else MEANS if kind.code(part).exact_mean else "exact")
        left = np.delete(windows[part], np.s_[kind.sinks : kind.sinks + kind.page], axis=2)
        np.testing.assert_array_equal(store.window(part, SLOT, kind.sinks + rest), left)
        assert not store.window(part, 0, kind.sinks + rest).any()
    np.testing.assert_array_equal(store.records[:, PAGE], record)  # and nothing besides the fields
    assert not store.records[:, :PAGE].any()


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("dim", [16, 40, 64, 128])
def test_a_flushed_page_is_the_references(name: KVKind, dim: int) -> None:
    check_flush(name, random_windows(dim, KINDS[name].unpaged + KINDS[name].page + 21))


@pytest.fixture(scope="module")
def real_windows() -> Windows:
    """Keys and values of the bundled model for some text."""
    tokens = 288
    model = StoredModel.open_folder(assets.demo_path(), "demo")
    words = (Path(__file__).resolve().parents[4] / "README.md").read_text(encoding="utf-8")
    rows = np.arange(tokens, dtype=np.int32)
    ids = np.array(Tokenizer(model.tokenizer_path).encode(words)[:tokens], np.int32)
    decoder = ReferenceDecoder(model, DecoderOptions(context=tokens, max_rows=tokens, kv="kcvt4"))
    decoder.cache.begin = lambda *_, **__: None  # type: ignore[method-assign]  # no page is cut off: all stays in the window
    decoder.forward(Step(tokens=ids, slots=np.zeros_like(rows), positions=rows, logit_rows=rows[:1]))
    return {part: decoder.cache.store.read_window(0, tokens)[part] for part in PARTS}


@pytest.mark.parametrize("name", WINDOWED)
def test_a_flushed_page_of_real_keys_and_values_is_the_references(name: KVKind, real_windows: Windows) -> None:
    assert np.abs(real_windows["keys"]).max() > 1
    check_flush(name, real_windows)


@pytest.mark.parametrize("name", [name for name in WINDOWED if KINDS[name].rank])
def test_corrections_are_as_good_as_the_references(name: KVKind, real_windows: Windows) -> None:
    kind, dim = KINDS[name], real_windows["keys"].shape[-1]
    store = filled(name, real_windows)
    store.flush(SLOT, PAGE, 0)
    for part in PARTS:
        fields = expected_fields(name, part, real_windows[part])
        stored = {field: array[:, 0] for field, array in store.fields(part, [PAGE]).items()}
        x = real_windows[part][:, :, kind.sinks : kind.sinks + kind.page].astype(np.float32)
        theirs, mine = (float(np.linalg.norm(read_back(name, part, found, dim) - x)) for found in (fields, stored))
        assert mine == pytest.approx(theirs, rel=1e-3)
        a = stored["a"].astype(np.float64)
        eye = np.broadcast_to(np.eye(4), (*a.shape[:2], 4, 4))
        assert_close(np.swapaxes(a, -1, -2) @ a, eye, Tolerance(atol=2e-3, why="directions in half precision"))
        for field in ("a", "b", "outliers"):
            if field in fields:
                assert_close(stored[field], fields[field], Tolerance(span=2e-2, why="four turns each"), what=field)


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize(("dim", "count"), [(64, 128), (40, 57), (128, 1)])
def test_a_restored_page_is_what_it_reads_back_as(name: KVKind, dim: int, count: int) -> None:
    kind = KINDS[name]
    windows, count = random_windows(dim, kind.sinks + 128), min(count, kind.page)
    store = filled(name, windows)
    store.flush(SLOT, PAGE, 0)
    before = store.records.copy()
    store.restore(PAGE, 0, count)
    np.testing.assert_array_equal(store.records, before)
    for part in PARTS:
        fields = {field: array[:, 0] for field, array in store.fields(part, [PAGE]).items()}
        expected = read_back(name, part, fields, dim)[:, :, :count]
        actual = store.window(part, 0, kind.sinks + count)[:, :, kind.sinks :]
        assert not store.window(part, 0, kind.sinks).any()
        if kind.rank:
            assert_close(actual, expected, Tolerance(rtol=HALF_STEP, atol=1e-6, why="rounded to half precision"))
        else:
            np.testing.assert_array_equal(actual, expected.astype(np.float16))


@pytest.mark.parametrize("name", ["hierarchical", "gear2", "int4"])
def test_threads_share_out_the_same_work(name: KVKind) -> None:
    windows = random_windows(64, 320)
    alone, shared = filled(name, windows), filled(name, windows)
    control = aligned_zeros((CONTROL_WORDS,), np.int64)
    scratch = aligned_zeros((3, shared.scratch_bytes + 256), np.uint8)
    scratch[:] = 0xA5
    step = parameters_of(control)
    step["scratch"], step["scratch_stride"] = scratch.ctypes.data, scratch.strides[0]
    shared.use(Pool(control, 3))
    for store in (alone, shared):
        store.flush(SLOT, PAGE, 128)
        store.restore(PAGE, 0, 60)
    assert (scratch[:, shared.scratch_bytes :] == 0xA5).all()
    if KINDS[name].rank:  # what comes last is the low rank's
        assert (scratch[:, shared.scratch_bytes - 4 : shared.scratch_bytes] != 0xA5).any()
    np.testing.assert_array_equal(shared.records, alone.records)
    for part in PARTS:
        np.testing.assert_array_equal(shared.window(part, 0, 124), alone.window(part, 0, 124))
        np.testing.assert_array_equal(shared.window(part, SLOT, 192), alone.window(part, SLOT, 192))


def test_the_cpu_path_needs_no_torch() -> None:
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from types import SimpleNamespace\n"
        "from runtime.backends.cpu.cache import CpuStore\n"
        "from runtime.kv.kinds import KINDS\n"
        "from models.spec import HeadShape\n"
        "spec = SimpleNamespace(attention_layers=(0,), heads_of=lambda _: HeadShape(1, 1, 64))\n"
        "for name in ('hierarchical', 'gear2'):\n"
        "    store = CpuStore(KINDS[name], spec, pages=1, slots=1, window=256)\n"
        "    store.flush(0, 0, 0)\n"
        "    store.restore(0, 0, 5)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
