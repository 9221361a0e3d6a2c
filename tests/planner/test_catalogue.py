"""The catalogue of architectures: parameter counts against the published ones, files, and what is refused."""

import json
from importlib import resources

import pytest

from planner.architecture import RopeKind, UnsupportedArchitectureError
from planner.catalogue import UnknownArchitectureError, architecture_names, find_architecture

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.3-70b": 70_553_706_496,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "gemma-3-27b": 27_432_406_640 - 416_866_032 - 1152 * 5376 - 1152,
}
"""Tensor elements that the Hugging Face Hub shows; of Gemma without the vision tower and its projection and norm."""


def test_every_architecture_has_the_published_number_of_parameters():
    assert set(PUBLISHED) == set(architecture_names())
    assert {name: find_architecture(name).parameters() for name in PUBLISHED} == PUBLISHED


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_every_architecture_names_its_source(name):
    document = json.loads(resources.files("planner.architectures").joinpath(f"{name}.json").read_text())
    assert set(document) == {"source", "config"}
    assert document["source"].startswith("config.json of ")


def test_facts_that_plans_depend_on():
    llama, gemma = find_architecture("llama-3.1-8b"), find_architecture("gemma-3-27b")
    assert (llama.context, llama.head_dim, llama.group, llama.rope_scaling.kind) == (131072, 128, 4, RopeKind.LLAMA3)
    assert (gemma.windows.count(1024), gemma.windows.count(0), gemma.windows[5]) == (52, 10, 0)
    assert not any(find_architecture("mistral-7b").windows)


def test_a_config_file_and_its_folder_are_read(tmp_path):
    document = json.loads(resources.files("planner.architectures").joinpath("qwen3-8b.json").read_text())["config"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(document))
    assert find_architecture(str(file)) == find_architecture(str(tmp_path)) == find_architecture("qwen3-8b")


def test_what_is_no_architecture_is_refused_with_the_names_there_are(tmp_path):
    with pytest.raises(UnknownArchitectureError, match=r"'llama-9' is none of gemma-3-27b, .*: No such file"):
        find_architecture("llama-9")
    file = tmp_path / "config.json"
    file.write_text("{")
    with pytest.raises(UnknownArchitectureError, match="it holds no JSON"):
        find_architecture(str(file))
    file.write_text("[1]")
    with pytest.raises(UnknownArchitectureError, match=r"holds an array; a config\.json is an object"):
        find_architecture(str(file))
    file.write_text("[" * 100_000)
    with pytest.raises(UnknownArchitectureError, match="it holds no JSON"):
        find_architecture(str(file))
    file.write_text('{"model_type": "mamba"}')
    with pytest.raises(UnsupportedArchitectureError, match=r"config\.json: model_type 'mamba' is not supported"):
        find_architecture(str(file))
