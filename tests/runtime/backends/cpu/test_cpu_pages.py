"""Layout of page records: round trips, no overlaps, and new fields without further changes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from runtime.backends.cpu.data.pages import PageLayout, cache_of
from runtime.kv.kinds import KINDS, PARTS, KVKind, page_fields


@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize("dim", [16, 20, 40, 64, 128])
def test_fields_are_read_back_as_they_were_written_and_share_no_byte(name: KVKind, dim: int) -> None:
    kind, rng = KINDS[name], np.random.default_rng(dim)
    layout = PageLayout(kind, dim)
    together = np.zeros((2, 3, layout.record), np.uint8)
    taken = np.zeros(layout.record, np.int64)
    for part in PARTS:
        for field in page_fields(kind, part, dim):
            raw = rng.integers(1, 255, (2, 3, *field.shape, np.dtype(field.dtype).itemsize), dtype=np.uint8)
            values = raw.view(field.dtype)[..., 0]
            if field.dtype == "uint8":  # what a row of codes leaves of its last byte is 0
                bits = 4 if kind.hierarchical else kind.code(part).bits
                values[..., -1] &= 2 ** (8 - -dim * bits % 8) - 1
            alone = np.zeros_like(together)
            for records in (alone, together):
                layout.write(records, part, {field.name: values})
            np.testing.assert_array_equal(layout.read(alone, part)[field.name], values)
            taken += (alone != 0).any(axis=(0, 1))
            assert (taken <= 1).all(), f"{field.name} of the {part} stands where another field does"
            np.testing.assert_array_equal(layout.read(together, part)[field.name], values)
            assert layout.read(together[:, :0], part)[field.name].shape == (2, 0, *field.shape)


@pytest.mark.parametrize("name", list(KINDS))
def test_what_compiled_code_is_told(name: KVKind) -> None:
    kind = KINDS[name]
    layout = PageLayout(kind, 64)
    description = layout.description(window=77)
    cache = cache_of(int(description.ctypes.data))
    assert (cache["tokens"], cache["dim"], cache["record"], cache["window"]) == (kind.page, 64, layout.record, 77)
    record = np.zeros(layout.record, np.uint8)
    for part in PARTS:
        for field in page_fields(kind, part, 64):
            if field.name in ("a", "b", "indices", "outliers"):
                ones = np.full(field.shape, 0x0101, np.uint16).view(field.dtype)
                record[:] = 0
                layout.write(record, part, {field.name: ones})
                assert np.flatnonzero(record)[0] == cache[part][field.name]
    assert cache["keys"]["kept"] == 2 * kind.outliers(kind.page if kind.windowed else 64)


def test_layouts_have_names() -> None:
    """Saved pages are read by the layout that they were written with alone."""
    names = {PageLayout(kind, dim).name for kind in KINDS.values() for dim in (64, 128)}
    assert len(names) == 2 * len({PageLayout(kind, 64).record for kind in KINDS.values()})
    assert PageLayout(KINDS["gear4"], 64).name == PageLayout(KINDS["gear4"], 64).name


_NEW_FIELD = """
import numpy as np
from runtime.kv import kinds

declared = kinds.page_fields

def with_means(kind, part, head_dim):
    fields = declared(kind, part, head_dim)
    return (*fields, kinds.Field("means", "float16", (2, head_dim))) if kind.name == "int4" else fields

kinds.page_fields = with_means
from runtime.backends.cpu.data.pages import PageLayout

layout = PageLayout(kinds.KINDS["int4"], 40)
means = np.arange(80, dtype=np.float16).reshape(1, 2, 40) + 1
record = np.zeros((1, layout.record), np.uint8)
layout.write(record, "values", {"means": means})
assert (layout.read(record, "values")["means"] == means).all()
place = int(layout.description()[0]["values"]["means"])
assert (record[0, place : place + means.nbytes].view(np.float16) == means.reshape(-1)).all()
assert layout.description()[0]["keys"]["means"] != place
"""


def test_a_new_field_is_declared_once() -> None:
    """What a kind declares has a place, is written, read, and named in the description, with nothing said here."""
    subprocess.run([sys.executable, "-c", _NEW_FIELD], check=True)
