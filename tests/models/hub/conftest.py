"""A hub on loopback, and a separate cache for every test."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import certifi
import pytest

from tests.models.hub.hub_server import HubServer


@pytest.fixture(scope="session")
def one_certificate(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file of one root certificate: each client would read all of them, in 40 ms, and none is needed here."""
    file = tmp_path_factory.mktemp("certificates") / "one.pem"
    first, end, _ = Path(certifi.where()).read_text(encoding="utf-8").partition("-----END CERTIFICATE-----")
    file.write_text(first + end, encoding="utf-8")
    return str(file)


@pytest.fixture(autouse=True)
def no_proxy_no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one_certificate: str) -> None:
    """The loopback is reached directly, no login of the person is read, huggingface_hub reports to nobody."""
    from huggingface_hub import constants

    monkeypatch.setenv("SSL_CERT_FILE", one_certificate)
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub() -> Iterator[HubServer]:
    """An empty hub."""
    server = HubServer()
    try:
        yield server
    finally:
        server.close()


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """An empty cache."""
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def sharded() -> dict[str, bytes]:
    """A repository with two shards, a consolidated copy, and much that a checkpoint does not need."""
    return repository(shards=2, shard_bytes=300_000)


def repository(shards: int, shard_bytes: int, seed: int = 0) -> dict[str, bytes]:
    """Files of a repository; the weights are noise."""
    generator = random.Random(seed)
    names = [f"model-{index + 1:05d}-of-{shards:05d}.safetensors" for index in range(shards)]
    index = {"metadata": {}, "weight_map": {f"tensor{number}": name for number, name in enumerate(names)}}
    return {
        "README.md": b"# A model\n",
        ".gitattributes": b"*.safetensors filter=lfs\n",
        "config.json": json.dumps({"model_type": "llama", "seed": seed}).encode(),
        "generation_config.json": b'{"eos_token_id": 2}',
        "tokenizer.json": generator.randbytes(40_000),
        "tokenizer_config.json": b'{"tokenizer_class": "PreTrainedTokenizerFast"}',
        "chat_template.jinja": b"{{ messages }}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: generator.randbytes(shard_bytes + number) for number, name in enumerate(names)},
        "consolidated.safetensors": b"all of it again",
        "pytorch_model.bin": b"a pickle",
        "model.gguf": b"another format",
        "original/params.json": b"{}",
    }
