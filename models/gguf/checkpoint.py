"""A GGUF file as the files of a checkpoint."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from models.checkpoint_files import CONFIG, CheckpointFiles
from models.families import family_of, spec_from_config
from models.families.fields import Fields
from models.gguf.config import REMEDY, check_kind, config_of
from models.gguf.header import read_header
from models.gguf.tensors import name_in_file, tensors_of, weights_by_type
from models.gguf.tokenizer import check_tokenizer, tokenizer_files


def read_gguf(path: Path) -> CheckpointFiles:
    """Read what describes the weights of a GGUF file.

    Raises:
        UnsupportedModelError: the architecture, or an option of it, is not one this program runs; or the file is a part
            of a model.
        CheckpointError: the file is cut off, damaged, or something else.
    """
    header = read_header(path)
    architecture = check_kind(header)
    check_tokenizer(header)  # before the hours of work that it would spoil
    heads: dict[str, int] = {}
    if architecture == "llama":
        fields = Fields(table=header.metadata, source=str(path), remedy=REMEDY)
        count = fields.integer("llama.attention.head_count")
        heads["self_attn.q_proj"] = count
        heads["self_attn.k_proj"] = fields.integer("llama.attention.head_count_kv", count)
    tensors = tensors_of(header, architecture, heads)
    config = config_of(header, tensors)
    return CheckpointFiles(
        path=path,
        configuration={CONFIG: json.dumps(config, indent=2).encode()},
        spec=spec_from_config(config, source=str(path), remedy=REMEDY),
        family=family_of(config, source=str(path)),
        described_in="the metadata",
        remedy=REMEDY,
        entries=tensors,
        weights=(path,),
        own_name=partial(name_in_file, architecture=architecture),
        tokenizer=partial(tokenizer_files, header),
        types=weights_by_type(tensors.values()),
    )
