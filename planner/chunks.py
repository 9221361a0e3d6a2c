"""How one step's prefill budget is shared among the prompts that are being computed.

Owns one pure function. Reads nothing and moves no state.
"""

from collections.abc import Sequence


def share_budget(remaining: Sequence[int], budget: int, rows: int, align: int) -> list[tuple[int, int]]:
    """Choose which prompts get how many ids in this step.

    The oldest prompt gets at least half of the budget (or all it needs), so that it ends after a bounded number of
    steps whatever comes after it. The rest goes to the other prompts, the shortest first and among equals the oldest
    first, so that a short prompt behind a long one starts at once and equal prompts end one after the other. What
    nobody else needs goes to the oldest again. A piece that does not end its prompt is a multiple of ``align``, so that
    the next one starts aligned.

    Args:
        remaining: ids still to compute, a prompt, oldest first; each above 0.
        budget: most ids together, at least ``align``.
        rows: most prompts, at least 1.
        align: divisor of inner pieces.

    Returns:
        Pairs of an index into ``remaining`` and a number of ids above 0, oldest first.
    """
    if not remaining:
        return []
    half = -(-budget // (2 * align)) * align
    left = budget - _piece(remaining[0], half, align)
    shares: dict[int, int] = {}
    for index in sorted(range(1, len(remaining)), key=lambda i: (remaining[i], i)):
        if len(shares) == rows - 1 or left <= 0:
            break
        piece = _piece(remaining[index], left, align)
        if piece:
            shares[index] = piece
            left -= piece
    shares[0] = _piece(remaining[0], budget - sum(shares.values()), align)
    return sorted((index, count) for index, count in shares.items() if count)


def _piece(remaining: int, most: int, align: int) -> int:
    return remaining if remaining <= most else most // align * align
