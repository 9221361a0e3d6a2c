"""A kernel's log that tests write: a named pipe, watched by a node that is told it has a card."""

import os
from dataclasses import replace
from pathlib import Path

from appliance import node
from appliance.host.card_errors import KernelLog
from planner.target import find_target


def watch_cards(pipe: Path) -> None:
    """Have nodes of this process read the errors of any card from ``pipe``."""

    class PipedLog(KernelLog):
        def __init__(self, cards: tuple[str, ...]) -> None:
            self._cards = cards
            self._descriptor = os.open(pipe, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    node.KernelLog = PipedLog
    node.find_target = lambda name: replace(find_target(name), card="a card")
