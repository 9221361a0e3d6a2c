"""The bill of materials of an image: every Debian package and every Python distribution in its tree, as CycloneDX.

Owns the document. Reads what dpkg and the application's environment say of themselves; alike for equal trees, since its
number and time come from the recipe.
"""

# The library's decorators hide the constructors of its classes from type checkers.
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false

import datetime
import json
from pathlib import Path
from uuid import UUID, uuid5

from cyclonedx.model import Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

from images.debian import entered, in_tree
from images.recipe import Recipe

_LISTED = (
    "import importlib.metadata as m, json;"
    "print(json.dumps(sorted([d.metadata['Name'], d.version] for d in m.distributions())))"
)


def write_sbom(path: Path, tree: Path, recipe: Recipe, variant: str, version: str) -> None:
    """Write the document of a tree.

    Raises:
        BuildError: the tree does not say what is in it.
    """
    with entered(tree):
        debian = in_tree(tree, ["dpkg-query", "--show", "--showformat", "${Package} ${Version} ${Architecture}\\n"])
        python = in_tree(tree, ["/opt/zccp/current/bin/python", "-c", _LISTED])
    path.write_text(document(debian, python, recipe, variant, version), encoding="utf-8")


def document(debian: str, python: str, recipe: Recipe, variant: str, version: str) -> str:
    """The document as CycloneDX 1.6 in JSON.

    Args:
        debian: a line a package: name, version, architecture.
        python: a JSON list of pairs of name and version.
        recipe: what the image is made from.
        variant: which of its variants.
        version: of the release.
    """
    components = [
        _component("deb", name, of, "debian", {"arch": architecture, "distro": recipe.release})
        for name, of, architecture in (line.split() for line in debian.splitlines())
    ]
    components += [_component("pypi", name.lower().replace("_", "-"), of) for name, of in json.loads(python)]
    number = uuid5(recipe.seed, f"{variant} {version} {sorted(str(each.purl) for each in components)}")
    bom = Bom(components=components, serial_number=UUID(str(number)))
    bom.metadata.timestamp = datetime.datetime.fromtimestamp(recipe.epoch, datetime.UTC)
    whole = Component(
        name=f"zccp-{variant}", version=version, type=ComponentType.OPERATING_SYSTEM, bom_ref=f"zccp-{variant}",
        properties=[Property(name="zccp:variant", value=variant)],
    )  # fmt: skip
    bom.metadata.component = whole
    bom.register_dependency(whole, components)
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def _component(
    kind: str, name: str, version: str, vendor: str | None = None, qualifiers: dict[str, str] | None = None
) -> Component:
    url = PackageURL(kind, vendor, name, version, qualifiers)
    return Component(name=name, version=version, type=ComponentType.LIBRARY, purl=url, bom_ref=str(url))
