"""Pages on disk: contents that host memory gave up, in files that survive a restart.

Owns one folder, its files and their order. A file is named by a digest of what made the content and of the content's
own name, begins with a header that says both again, and is written beside its place and moved there, so that it is
whole or not there. Nothing is synchronised: what a crash tears is found by its checksum. Files used longest ago go
first. Keys and values say as much as the ids that they were computed from: the folder is the appliance's alone (0700).
Used by one thread; every fault is an ``OSError`` or a miss.
"""

import hashlib
import os
import struct
import tempfile
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from appliance.reuse.lower_tiers import DamagedPageError, Page

_HEADER = struct.Struct("<8s32sQI")
"""Magic with version, name of the file, bytes of the content, CRC-32 of the content."""
_MAGIC = b"zccppg01"
_TEMPORARY = ".partial-"


class DiskTier:
    """See the module, and ``appliance.reuse.lower_tiers.PageStore``.

    Args:
        folder: where the files go; made when it is first used.
        most_bytes: of all files together, headers included.
        space: a digest of all that contents depend on beside their names: model, plan, programs.
        evicted: called for every file that gave way.
    """

    label = "disk"

    def __init__(self, folder: Path, most_bytes: int, space: bytes, evicted: Callable[[], object]) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._space = space
        self._evicted = evicted
        self._sizes: OrderedDict[str, int] | None = None
        self._bytes = 0

    def get(self, name: bytes, most_bytes: int) -> Page | None:
        """See ``PageStore.get``.

        Raises:
            DamagedPageError: a file is there and is not what was written; it is removed.
            OSError: it cannot be read.
        """
        file_name = self._file_name(name)
        if file_name not in self._files():
            return None
        path = self._path(file_name)
        try:
            with path.open("rb") as file:
                head, content = file.read(_HEADER.size), file.read(most_bytes + 1)
        except FileNotFoundError:
            self._forget(file_name)
            return None
        if head != _head(file_name, content):
            self._forget(file_name)
            path.unlink(missing_ok=True)
            raise DamagedPageError
        self._files().move_to_end(file_name)
        os.utime(path)
        return content

    def put(self, name: bytes, content: Page) -> bool:
        """See ``PageStore.put``.

        Raises:
            OSError: it cannot be written; nothing is left behind.
        """
        file_name, size = self._file_name(name), _HEADER.size + len(content)
        files = self._files()
        if file_name in files or size > self._most_bytes:
            return False
        self._make_room(size)
        path = self._path(file_name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=_TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(_head(file_name, content))
                file.write(content)
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        files[file_name] = size
        self._bytes += size
        return True

    def close(self) -> None:
        """Nothing is open."""

    def _files(self) -> OrderedDict[str, int]:
        """Sizes of the files that are there, longest unused first; looked for once."""
        if self._sizes is not None:
            return self._sizes
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)  # whoever made it
        found: list[tuple[float, str, int]] = []
        for path in self._folder.glob("??/*"):
            with suppress(FileNotFoundError):
                status = path.lstat()
                if path.name.startswith(_TEMPORARY):
                    path.unlink()  # of a process that was killed while it wrote
                else:
                    found.append((status.st_mtime, path.name, status.st_size))
        self._sizes = OrderedDict((name, size) for _, name, size in sorted(found))
        self._bytes = sum(self._sizes.values())
        self._make_room(0)
        return self._sizes

    def _make_room(self, size: int) -> None:
        files = self._files()
        while files and self._bytes + size > self._most_bytes:
            file_name = next(iter(files))
            self._path(file_name).unlink(missing_ok=True)
            self._forget(file_name)
            self._evicted()

    def _forget(self, file_name: str) -> None:
        self._bytes -= self._files().pop(file_name)

    def _file_name(self, name: bytes) -> str:
        return hashlib.sha256(self._space + name).hexdigest()

    def _path(self, file_name: str) -> Path:
        return self._folder / file_name[:2] / file_name


def _head(file_name: str, content: Page) -> bytes:
    return _HEADER.pack(_MAGIC, bytes.fromhex(file_name), len(content), zlib.crc32(content))
