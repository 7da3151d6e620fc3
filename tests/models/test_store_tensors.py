"""Mapped safetensors: what is written is read back, and no damaged header gets through."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import StoreError
from models.store.tensors import MappedTensors, PiecewiseTensor, read_header, tensor_file

TENSORS = {
    "codes": np.arange(24, dtype=np.int32).reshape(4, 6),
    "scales": np.linspace(0, 1, 7).astype(np.float16),
    "zeros": np.arange(5, dtype=np.uint8),
    "norm": np.ones(3, np.float32),
    "empty": np.empty((0, 4), np.float32),
    "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
}


def write(path: Path, tensors: dict[str, Any]) -> Path:
    path.write_bytes(b"".join(tensor_file(tensors)))
    return path


def test_round_trip(tmp_path: Path) -> None:
    file = MappedTensors(write(tmp_path / "file", TENSORS))
    assert set(file.entries) == set(TENSORS)
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(file[name], tensor)
        assert file[name].dtype == tensor.dtype
        assert file[name].shape == tensor.shape
        assert not file[name].flags.writeable
    assert file.get("nothing") is None
    with pytest.raises(StoreError, match="has no tensor nothing"):
        file["nothing"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems report memory in other ways")
def test_a_file_that_was_read_can_be_let_go_of(tmp_path: Path) -> None:
    values = np.arange(4 << 20, dtype=np.int32)
    file = MappedTensors(write(tmp_path / "file", {"values": values}))
    held, process = file["values"], psutil.Process()
    assert held.sum(dtype=np.int64) == values.sum(dtype=np.int64)
    before = process.memory_info().shared
    file.release()
    assert before - process.memory_info().shared > values.nbytes // 2
    np.testing.assert_array_equal(held, values)


def test_the_library_agrees(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    loaded = load_file(write(tmp_path / "file", TENSORS))
    for name, tensor in TENSORS.items():
        np.testing.assert_array_equal(loaded[name], tensor)


def test_order_does_not_matter_and_data_is_aligned(tmp_path: Path) -> None:
    backwards = dict(reversed(TENSORS.items()))
    assert b"".join(tensor_file(TENSORS)) == b"".join(tensor_file(backwards))
    entries = read_header(write(tmp_path / "file", TENSORS))
    assert min(entry.offset for entry in entries.values()) % 64 == 0
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries.values())


def test_a_tensor_can_come_in_pieces() -> None:
    table = np.arange(40, dtype=np.float16).reshape(10, 4)
    pieces = PiecewiseTensor(dtype=table.dtype, shape=table.shape, pieces=lambda: iter([table[:3], table[3:]]))
    assert b"".join(tensor_file({"embed": pieces})) == b"".join(tensor_file({"embed": table}))


def test_foreign_types_are_refused() -> None:
    with pytest.raises(ValueError, match="float64 is not stored"):
        list(tensor_file({"x": np.zeros(3)}))


def header_of(table: object, size: int) -> bytes:
    return text_of(json.dumps(table)) + bytes(size)


def one(dtype: object, shape: object, place: list[int], size: int) -> bytes:
    """A file of a single tensor."""
    return header_of({"x": {"dtype": dtype, "shape": shape, "data_offsets": place}}, size)


def text_of(header: str) -> bytes:
    return len(header.encode()).to_bytes(8, "little") + header.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors file"),
        (b"\x01", "not a safetensors file"),
        (b"\xff" * 64, "not a safetensors file"),
        (header_of([], 0), "not an object"),
        ((4).to_bytes(8, "little") + b"nope", "header is damaged"),
        (one("BF16", [2], [0, 4], 4), "header is damaged"),
        (one("F32", [2], [0, 4], 4), "header is damaged"),
        (one("F32", [-1], [0, -4], 4), "header is damaged"),
        (one("F32", [1.0], [0, 4], 4), "header is damaged"),
        (one("F32", [1], [4, 8], 8), "overlap or leave holes"),
        (one("F32", [1], [0, 4], 3), "but its header says"),
        (one("F32", [1], [0, 4], 5), "but its header says"),
        (
            one("F32", [2**32, 2**32], [0, 0], 0),
            "does not match its shape",
        ),
        (
            one("F32", [2**62] * 4, [0, 0], 0),
            "does not match its shape",
        ),
        (one("F32", [True], [0, 4], 4), "is invalid"),
        (one(["F32"], [1], [0, 4], 4), "is invalid"),
        (one("F32", [1] * 9, [0, 4], 4), "is invalid"),
        (one("F32", [1], [0, 4, 8], 4), "lacks the location of"),
        (one("Q9", [1], [0, 4], 4), "no stored model holds Q9"),
        (text_of('{"x": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, "x": 3}'), "a duplicate key"),
        (text_of('{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'), "surrogates not allowed"),
        (text_of("[" * 200_000), "nested too deeply"),
        ((2**63 - 1).to_bytes(8, "little") + b"{}", "not a safetensors file"),
        (header_of({"x": {"shape": [1]}}, 0), "header is damaged"),
        (header_of({"x": 3}, 0), "header is damaged"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_damaged_headers_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(StoreError, match=message):
        read_header(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"cannot read .*nothing"):
        read_header(tmp_path / "nothing")


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_no_damage_of_the_header_gets_past_as_another_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    content = bytearray(b"".join(tensor_file(TENSORS)))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, 400))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damage") / "file"
    path.write_bytes(content)
    try:
        file = MappedTensors(path)
        for name in file.entries:
            file[name].sum()
    except StoreError:
        pass
