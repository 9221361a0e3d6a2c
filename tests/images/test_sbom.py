"""The bill of materials: of the right form, complete, and alike for equal trees."""

import json
from importlib.resources import files

import jsonschema
from referencing import Registry, Resource

from images.recipe import read_recipe
from images.sbom import document

DEBIAN = "bash 5.2.15-2+b13 amd64\nlibc6 2.36-9+deb12u15 amd64\nca-certificates 20230311+deb12u1 all\n"
PYTHON = '[["jax", "0.10.2"], ["Jinja2", "3.1.6"], ["typing_extensions", "4.15.0"]]'
SCHEMAS = files("cyclonedx.schema._res")


def schema(name: str) -> dict[str, object]:
    return json.loads((SCHEMAS / f"{name}.SNAPSHOT.schema.json").read_text(encoding="utf-8"))


def test_it_is_cyclonedx_by_its_schema() -> None:
    main = schema("bom-1.6")
    others = [(f"{name}.SNAPSHOT.schema.json", schema(name)) for name in ("spdx", "jsf-0.82")]
    base = str(main["$id"]).rpartition("/")[0]
    registry = Registry().with_resources([
        (f"{base}/{name}", Resource.from_contents(content)) for name, content in others
    ])  # fmt: skip
    made = json.loads(document(DEBIAN, PYTHON, read_recipe(), "cpu", "1.2.3"))
    jsonschema.Draft7Validator(main, registry=registry).validate(made)
    assert made["specVersion"] == "1.6"


def test_it_names_every_package_and_the_release() -> None:
    made = json.loads(document(DEBIAN, PYTHON, read_recipe(), "cpu", "1.2.3"))
    assert sorted(each["purl"] for each in made["components"]) == [
        "pkg:deb/debian/bash@5.2.15-2%2Bb13?arch=amd64&distro=bookworm",
        "pkg:deb/debian/ca-certificates@20230311%2Bdeb12u1?arch=all&distro=bookworm",
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u15?arch=amd64&distro=bookworm",
        "pkg:pypi/jax@0.10.2",
        "pkg:pypi/jinja2@3.1.6",
        "pkg:pypi/typing-extensions@4.15.0",
    ]
    assert made["metadata"]["component"]["name"] == "zccp-cpu"
    assert made["metadata"]["component"]["version"] == "1.2.3"


def test_equal_trees_have_equal_documents_and_others_another_number() -> None:
    first = document(DEBIAN, PYTHON, read_recipe(), "cpu", "1.2.3")
    assert document(DEBIAN, PYTHON, read_recipe(), "cpu", "1.2.3") == first
    numbers = {
        json.loads(document(debian, PYTHON, read_recipe(), variant, "1.2.3"))["serialNumber"]
        for debian, variant in ((DEBIAN, "cpu"), (DEBIAN, "a100"), (DEBIAN.replace("5.2.15", "5.2.16"), "cpu"))
    }
    assert len(numbers) == 3
