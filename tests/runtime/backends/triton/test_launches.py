"""What a decoded token launches, block by block: a kernel that another one could do the work of shows here."""

from __future__ import annotations

import pytest

from tests.lab.launches import launches_of

pytestmark = pytest.mark.slow
ATTENTION, MLP = "add_norm gemv heads attend merge gemv", "add_norm gemv gate gemv"
EXPERTS, OWN = "add_norm route few gate few", "add_norm gemv add_norm gemv token_gate gemv"
LATENT = "add_norm gemv add_norm gemv heads heads attend merge gemv"
RULE = "add_norm gemv mix recur finish gemv"
BLOCKS = {
    "smollm2-3bit": {f"{ATTENTION} {MLP}"},
    "llama-3-8b-trellis": {f"{ATTENTION} {MLP}"},
    "gpt-oss-20b-4bit": {f"{ATTENTION} {EXPERTS}"},
    "qwen3.5-4b-trellis": {f"{RULE} {MLP}", f"{ATTENTION} {MLP}"},
    "glm-4.7-flash-4bit": {f"{LATENT} {MLP}", f"{LATENT} {EXPERTS}"},
    "command-r7b-trellis": {"add_norm gemv gemv heads attend merge gemv gate gemv"},
    "falcon-h1-0.5b-4bit": {f"add_norm gemv gemv mix recur finish gemv heads attend merge gemv {MLP}"},
    "gemma-4-e2b-trellis": {f"{ATTENTION} {MLP} {OWN}"},
}


@pytest.mark.parametrize("case", BLOCKS)
def test_a_block_launches(case: str) -> None:
    """Norms, gates and merges leave rotated what a trellis reads, so it has no launch that uniform codes lack."""
    found = launches_of(case)
    assert {" ".join(block) for block in found.blocks} == BLOCKS[case]
    own = sum(map(len, found.blocks))
    # The head and its norm; a block alone looks at the tokens' embeddings itself.
    assert found.token == own + 2 - (len(found.blocks) - 1 if case.startswith("gemma-4-e2b") else 0)


def test_compensation_adds_no_launch_to_a_product() -> None:
    found = launches_of("llama-3-8b-trellis", k_chunk=16)
    assert " ".join(found.blocks[0]) == f"{ATTENTION} {MLP}".replace("gemv", "compensated")
