"""Models by name in the store: brought in once, noticed when they change, read back without any array library."""

import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import numpy as np
import pytest

from api.ports import ChatMessage
from appliance.model.catalog import CatalogError, file_sha256
from appliance.model.checkpoint import CheckpointError
from appliance.model.codec import Codec
from appliance.model.library import ModelLibrary
from appliance.model.record import ModelRecordError, read_record, read_text_assets, weights_folder
from appliance.model.tokenizer import TokenizerError
from planner.architecture import UnsupportedArchitectureError
from planner.formats import WeightForm
from planner.weights import weight_specs
from tests.support.real_model import smollm2
from tests.support.tiny_models import VOCAB, save_gguf, save_hf

NOW = datetime(2026, 1, 2, tzinfo=UTC)


@pytest.fixture
def library(tmp_path):
    return ModelLibrary(tmp_path / "home", now=lambda: NOW)


def test_a_gguf_file_comes_in(tmp_path, library):
    save_gguf(tmp_path / "Tiny.gguf", "llama")
    folder = library.ensure(str(tmp_path / "Tiny.gguf"))
    record = read_record(folder)
    assert (record.name, record.reference) == ("tiny", str(tmp_path / "Tiny.gguf"))
    assert (record.context, record.eos_ids, record.bos_id, record.add_bos) == (512, (2,), 1, False)
    assert record.created == int(NOW.timestamp())
    assert record.read_architecture() == library.open(folder).architecture
    assert record.source_files[0].sha256 == file_sha256(tmp_path / "Tiny.gguf")
    assert library.records() == [record]


def test_a_directory_comes_in_and_can_be_talked_to(tmp_path, library):
    save_hf(tmp_path / "Tiny-HF", "qwen3", shard_size="60KB")
    folder = library.ensure(str(tmp_path / "Tiny-HF"))
    assert len(read_record(folder).source_files) > 1
    codec = Codec.load(folder)
    ids = codec.encode_chat([ChatMessage(role="user", content="Hi")])
    assert b"".join(map(codec.token_bytes, ids)) == b"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert read_text_assets(folder) == library.open(folder).text_assets()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("save", [save_hf, save_gguf])
def test_bc079_embedding_rows_without_an_id_are_left_out(tmp_path, library, save, tied):
    """Checkpoints round their embedding up; an id without a text must be neither accepted nor chosen."""
    path = tmp_path / ("padded.gguf" if save is save_gguf else "padded")
    model = save(path, "llama", vocab_size=VOCAB + 16, tie_word_embeddings=tied)
    folder = library.ensure(str(path))
    checkpoint = library.open(folder)
    assert read_record(folder).read_architecture() == checkpoint.architecture
    assert checkpoint.architecture.vocab == VOCAB
    tree = dict(checkpoint.weights())
    assert {name: array.shape for name, array in tree.items()} == {
        name: spec.shape for name, spec in weight_specs(checkpoint.architecture, WeightForm.FLOAT32).items()
    }
    np.testing.assert_array_equal(tree["embed"], model.model.embed_tokens.weight.detach().numpy()[:VOCAB])
    assert ("head" in tree) is not tied
    if not tied:
        np.testing.assert_array_equal(tree["head"], model.lm_head.weight.detach().numpy()[:VOCAB].T)


def test_the_second_time_nothing_is_done(tmp_path, library, monkeypatch):
    save_gguf(tmp_path / "tiny.gguf", "llama")
    folder = library.ensure(str(tmp_path / "tiny.gguf"))
    seen = []
    monkeypatch.chdir(tmp_path)
    for reference in (str(tmp_path / "tiny.gguf"), "tiny.gguf", "tiny"):
        assert library.ensure(reference, lambda *arguments: seen.append(arguments)) == folder
    assert seen == []


