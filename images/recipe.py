"""Recipe: what an image is made of, read from ``images/recipe.yaml``.

Owns the keys of the recipe and their rules. Builds nothing and knows no mirror.
"""

from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

import msgspec
import yaml
from msgspec import Meta, Struct

RECIPE = Path(__file__).with_name("recipe.yaml")
_Size = Annotated[int, Meta(ge=64)]


class RecipeError(RuntimeError):
    """The recipe cannot be read, or there is no such variant; the message names the key or the choices."""


class Module(Struct, frozen=True, forbid_unknown_fields=True):
    """A kernel module that Debian ships as source (DKMS): its package, and that of the headers it is built with."""

    package: str
    headers: str


class Variant(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of host.

    ``esp_mb``, ``root_mb`` and ``data_mb`` are the sizes of the partitions in MiB: the boot files, each of the two root
    slots, and what is kept between updates, which grows to the disk's end at boot. ``module`` is built for the image's
    kernel in a tree of its own, so that the image holds no compiler. ``lock`` names the Python packages. ``model`` is
    what the image serves unless its seed names another, and ``engine`` the section of the configuration that its
    programs are compiled for and that hosts have, with the target. ``weights``: the image holds the model's weights
    too; else the operator imports them. ``config`` are other sections before the seed's.
    """

    components: tuple[str, ...]
    packages: tuple[str, ...]
    lock: str
    accelerator: Literal["none", "a100"]
    esp_mb: _Size
    root_mb: _Size
    data_mb: _Size
    model: str
    weights: bool
    engine: dict[str, str | int | float]
    module: Module | None = None
    config: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict[str, dict[str, Any]])


class Recipe(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All variants and what they have in common.

    ``release`` is the Debian release of the image, ``tools_release`` the one whose tools write the disk. ``epoch`` is
    the time, in seconds since 1970, that files get which were made later; ``seed`` makes the ids of partitions and file
    systems.
    """

    release: str
    tools_release: str
    epoch: int
    seed: UUID
    tools: tuple[str, ...]
    packages: tuple[str, ...]
    variants: dict[str, Variant]

    def variant(self, name: str) -> Variant:
        """A variant by its name.

        Raises:
            RecipeError: there is none of that name.
        """
        try:
            return self.variants[name]
        except KeyError:
            raise RecipeError(f"there is no variant {name!r}; choose one of {', '.join(self.variants)}") from None


def read_recipe(path: Path = RECIPE) -> Recipe:
    """The recipe in a file.

    Raises:
        RecipeError: it cannot be read, or a key is unknown, missing or out of its range.
    """
    try:
        return msgspec.convert(yaml.safe_load(path.read_text(encoding="utf-8")), Recipe)
    except (OSError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise RecipeError(f"{path}: {error}") from error
