"""The accelerator's driver: one choice of packages for images and for hosts, and modules of the libraries' version."""

from pathlib import Path

import pytest
import yaml

from images import driver
from images.debian import BuildError
from images.recipe import read_recipe

ROLE = Path(__file__).parents[2] / "ansible/roles/driver/defaults/main.yml"
KERNEL = "6.1.0-50-amd64"


def test_an_image_and_a_host_that_ansible_sets_up_have_the_same_driver() -> None:
    variant = read_recipe().variant("a100")
    assert variant.module is not None
    role = yaml.safe_load(ROLE.read_text())
    packages = {*variant.packages, variant.module.package} - {"linux-image-amd64"}
    assert packages == set(role["driver_packages"])
    assert variant.module.headers == role["driver_kernel_headers"]


@pytest.mark.parametrize(("library", "told"), [
    ("535.309.01-0+deb12u1", ""),
    ("535.261.03-1", "nvidia-current.ko is of driver 535.309.01, libcuda1 of 535.261.03-1; name packages of one"),
])  # fmt: skip
def test_a_module_of_another_version_than_the_libraries_is_refused(
    library: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builder, tree = tmp_path / "builder", tmp_path / "tree"
    for place in (builder, tree):
        (place / "boot").mkdir(parents=True)
        (place / "boot" / f"vmlinuz-{KERNEL}").touch()
    built = builder / "lib/modules" / KERNEL / driver.FOLDER
    built.mkdir(parents=True)
    (built / "nvidia-current.ko").write_bytes(b"module")
    answers = {"dpkg-query": library, "chroot": "535.309.01\n"}
    monkeypatch.setattr(driver, "run", lambda command: answers[command[0]])
    if told:
        with pytest.raises(BuildError, match=told):
            driver.put_module(builder, tree)
        assert not (tree / "lib").exists()
    else:
        (put,) = driver.put_module(builder, tree)
        assert put == tree / "lib/modules" / KERNEL / driver.FOLDER / "nvidia-current.ko"
        assert put.read_bytes() == b"module"
