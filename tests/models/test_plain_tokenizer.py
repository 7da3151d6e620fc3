"""Tokenizers that produce endless texts or crash are refused when read; real ones are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from models.plain_tokenizer import check_sound, plain_tokenizer

DOUBLED = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
SPREAD = {"type": "Replace", "pattern": {"Regex": ""}, "content": "b" * 40}
LONG = {"type": "Prepend", "prepend": "a" * 1001}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SINGLE = {"single": [{"SpecialToken": {"id": "none", "type_id": 0}}], "pair": [], "special_tokens": {}}


def template(*, marks: int = 1, ids: int = 1, texts: int = 1) -> dict[str, Any]:
    """A post-processor that puts special tokens, each of some ids, before some copies of a text."""
    text, mark = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "a", "type_id": 0}}
    pair = [text, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {"a": {"id": "a", "ids": [0] * ids, "tokens": ["a"] * ids}}
    single = [mark] * marks + [text] * texts
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def described(**changes: Any) -> str:
    return json.dumps(json.loads(Tokenizer(models.BPE({"a": 0, "b": 1}, [])).to_str()) | changes)


def sequence(kind: str, *steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", kind: list(steps)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"normalizer": sequence("normalizers", *[DOUBLED] * 40)}, "1,000 times as long"),
        ({"normalizer": sequence("normalizers", SPREAD, sequence("normalizers", SPREAD))}, "1,000 times as long"),
        ({"normalizer": LONG}, "1,000 times as long"),
        ({"decoder": sequence("decoders", *[DOUBLED] * 40)}, "1,000 times as long"),
        ({"pre_tokenizer": sequence("pretokenizers", *[BYTES] * 40)}, "1,000 times as long"),
        ({"post_processor": {"type": "TemplateProcessing", **SINGLE}}, "crashed: no entry found"),
        ({"post_processor": template(marks=1001)}, "adds more than 1,000"),
        ({"post_processor": template(ids=1001)}, "adds more than 1,000"),
        ({"post_processor": sequence("processors", *[template(marks=30, ids=20)] * 2)}, "adds more than 1,000"),
        ({"post_processor": template(texts=2)}, "repeats texts"),
    ],
    ids=[
        *("doubling", "spread", "prefix", "decoder", "bytes of bytes", "template"),
        *("many marks", "a long mark", "marks twice", "texts twice"),
    ],
)
def test_what_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_sound(Tokenizer.from_str(described(**changes)))


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": sequence("normalizers", {"type": "NFKC"}, {"type": "Prepend", "prepend": "▁"}, DOUBLED)},
        {"pre_tokenizer": sequence("pretokenizers", BYTES), "decoder": sequence("decoders", {"type": "Fuse"}, BYTES)},
        {"model": {"type": "Unigram", "vocab": [["q", 0.0]], "unk_id": None}},
        {"post_processor": sequence("processors", BYTES, template(marks=2))},
        {
            "padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
            | {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
        },
        {"truncation": {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 5}},
    ],
    ids=["usual", "bytes", "without some characters", "marked", "padded without end", "cut before its stride"],
)
def test_what_is_not(changes: dict[str, Any]) -> None:
    check_sound(Tokenizer.from_str(described(**changes)))


def test_a_folder_s_tokenizer_is_checked_and_bounded(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_text(described(normalizer=LONG))
    with pytest.raises(ValueError, match="times as long"):
        plain_tokenizer(tmp_path)
    with file.open("wb") as large:
        large.truncate(1 << 40)
    with pytest.raises(OSError, match="more than 64 MiB"):
        plain_tokenizer(tmp_path)


@pytest.mark.data
def test_real_ones_are_sound(shared_data: Path) -> None:
    for file in shared_data.rglob("tokenizer.json"):
        check_sound(Tokenizer.from_file(str(file)))
