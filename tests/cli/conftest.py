"""Fixtures of the CLI's tests."""

from support.places import filled, filled_everywhere, local, place

__all__ = ["filled", "filled_everywhere", "local", "place"]
