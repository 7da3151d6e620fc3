"""The greeting in the empty chat for users without a model of their own: the machine, and the models that fit it."""

from __future__ import annotations

from textual.screen import Screen

from app.errors import ClientError
from app.language import _
from app.tui.session import Session
from app.tui.widgets.transcript import Transcript


class Greeting:
    """Keeps the text of the empty chat up to date."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._told = False

    def keep(self, screen: Screen[None]) -> None:
        """Show the greeting once the bundled model runs, and remove it once there is another model."""
        session = self._session
        if session.newcomer and session.ready and not self._told:
            self._told = True
            screen.run_worker(self._tell(screen.query_one(Transcript)), group="greet", exit_on_error=False)
        elif self._told and not session.newcomer:
            self._told = False
            screen.query_one(Transcript).greet("")

    async def _tell(self, transcript: Transcript) -> None:
        from app.network import offline
        from app.tui.machine import found_words, welcome_words

        session = self._session
        try:
            report, found = await session.client().device(), await session.client().prospects()
        except (ClientError, OSError):
            return
        words = welcome_words(found, offline=offline(), model=session.wanted or _("the bundled model"))
        transcript.greet(f"{found_words(report)}\n\n{words}")
