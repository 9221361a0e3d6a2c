"""Disk space: checked before something large is written.

Owns the reserve that is left to others. Reads the file system only.
"""

import shutil
from pathlib import Path

RESERVE_BYTES = 64 * 1024 * 1024


class DiskSpaceError(RuntimeError):
    """A disk has too little room; the message gives both numbers and the remedy."""


def check_space(folder: Path, needed: int, what: str) -> None:
    """Check that the disk of an existing folder has room for ``needed`` bytes and the reserve.

    Raises:
        DiskSpaceError: it has not.
    """
    free = shutil.disk_usage(folder).free
    if free < needed + RESERVE_BYTES:
        raise DiskSpaceError(
            f"{what}: {needed >> 20} MiB are needed and {RESERVE_BYTES >> 20} MiB in reserve, the disk of {folder} has "
            f"{free >> 20} MiB free; free some space or set ZCCP_HOME to another disk"
        )
