"""A circuit breaker: after failures in a row nothing is sent for a while, then one call probes. Pure but for its clock.

States: closed → (failures in a row) → open → (`reset_s` later, the next call) → half open → closed, or open again.
It closes by itself with the first success. A call's outcome counts only for the state in which the call began: calls
that were stalled when an outage ended must not open the breaker again when they time out at last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from s3kv.errors import BreakerOpen

State = Literal["closed", "open", "half_open"]
Ticket = int


class Breaker:
    """`on_change` hears every new state. Used from one event loop."""

    def __init__(
        self, failures: int, reset_s: float, clock: Callable[[], float], on_change: Callable[[State], None]
    ) -> None:
        self._limit = failures
        self._reset_s = reset_s
        self._clock = clock
        self._on_change = on_change
        self._state: State = "closed"
        self._in_a_row = 0
        self._opened_at = 0.0
        self._generation: Ticket = 0
        self._probing = False

    @property
    def state(self) -> State:
        return self._state

    def admit(self) -> Ticket:
        """Permission to send one call; hand the ticket to just one of the three below. Raises BreakerOpen."""
        if self._state == "open" and self._clock() - self._opened_at >= self._reset_s:
            self._become("half_open")
        if self._state == "open" or (self._state == "half_open" and self._probing):
            raise BreakerOpen("the store has failed repeatedly; nothing is sent to it for the moment")
        self._probing = self._state == "half_open"
        return self._generation

    def succeeded(self, ticket: Ticket) -> None:
        if ticket == self._generation:
            self._in_a_row = 0
            if self._state == "half_open":
                self._become("closed")

    def failed(self, ticket: Ticket) -> None:
        if ticket == self._generation:
            self._in_a_row += 1
            if self._state == "half_open" or self._in_a_row >= self._limit:
                self._opened_at = self._clock()
                self._become("open")

    def cancelled(self, ticket: Ticket) -> None:
        """The call ended without saying anything about the store: another one may probe."""
        if ticket == self._generation:
            self._probing = False

    def _become(self, state: State) -> None:
        self._state = state
        self._generation += 1
        self._in_a_row = 0
        self._probing = False
        self._on_change(state)
