"""Even shares of equal items."""

from __future__ import annotations

from collections.abc import Sequence


def share(n_units: int, n_members: int, index: int) -> range:
    """Returns the contiguous run of `n_units` units that member `index` of `n_members` does.

    The shares of all members cover every unit exactly once, in member order, and their sizes differ by at most one.
    With more members than units the last members get an empty range.
    """
    if n_units < 0:
        raise ValueError(f"n_units must be 0 or more, got {n_units}")
    if not 0 <= index < n_members:
        raise ValueError(f"index must be in 0..n_members-1, got index {index} of {n_members} members")
    size, extra = divmod(n_units, n_members)
    start = index * size + min(index, extra)
    return range(start, start + size + (index < extra))


def even_shares(n_units: int, members: Sequence[str]) -> dict[str, int]:
    """Returns how many units each member does if all do as many, give or take one."""
    return {member: len(share(n_units, len(members), rank)) for rank, member in enumerate(members)}
