"""Verdicts on claims: yes, no, within the noise, or not measured, with the numbers behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a claim fared."""

    YES = "✓"
    NO = "✗"
    UNSURE = "≈"
    """The difference is within the noise."""
    NONE = "–"
    """Nothing to judge was measured, or the claim does not apply."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A claim's verdict on one model."""

    verdict: Verdict
    numbers: str
    """What it rests on."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Something that the method promises."""

    text: str
    """What, with its tolerance."""
    findings: Mapping[str, Finding]
    """By model; under the key `program` where it is not about a model."""

    @property
    def verdict(self) -> Verdict:
        """Over all models: no if any says no, else yes if any says yes."""
        there = {finding.verdict for finding in self.findings.values()}
        return next(
            (verdict for verdict in (Verdict.NO, Verdict.YES, Verdict.UNSURE) if verdict in there), Verdict.NONE
        )


NOTHING = Finding(Verdict.NONE, "not measured")
