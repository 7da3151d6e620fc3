"""Speculation statistics of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Speculation statistics of an answer or a measurement."""

    gamma: int
    """Tokens that the model drafts per round, at the end of the answer; 0: drafting did not pay, so decoding continued
    without. If the model drafts none, the average number of copied tokens per round."""
    acceptance_rate: float
    """Accepted share of the drafted tokens; 0 if none was drafted."""
    tokens_per_verify: float
    """Tokens per round, including the one that verification adds; 0 if there was no round."""
    rounds: int
    """Verifications."""
    drafted: int
    """Tokens drafted."""
    plain: int
    """Tokens decoded one by one between rounds."""


class Counts:
    """Counts rounds."""

    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = self.plain = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Record a round; a round without drafted tokens is a plain step."""
        self.rounds += drafted > 0
        self.plain += drafted == 0
        self.drafted += drafted
        self.accepted += accepted

    def result(self, gamma: int) -> Speculation:
        """The statistics, with the next gamma."""
        return Speculation(
            gamma=gamma,
            acceptance_rate=self.accepted / self.drafted if self.drafted else 0.0,
            tokens_per_verify=(self.accepted + self.rounds) / self.rounds if self.rounds else 0.0,
            rounds=self.rounds,
            drafted=self.drafted,
            plain=self.plain,
        )
