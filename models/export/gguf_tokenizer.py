"""The tokenizer of a stored model as GGUF's metadata, the way back of `models.gguf.tokenizer`.

A GGUF file names how texts are cut, and has no expression for it. So the name is found whose cuts are those of the
tokenizer in a text with something of everything, and the finished file is read back and compared on that text.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from models.errors import UnsupportedModelError
from models.gguf.header import read_header
from models.gguf.pretokenizers import PRE_TOKENIZERS, PreTokenizer
from models.gguf.tokenizer import TOKENIZER, cutter, tokenizer_files
from models.gguf.vocabulary import BYTE, CONTROL, NAMED, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from models.plain_tokenizer import TokenizerFiles, plain_tokenizer
from models.store import StoredModel

if TYPE_CHECKING:
    from gguf import GGUFWriter
    from tokenizers import Tokenizer

PROBE = (
    "Hello, world!  It's 12345 o'clock, isn't it? WE'LL see.\n\n\tdef f(x):\n        return x**2 + 3.1e-9  # naïve\r\n"
    "Der Fluß ist 1.024 km lang; l'été à l'école, mañana.  Привет, мир! 日本語のテキスト、中文文本。"
    "한국어 문장 العربية हिन्दी 🙂👩\u200d👧 e\u0301 ﬁ ½ ² İstanbul ǅ\u00a0x   \n \n   end/of\\path "
    "http://a.b/c?d=e&f=g ...!!! ---\n```json\n"
    '{"key": [1, 22, 333, 4444], "ok": true}\n```\nCamelCaseWords snake_case_words UPPER lower 1st 2nd 0x1F $9.99 50%\n'
)
"""A text with something of everything."""
_SPACE = "▁"
_BYTES = re.compile("<0x[0-9A-F]{2}>")
_NO_SCORE = -1e6
"""Score of a token that no merge makes."""


def write_tokenizer(writer: GGUFWriter, model: StoredModel) -> None:
    """Write the metadata of a model's tokenizer.

    Raises:
        UnsupportedModelError: GGUF has no name for its kind, or for its way of cutting texts.
    """
    files = _files(model)
    description = json.loads(files.fast.to_str())
    bpe = description["model"]
    if bpe["type"] != "BPE":
        raise refusal(model, f"its tokenizer is of the kind {bpe['type']}, and only BPE can be written")
    tokens, types = _vocabulary(files, bpe, model.spec.vocab_size)
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in bpe["merges"]]
    if bpe["byte_fallback"]:
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(tokens, merges))
        writer.add_add_space_prefix(_prefixed(files.fast))
    else:
        name = _pre_tokenizer(files.fast, ignore_merges=bpe["ignore_merges"])
        if name is None:
            raise refusal(model, "GGUF has no name for the way in which its tokenizer cuts texts")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_merges(merges)
        writer.add_add_space_prefix(files.fast.encode("a", add_special_tokens=False).tokens[0][0] != "a")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _write_special(writer, files, model)


def check_read_back(path: Path, model: StoredModel) -> None:
    """Read the tokenizer of a written file, and compare what it makes of `PROBE` with the model's own.

    Raises:
        UnsupportedModelError: they differ.
    """
    from tokenizers import Tokenizer

    found = Tokenizer.from_str(tokenizer_files(read_header(path))[TOKENIZER].decode())
    own = _files(model).fast
    if any(found.encode(line).ids != own.encode(line).ids for line in (PROBE, *PROBE.splitlines())):
        raise refusal(model, "what GGUF can say of its tokenizer encodes texts differently")


def refusal(model: StoredModel, reason: str) -> UnsupportedModelError:
    """The error for a model that a GGUF file cannot hold."""
    return UnsupportedModelError(f"{model.name} cannot be exported as gguf: {reason}")


def _files(model: StoredModel) -> TokenizerFiles:
    files = plain_tokenizer(model.tokenizer_path)
    if files is None:
        raise refusal(model, "its tokenizer is more than a tokenizer.json")
    return files


def _vocabulary(files: TokenizerFiles, bpe: dict[str, Any], size: int) -> tuple[list[str], list[int]]:
    """Text and type of every token; ids without a token are unused."""
    tokens, types = [f"[PAD{index}]" for index in range(size)], [UNUSED] * size
    for token, index in files.fast.get_vocab().items():
        if index < size:
            byte = bpe["byte_fallback"] and _BYTES.fullmatch(token)
            tokens[index], types[index] = token, BYTE if byte else NORMAL
    for index, added in files.fast.get_added_tokens_decoder().items():
        if index < size:
            types[index] = CONTROL if added.special else USER_DEFINED
    unknown = files.special.get("unk_token") or bpe["unk_token"]
    if bpe["byte_fallback"] and unknown in tokens:
        types[tokens.index(unknown)] = UNKNOWN
    return tokens, types


def _scores(tokens: list[str], merges: list[str]) -> list[float]:
    """Scores by which sentencepiece merges in the same order: the first merge that makes a token, negated."""
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(merges):
        ranks.setdefault(merge.replace(" ", ""), rank)
    return [-float(ranks[token]) if token in ranks else _NO_SCORE for token in tokens]


def _prefixed(fast: Tokenizer) -> bool:
    """Whether a sentencepiece tokenizer puts a space before a text."""
    return str(fast.encode("a", add_special_tokens=False).tokens[0]).startswith(_SPACE)


def _pre_tokenizer(fast: Tokenizer, *, ignore_merges: bool) -> str | None:
    """The name of the way in which a byte-level tokenizer cuts texts; None if it has none."""
    if fast.pre_tokenizer is None:
        return None
    expected = _cut(fast.normalizer, fast.pre_tokenizer)
    names: dict[PreTokenizer, str] = {}
    for name, way in PRE_TOKENIZERS.items():
        names.setdefault(way, name)
    for way, name in names.items():
        if way.ignore_merges == ignore_merges and _cut(*cutter(way, space=False)) == expected:
            return name
    return None


def _cut(normalizer: Any, pre_tokenizer: Any) -> list[list[str]]:
    """Pieces of each line of `PROBE`, and of all of it."""
    lines = (PROBE, *PROBE.splitlines())
    normal = lines if normalizer is None else [normalizer.normalize_str(line) for line in lines]
    return [[piece for piece, _ in pre_tokenizer.pre_tokenize_str(line)] for line in normal]


def _write_special(writer: GGUFWriter, files: TokenizerFiles, model: StoredModel) -> None:
    """Write special tokens, where texts begin and end, and the chat template."""
    fast = files.fast
    ids = {name: fast.token_to_id(text) for name, text in files.special.items() if name in NAMED}
    ends = [token for token in model.spec.eos_token_ids if token < model.spec.vocab_size]
    if ends and ids.get("eos_token") not in ends:
        ids["eos_token"] = ends[0]
    if model.spec.bos_token_id is not None:
        ids.setdefault("bos_token", model.spec.bos_token_id)
    for name, index in ids.items():
        if index is not None:
            writer.add_uint32(f"tokenizer.ggml.{NAMED[name]}", index)
    if others := [token for token in ends if token != ids["eos_token"]]:
        writer.add_eot_token_id(others[0])
    plain, whole = (fast.encode("a", add_special_tokens=special).ids for special in (False, True))
    writer.add_add_bos_token(len(whole) > len(plain) and whole[0] == ids.get("bos_token"))
    writer.add_add_eos_token(len(whole) > len(plain) and whole[-1] == ids.get("eos_token"))
    if files.template is not None:
        writer.add_chat_template(files.template)
