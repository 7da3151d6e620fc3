"""What speculation did in an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What speculation did in an answer, or in a measurement."""

    gamma: int
    """Tokens that the model drafts a round at the end; 0: that did not pay, so decoding went on without. Where it
    drafts none, how many were copied a round, on average."""
    acceptance_rate: float
    """Part of the drafted tokens that stayed; 0 where none was drafted."""
    tokens_per_verify: float
    """Tokens that a round gave, the one that verification adds included; 0 where there was no round."""
    rounds: int
    """Verifications."""
    drafted: int
    """Tokens drafted."""
    plain: int
    """Tokens decoded one by one in between."""


class Counts:
    """Counts rounds."""

    def __init__(self) -> None:
        self.rounds = self.drafted = self.accepted = self.plain = 0

    def add(self, drafted: int, accepted: int) -> None:
        """Note a round; one without drafted tokens is a token decoded by itself."""
        self.rounds += drafted > 0
        self.plain += drafted == 0
        self.drafted += drafted
        self.accepted += accepted

    def result(self, gamma: int) -> Speculation:
        """What was counted, with the gamma that would be next."""
        return Speculation(
            gamma=gamma,
            acceptance_rate=self.accepted / self.drafted if self.drafted else 0.0,
            tokens_per_verify=(self.accepted + self.rounds) / self.rounds if self.rounds else 0.0,
            rounds=self.rounds,
            drafted=self.drafted,
            plain=self.plain,
        )