def test_changed_files_come_in_again_and_old_weights_go(tmp_path, library):
    path = tmp_path / "tiny.gguf"
    save_gguf(path, "llama")
    folder = library.ensure(str(path))
    weights = weights_folder(folder, WeightForm.INT8)
    weights.mkdir()
    stamp = path.stat().st_mtime_ns + 10**9
    os.utime(path, ns=(stamp, stamp))
    library.ensure(str(path))
    assert weights.is_dir()
    save_gguf(path, "llama", seed=1)
    before = read_record(folder)
    library.ensure("tiny")
    assert read_record(folder).source_files != before.source_files
    assert not weights.exists()


def test_two_models_of_one_name(tmp_path, library):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        save_gguf(tmp_path / place / "tiny.gguf", "llama")
    library.ensure(str(tmp_path / "a" / "tiny.gguf"))
    with pytest.raises(CatalogError, match=r"already has a model 'tiny' from .*a/tiny\.gguf"):
        library.ensure(str(tmp_path / "b" / "tiny.gguf"))


def test_what_cannot_be_served_leaves_no_model(tmp_path, library):
    save_hf(tmp_path / "hf", "llama")
    (tmp_path / "hf" / "tokenizer.json").unlink()
    with pytest.raises(TokenizerError, match="not found"):
        library.ensure(str(tmp_path / "hf"))
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(UnsupportedArchitectureError, match="t5"):
        library.ensure(str(tmp_path / "hf"))
    (tmp_path / "bad.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="at least 24"):
        library.ensure(str(tmp_path / "bad.gguf"))
    with pytest.raises(CatalogError, match="neither a catalogue name"):
        library.ensure("nothing")
    assert library.records() == []


def test_damaged_records_are_named_and_skipped(tmp_path, library):
    save_gguf(tmp_path / "tiny.gguf", "llama")
    folder = library.ensure(str(tmp_path / "tiny.gguf"))
    good = (folder / "model.json").read_bytes()
    for content, words in (
        (b"{", "fetch the model again"),
        (good.replace(b'"schema": 1', b'"schema": 9'), "schema 9, this version reads 1"),
        (good.replace(b'"context"', b'"novel"'), "novel"),
    ):
        (folder / "model.json").write_bytes(content)
        with pytest.raises(ModelRecordError, match=words):
            read_record(folder)
        assert library.records() == []
    (folder / "model.json").write_bytes(good)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelRecordError, match=r"tokenizer\.json"):
        read_text_assets(folder)
    with pytest.raises(ModelRecordError, match="holds no model"):
        read_record(tmp_path)


def test_a_stored_architecture_of_another_version(tmp_path, library):
    save_gguf(tmp_path / "tiny.gguf", "llama")
    record = read_record(library.ensure(str(tmp_path / "tiny.gguf")))
    changed = msgspec.structs.replace(record, architecture={**record.architecture, "novel": 1})
    with pytest.raises(UnsupportedArchitectureError, match="novel"):
        changed.read_architecture()


def test_a_worker_reads_a_model_without_array_libraries():
    code = (
        "import sys; from pathlib import Path; from appliance.model.codec import Codec\n"
        f"codec = Codec.load(Path({str(smollm2())!r}))\n"
        "assert list(codec.encode('Hello', parse_special=False)) == [19556]\n"
        "loaded = {m.partition('.')[0] for m in sys.modules}\n"
        "print(sorted(loaded & {'jax', 'jaxlib', 'numpy', 'flax', 'orbax', 'gguf'}))"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert done.stdout.strip() == "[]"


def test_the_real_model_is_what_its_card_says():
    record = read_record(smollm2())
    architecture = record.read_architecture()
    assert (architecture.layers, architecture.embed, architecture.q_heads, architecture.kv_heads) == (30, 576, 9, 3)
    assert (architecture.vocab, architecture.context, architecture.rope_theta) == (49_152, 8192, 100_000.0)
    assert architecture.tied_embeddings
    assert (record.licence, record.eos_ids) == ("Apache-2.0", (2,))
    assert architecture.parameters() == 134_515_008
    name, embed = next(iter(ModelLibrary(smollm2().parents[1]).open(smollm2()).weights()))
    assert (name, embed.shape) == ("embed", (49_152, 576))
    assert np.isfinite(embed).all()
