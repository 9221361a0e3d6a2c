"""Address of a Unix socket at a path of any length.

The kernel takes at most 107 bytes of path. A socket is reached through an open descriptor of its folder instead, so a
run directory may lie as deep as an operator likes. Needs ``/proc``, as Linux has it.
"""

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def socket_address(path: Path) -> Generator[str]:
    """What ``bind`` or ``connect`` takes for the socket at ``path``, as long as the context lasts.

    Raises:
        OSError: the folder of the socket cannot be opened.
    """
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
