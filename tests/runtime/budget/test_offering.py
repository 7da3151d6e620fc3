"""Measuring the ways to decode: the bundled model on the CPU."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from assets import demo_path, evaluation_text
from models.store import StoredModel, StoredModelInfo
from runtime.backends import backend
from runtime.backends.decoder import Decoder, DecoderOptions
from runtime.budget import offering
from runtime.budget.profile_key import profile_key
from runtime.compensation import k_chunk_by_type
from runtime.engine.gamma import FixedGamma
from runtime.engine.measure import continued
from runtime.errors import Cancelled, RequestError
from runtime.load.plan import open_decoder
from runtime.text.sampling import SamplingOptions
from runtime.text.tokenizer import Tokenizer
from runtime.wire.device import Tuning
from tuner.offers import DecodingMode, Offers
from tuner.profiles import ProfileStore


@pytest.fixture(scope="module")
def stored() -> StoredModel:
    return StoredModel.open_folder(demo_path(), "demo")


@pytest.fixture(scope="module")
def decoder(stored: StoredModel) -> Iterator[Decoder]:
    opened = open_decoder(stored, DecoderOptions(kv="hierarchical", context=300, k_chunk=64), "cpu")[0]
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def tokens(stored: StoredModel, decoder: Decoder) -> list[int]:
    """Texts as the model itself writes them with all residuals: others are too far from what the bundled one knows."""
    prompt, text = Tokenizer(stored.tokenizer_path).encode("The keeper of the lighthouse"), []
    decoder.set_k_chunk(1024)
    for seed in range(4):
        drawn = continued(decoder, prompt, 256 - len(prompt), SamplingOptions(seed=seed), FixedGamma(0)).tokens
        text += [*prompt, *drawn]
    decoder.set_k_chunk(64)
    return text


def test_full_precision_is_known_of_the_same_text_alone(stored: StoredModel, tmp_path: Path) -> None:
    assert offering.full_precision(stored, evaluation_text()) is None, "the bundled model was judged on another text"
    folder = shutil.copytree(stored.path, tmp_path / "copy")
    file, own = folder / "recipe.json", hashlib.sha256(evaluation_text().encode()).hexdigest()
    recipe = file.read_text()
    file.write_text(recipe.replace(json.loads(recipe)["texts"]["evaluation"]["sha256"], own))
    before = StoredModelInfo.read(folder, "copy").summary.perplexity_before
    copy: Any = SimpleNamespace(path=folder, name="copy")
    assert before is not None
    assert offering.full_precision(copy, evaluation_text()) == before


def test_every_way_is_measured_once(decoder: Decoder, stored: StoredModel, tokens: list[int], tmp_path: Path) -> None:
    """More compensation loses less; drafts change no loss; what was measured is kept, and the decoder as it was."""
    common: dict[str, Any] = {"budget_percent": 50.0, "full": 9.0, "profiles": ProfileStore(tmp_path)}
    found = offering.offers(decoder, stored, tokens, **common)
    assert decoder.options.k_chunk == 64
    alone = {way.target: way for way in found.ways if not way.gamma}
    assert list(alone) == ["plain", "compensated", "residual"]
    assert alone["plain"].perplexity > alone["compensated"].perplexity > alone["residual"].perplexity
    for way in found.ways:
        assert way.perplexity == alone[way.target].perplexity
        if way.gamma:
            assert way.seconds < alone[way.target].seconds
            assert 0 < (way.acceptance_rate or 0) <= 1
    saved: dict[str, Any] = {"profiles": common["profiles"]}
    assert offering.known("cpu", stored, budget_percent=50.0, **saved) == found
    assert offering.known("cpu", stored, budget_percent=5.0, **saved) is None


def test_it_can_be_stopped_and_leaves_the_decoder_as_it_was(
    decoder: Decoder, stored: StoredModel, tokens: list[int], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"budget_percent": 50.0, "full": None, "profiles": ProfileStore(tmp_path)}
    with pytest.raises(Cancelled):
        offering.offers(decoder, stored, tokens, cancelled=lambda: True, **common)
    assert decoder.options.k_chunk == 64
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"kv": "fp16", "context": 300}, {"kv": "hierarchical", "context": 100}])
def test_a_cache_without_drafts_is_refused(
    stored: StoredModel, tokens: list[int], tmp_path: Path, options: dict[str, Any]
) -> None:
    opened = open_decoder(stored, DecoderOptions(**options), "reference")[0]
    with pytest.raises(RequestError, match="hierarchical cache of 256"):
        offering.offers(opened, stored, tokens, budget_percent=5, full=None, profiles=ProfileStore(tmp_path))


PLAIN = DecodingMode(target="plain", gamma=0, seconds=0.010, perplexity=12.0)
RESIDUAL = DecodingMode(target="residual", gamma=0, seconds=0.014, perplexity=10.0)
DRAFTED = DecodingMode(target="residual", gamma=1, seconds=0.013, perplexity=10.0, acceptance_rate=0.9)


@pytest.fixture
def tuned(decoder: Decoder) -> Iterator[Tuning]:
    """What a budget of 50 % bought."""
    none = {"predicted_slowdown_percent": 9.0, "measured_slowdown_percent": 9.0, "seconds": 0.0, "date": ""}
    common: dict[str, Any] = {"device": "this one", "n_tb_max": None, "n_tb": {}, "cached": False, **none}
    yield Tuning(budget_percent=50.0, k_chunk=k_chunk_by_type(64), **common)
    decoder.set_k_chunk(64)


def kept(stored: StoredModel, folder: Path, *ways: DecodingMode) -> ProfileStore:
    """The ways to decode, as if they had been measured."""
    key = profile_key(backend("cpu").device(DecoderOptions()), "cpu", stored)
    found = Offers(budget_percent=50.0, ways=ways, full=9.0, seconds=1.0, date="")
    profiles = ProfileStore(folder)
    profiles.update(key, lambda profile: replace(profile, offers=(found,)))
    return profiles


def test_nothing_measured_changes_nothing(decoder: Decoder, stored: StoredModel, tuned: Tuning, tmp_path: Path) -> None:
    taken = offering.take(decoder, stored, tuned, profiles=ProfileStore(tmp_path), drafts=True)
    assert taken == (tuned, False)
    assert decoder.options.k_chunk == 64


@pytest.mark.parametrize(("drafts", "slower"), [(True, 30.0), (False, 40.0)])
def test_the_best_way_is_taken(
    decoder: Decoder, stored: StoredModel, tuned: Tuning, tmp_path: Path, drafts: bool, slower: float
) -> None:
    profiles = kept(stored, tmp_path, PLAIN, RESIDUAL, DRAFTED)
    found, drafted = offering.take(decoder, stored, tuned, profiles=profiles, drafts=drafts)
    assert (drafted, decoder.options.k_chunk, set(found.k_chunk.values())) == (drafts, 1024, {1024})
    assert found.measured_slowdown_percent == pytest.approx(slower)


def test_a_cache_without_drafts_takes_the_best_without(stored: StoredModel, tuned: Tuning, tmp_path: Path) -> None:
    profiles = kept(stored, tmp_path, PLAIN, RESIDUAL, DRAFTED)
    opened = open_decoder(stored, DecoderOptions(kv="fp16", context=64), "cpu")[0]
    assert offering.take(opened, stored, tuned, profiles=profiles, drafts=True)[1] is False
    assert opened.options.k_chunk == 1024
    opened.close()


def test_residuals_that_would_not_fit_twice_are_not_all_read(
    decoder: Decoder, stored: StoredModel, tuned: Tuning, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offering, "_SPARE_BYTES", 1 << 60)
    profiles = kept(stored, tmp_path, PLAIN, replace(DRAFTED, target="compensated"), RESIDUAL)
    found, drafted = offering.take(decoder, stored, tuned, profiles=profiles, drafts=True)
    assert (found, drafted, decoder.options.k_chunk) == (tuned, True, 64)
