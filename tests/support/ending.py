"""What a process that ends in the middle of its work does; importable by it."""

import os


def ends_at_once(*_: object) -> None:
    """End this process as the kernel would for want of memory."""
    os._exit(137)
