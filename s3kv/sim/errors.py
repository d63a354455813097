"""What the simulated runtime raises about a connector."""

from __future__ import annotations


class ContractError(RuntimeError):
    """A connector broke the runtime's contract, or a rank stopped because another's connector did."""


class BringUpError(RuntimeError):
    """The runtime refuses to start with this connector or these settings; the message names what to change."""
