"""How a table says no."""

from __future__ import annotations

from laminar.errors import StoreError


class TargetTaken(StoreError):
    """The version that a commit was to become exists already, or is not the next one. Nothing was added."""


class TableUnreadable(StoreError):
    """The table is there and does not open."""
