"""A tokenizer with which tests of the engine read and write bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import decoders, models, pre_tokenizers

from runtime.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token a byte: token 40 + b is byte b; 0, 1 and 2 are special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Fast(models.BPE({letter: 40 + i for i, letter in enumerate(alphabet)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    fast.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return Tokenizer(folder)
