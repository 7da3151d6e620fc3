"""Headers of GGUF files: valid ones are read, and a damaged file gives exactly one error."""

from __future__ import annotations

import random
import struct
import sys
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from models.checkpoint import Checkpoint
from models.errors import CheckpointError, ModelError, UnsupportedModelError
from models.gguf import tensors as module
from models.gguf.header import Header, read_header
from models.gguf.tensors import LOW_BIT_TYPES, WHOLE_TYPES, GgufTensor
from models.gguf.tokenizer import tokenizer_files
from tests.models.gguf.making import finish, random_model, write_gguf
from tests.models.peak import growth

VALUES: dict[str, Any] = {
    "a.bool": True,
    "a.uint32": 7,
    "a.float32": 0.5,
    "a.string": "naïve 🙂",
    "a.array": [1, 2, 3],
    "a.texts": ["a", "", "日本"],
    "a.numbers": [0.5, -1.0],
    "a.flags": [True, False],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", random_model("Llama"), metadata=VALUES)


@cache
def header_bytes(file: Path) -> int:
    return int(gguf.GGUFReader(file).data_offset)


def test_values_and_tensors_are_those_of_the_package(file: Path) -> None:
    header, theirs = read_header(file), gguf.GGUFReader(file)
    known = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    metadata = {
        key: value.tolist() if isinstance(value, memoryview) else value for key, value in header.metadata.items()
    }
    assert metadata == known
    assert {key: metadata[key] for key in VALUES} == VALUES
    found = {name: (tensor.shape, tensor.kind, tensor.offset, tensor.size) for name, tensor in header.tensors.items()}
    assert found == {
        tensor.name: (tuple(tensor.shape.tolist()[::-1]), tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes)
        for tensor in theirs.tensors
    }


def test_another_alignment(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
    writer.add_custom_alignment(256)
    for name in ("a", "b"):
        writer.add_tensor(name, np.full((2, 3), ord(name), np.float32))
    finish(writer)
    header = read_header(tmp_path / "file.gguf")
    assert [tensor.offset % 256 for tensor in header.tensors.values()] == [0, 0]
    assert _read(header, "b").unique().tolist() == [98.0]


def begin(tensors: int, values: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, values)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"<!doctype html><p>Not found", "does not begin with 'GGUF'"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b"GGUF", "is cut off"),
        (b"GGUF" + struct.pack("<I", 1), "version 1 of the GGUF format .* Take a newer"),
        (b"GGUF" + struct.pack("<I", 4), "version 4 .* does not know yet"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (begin(0, 2**60), "is cut off"),
        (begin(0, 1) + struct.pack("<Q", 2**63) + b"key", "a key of the metadata"),
        (begin(0, 1) + struct.pack("<Q3sI", 3, b"key", 99), "'key' has unknown type 99"),
        (begin(0, 1) + struct.pack("<Q3sIIQ", 3, b"key", 9, 8, 2**61), "within 'key'"),
        (
            begin(0, 1) + struct.pack("<Q3sIIQ", 3, b"key", 9, 9, 1),
            "list of unsupported type 9",
        ),
        (begin(0, 1) + struct.pack("<Q3sIQ2s", 3, b"key", 8, 2, b"\xff\xff"), "UTF-8"),
        (begin(0, 2) + 2 * struct.pack("<Q3sIB", 3, b"key", 0, 1), "'key' twice"),
        (begin(1, 0) + struct.pack("<Q1sI", 1, b"t", 9), "9 dimensions"),
        (begin(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 77, 0), "type 77"),
        (begin(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 8, 2, 0), "rows of 8"),
        (begin(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 2**62, 0, 0), "'t' ends at byte"),
        (
            begin(0, 1) + struct.pack("<Q17sII", 17, b"general.alignment", 4, 48),
            "alignment is 48",
        ),
        (begin(1, 0) + struct.pack("<Q1sIQIQ", 1, b"t", 1, 0, 0, 0), "'t' is empty"),
        (begin(1, 0) + struct.pack("<Q1sIQQIQ", 1, b"t", 2, 8, 0, 0, 0), "'t' is empty"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**17, 0), "131,072 tensors"),
        (begin(0, 1) + struct.pack("<Q70000s", 70_000, b"key"), "a key .* has 70,000 bytes"),
        (
            begin(0, 1) + struct.pack("<Q3sIIQ", 3, b"key", 9, 8, 2**22 + 1) + bytes(2**25 + 9),
            "more than 4,194,304 texts",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_no_good_header(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "file.gguf"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as raised:
        read_header(file)
    assert str(raised.value).startswith(str(file))


def long_list(path: Path, kind: int, size: int) -> Path:
    """A file whose one value is a list of so many bytes; all of them are zeros, and take no room on the disk."""
    with path.open("wb") as file:
        file.write(begin(0, 1) + struct.pack("<Q3sIIQ", 3, b"key", 9, kind, size))
        file.truncate(file.tell() + size)
    return path


@pytest.mark.parametrize("kind", [0, 1, 7], ids=["uint8", "int8", "bool"])
def test_a_list_of_bytes_takes_no_more_memory_than_in_the_file(kind: str, tmp_path: Path) -> None:
    size = 4 << 20
    file = long_list(tmp_path / "file.gguf", kind, size)
    tracemalloc.start()
    try:
        assert len(read_header(file).metadata["key"]) == size
        assert tracemalloc.get_traced_memory()[1] < size * 1.2
    finally:
        tracemalloc.stop()


def test_a_header_without_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its header has more than 128 MiB"):
        read_header(long_list(tmp_path / "file.gguf", 0, 10 << 30))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="No such file"):
        read_header(tmp_path / "nothing.gguf")


def test_a_file_cut_anywhere_says_so(file: Path, tmp_path: Path) -> None:
    content, cut = file.read_bytes(), tmp_path / "cut.gguf"
    for length in [*range(5, header_bytes(file), 97), header_bytes(file), len(content) - 1]:
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="is cut off"):
            Checkpoint.open(cut)


def test_a_file_cut_after_it_was_opened(file: Path, tmp_path: Path) -> None:
    shrinking = tmp_path / "shrinking.gguf"
    shrinking.write_bytes(file.read_bytes())
    checkpoint = Checkpoint.open(shrinking)
    with shrinking.open("rb+") as open_file:
        open_file.truncate(header_bytes(file) + 1000)
    with pytest.raises(CheckpointError, match="ends within the tensor"):
        checkpoint.linear("layers.1.down")
    shrinking.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.linear("layers.1.down")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_any_damage_to_the_header_is_explained(seed: int, file: Path, tmp_path: Path) -> None:
    """Whatever a byte becomes, the file is read or refused; nothing else is raised, and nothing goes on for ever."""
    content, damaged = file.read_bytes(), tmp_path / "damaged.gguf"
    generator = random.Random(seed)
    refused: list[str] = []
    for _ in range(200):
        position = generator.randrange(4, header_bytes(file))
        changed = bytes([content[position] ^ (1 << generator.randrange(8))])
        damaged.write_bytes(content[:position] + changed + content[position + 1 :])
        try:
            Checkpoint.open(damaged)
            tokenizer_files(read_header(damaged))
        except ModelError as error:
            refused.append(str(error))
    assert len(refused) > 50
    assert all(str(damaged) in said for said in refused)


def test_every_type_of_the_package_is_known() -> None:
    readable = {kind.name for kind in gguf.quants._type_traits} | {"F16", "F32"}
    assert readable == {*LOW_BIT_TYPES, *WHOLE_TYPES}


@pytest.mark.parametrize("kind", [*LOW_BIT_TYPES, *WHOLE_TYPES])
def test_every_type_is_read_in_pieces(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bytes that nobody quantized: small ones, so that no scale is infinite or not a number."""
    dtype = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[dtype]
    rows, width = 7, 512
    data = np.random.default_rng(0).integers(0, 0x30, (rows, width // block * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
    writer.add_tensor("t", data, raw_dtype=dtype, raw_shape=data.shape)
    finish(writer)
    expected = torch.from_numpy(np.array(gguf.dequantize(data, dtype)))
    monkeypatch.setattr(module, "_PIECE", 3 * width)
    found = _read(read_header(tmp_path / "file.gguf"), "t")
    assert found.shape == (rows, width)
    assert found.isfinite().all()
    assert torch.equal(found, expected.to(found.dtype))
    assert found.dtype == {"F32": torch.float32, "BF16": torch.bfloat16}.get(kind, torch.float16)


def test_a_type_that_is_no_weight(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
    writer.add_tensor("t", np.zeros((2, 4), np.int32))
    finish(writer)
    with pytest.raises(UnsupportedModelError, match="'t' is stored as I32"):
        _read(read_header(tmp_path / "file.gguf"), "t")


def _read(header: Header, name: str) -> torch.Tensor:
    return GgufTensor(info=header.tensors[name]).read()


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_a_large_tensor_is_read_in_the_memory_of_its_result_and_its_map(tmp_path: Path) -> None:
    """Dequantized at once it would take four times its result beside it."""
    writer = gguf.GGUFWriter(tmp_path / "file.gguf", "llama")
    sizes = {"small": 64, "large": 8192}
    for name, rows in sizes.items():
        data = np.zeros((rows, 4096 // 32 * 18), np.uint8)
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType.Q4_0, raw_shape=data.shape)
    finish(writer)
    header = read_header(tmp_path / "file.gguf")
    _read(header, "small")
    result, mapped = 8192 * 4096 * 2, 8192 * 4096 // 32 * 18
    assert growth(lambda: _read(header, "large")) <= result + mapped + 40 * 2**20
