"""Which files a worker takes from nginx, and the directories that both share."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from api.errors import HandoffError
from appliance.config_proxy import ProxyConfig
from appliance.handoff import (
    STALE_S,
    BodyDirectory,
    HandoffDirectoryError,
    check_memory,
    directories,
    sweep,
)
from tests.support.front import names, shared_folder

NAME = "0000000007"


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as made:
        (made / "bodies").mkdir(mode=0o700)
        yield made


def taken(folder: Path, named: str | bytes | None = None) -> bytes:
    """What is in the file that a worker is told of."""
    bodies = BodyDirectory(folder / "bodies")
    named = str(folder / "bodies" / NAME) if named is None else named
    try:
        descriptor = bodies.take(named if isinstance(named, bytes) else os.fsencode(named))
    finally:
        bodies.close()
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def test_a_body_is_taken_once(folder: Path) -> None:
    (folder / "bodies" / NAME).write_bytes(b"body")
    assert taken(folder) == b"body"
    assert names(folder / "bodies") == []
    with pytest.raises(HandoffError, match="is gone; send the request again"):
        taken(folder)


def test_an_empty_body_is_taken_too(folder: Path) -> None:
    (folder / "bodies" / NAME).touch()
    assert taken(folder) == b""


@pytest.mark.parametrize(
    "named",
    [
        "", "/", NAME, "/etc/passwd", "{bodies}", "{bodies}/", "{bodies}/../secret", "{bodies}/../bodies/" + NAME,
        "{bodies}//" + NAME, "{bodies}/./" + NAME, "{bodies}/" + NAME + "/", "{bodies}/" + NAME + "\0",
        "{bodies}/" + NAME + "\n", "{bodies}/" + NAME + "," + NAME, "{bodies}/000000007", "{bodies}/00000000007",
        "{bodies}/\u0660000000007", "{bodies}x/" + NAME, "{folder}/other/" + NAME,
    ],
)  # fmt: skip
def test_a_name_that_nginx_does_not_give_opens_nothing(folder: Path, named: str) -> None:
    (folder / "secret").write_bytes(b"secret")
    (folder / "other").mkdir()
    for place in ("bodies", "other"):
        (folder / place / NAME).write_bytes(b"body")
    with pytest.raises(HandoffError, match="outside its directory of bodies"):
        taken(folder, named.format(bodies=folder / "bodies", folder=folder))
    assert (folder / "bodies" / NAME).exists()


def test_links_and_whatever_is_no_file_are_refused_and_left(folder: Path) -> None:
    secret, place = folder / "secret", folder / "bodies" / NAME
    secret.write_bytes(b"secret")
    place.symlink_to(secret)
    with pytest.raises(HandoffError, match="cannot be opened: Too many levels of symbolic links"):
        taken(folder)
    place.unlink()
    place.hardlink_to(secret)
    with pytest.raises(HandoffError, match="has 2 names; it must have one"):
        taken(folder)
    place.unlink()
    place.mkdir()
    with pytest.raises(HandoffError, match="cannot be opened: Is a directory"):
        taken(folder)
    place.rmdir()
    os.mkfifo(place)
    with pytest.raises(HandoffError, match="is no regular file"):
        taken(folder)
    place.unlink()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        with pytest.raises(HandoffError, match="cannot be opened"):
            taken(folder)
    assert place.exists()
    assert secret.read_bytes() == b"secret"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_file_of_another_account_is_refused(folder: Path) -> None:
    place = folder / "bodies" / NAME
    place.write_bytes(b"body")
    os.chown(place, 65534, 65534)
    with pytest.raises(HandoffError, match=r"belongs to uid 65534; nginx must run under the .* account, uid 0"):
        taken(folder)
    assert place.exists()


def test_a_directory_that_was_swapped_is_not_looked_into(folder: Path) -> None:
    bodies = BodyDirectory(folder / "bodies")
    (folder / "bodies").rename(folder / "old")
    (folder / "bodies").mkdir(mode=0o700)
    (folder / "bodies" / NAME).write_bytes(b"swapped")
    with pytest.raises(HandoffError, match="gone"):
        bodies.take(os.fsencode(folder / "bodies" / NAME))
    bodies.close()


def test_the_directory_of_bodies_must_be_ours_alone(folder: Path) -> None:
    with pytest.raises(HandoffDirectoryError, match="No such file or directory; `zccp serve` makes it"):
        BodyDirectory(folder / "missing")
    (folder / "bodies").chmod(0o711)
    with pytest.raises(HandoffDirectoryError, match=r"open to others \(mode 711\); chmod 700"):
        BodyDirectory(folder / "bodies")
    (folder / "link").symlink_to(folder / "bodies")
    with pytest.raises(HandoffDirectoryError, match="is no directory"):
        BodyDirectory(folder / "link")
    if os.geteuid() == 0:
        os.chown(folder / "bodies", 65534, 65534)
        with pytest.raises(HandoffDirectoryError, match="belongs to uid 65534 and not 0"):
            BodyDirectory(folder / "bodies")


def section(folder: Path, **more: str) -> ProxyConfig:
    paths = {"directory": str(folder / "run" / "sockets"), "body_directory": str(folder / "bodies")}
    return ProxyConfig(**{**paths, **more})


def test_directories_are_made_held_and_tidied(folder: Path) -> None:
    proxy = section(folder, body_directory=str(folder / "fresh"))
    stale = proxy.socket_of(3)
    stale.parent.mkdir(parents=True, mode=0o700)
    stale.touch()
    with directories(proxy):
        for path in (proxy.sockets, proxy.bodies):
            assert path.stat().st_mode & 0o777 == 0o700
        assert not stale.exists()
        proxy.socket_of(0).touch()
        with pytest.raises(HandoffDirectoryError, match="another appliance serves"), directories(proxy):
            pass
        assert proxy.socket_of(0).exists()
    assert names(proxy.sockets) == ["lock"]
    with directories(proxy):
        pass


def test_without_a_proxy_nothing_is_made(folder: Path) -> None:
    with directories(ProxyConfig(body_directory=str(folder / "nothing"))):
        assert not (folder / "nothing").exists()
    assert sweep(ProxyConfig(body_directory=str(folder / "bodies")), 1e12) == 0


def test_bodies_on_a_disk_are_refused(tmp_path: Path) -> None:
    kinds = {
        fields.split()[4]: rest.split()[0]
        for fields, _, rest in (line.partition(" - ") for line in Path("/proc/self/mountinfo").read_text().splitlines())
    }
    home = max((mount for mount in kinds if tmp_path.is_relative_to(mount)), key=len)
    if kinds[home] in ("tmpfs", "ramfs"):
        pytest.skip("temporary files are in memory here")
    with pytest.raises(HandoffDirectoryError, match=f"is on {kinds[home]}, which would keep prompts on disk"):
        check_memory(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(folder: Path) -> None:
    (folder / "file").touch()
    proxy = section(folder, directory=str(folder / "file" / "sockets"))
    with pytest.raises(HandoffDirectoryError, match=r"cannot make .*; choose another under proxy"), directories(proxy):
        pass


def test_the_sweep_removes_old_bodies_and_nothing_else(folder: Path) -> None:
    proxy, bodies = section(folder), folder / "bodies"
    for name in ("0000000001", "0000000002", "000000003", "notes.txt"):
        (bodies / name).write_bytes(b"x")
        os.utime(bodies / name, (1000, 1000))
    (bodies / "0000000003").symlink_to("/etc/passwd")
    os.utime(bodies / "0000000003", (1000, 1000), follow_symlinks=False)
    (bodies / "0000000004").mkdir()
    os.utime(bodies / "0000000002", (1001, 1001))
    assert sweep(proxy, 1000 + STALE_S) == 0
    assert sweep(proxy, 1000.5 + STALE_S) == 2
    assert names(bodies) == ["0000000002", "0000000004", "000000003", "notes.txt"]
    assert sweep(section(folder, body_directory=str(folder / "missing")), 1e12) == 0
