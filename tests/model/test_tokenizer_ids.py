"""Ids equal those of transformers and of SentencePiece; what cannot be rebuilt exactly is refused by name."""

import json

import gguf
import pytest
import sentencepiece
import transformers
from tokenizers import AddedToken, pre_tokenizers
from tokenizers import Tokenizer as Engine

from appliance.model.gguf_file import open_gguf
from appliance.model.gguf_tokenizer import rebuild_text_assets
from appliance.model.hf_text import read_text_assets
from appliance.model.tokenizer import TextAssets, Tokenizer, TokenizerError
from tests.support.real_model import smollm2_gguf
from tests.support.texts import TEXTS
from tests.support.tiny_models import SPECIALS, merges_of, save_gguf, save_hf, tiny_tokenizer
from tests.support.tiny_sentencepiece import gguf_metadata, trained


def differing(tokenizer, reference, texts=TEXTS, *, parse_special=False):
    """Texts whose ids differ."""
    return [
        text for text in texts if list(tokenizer.encode(text, parse_special=parse_special)) != list(reference(text))
    ]


@pytest.fixture(scope="module")
def real():
    """The real vocabulary as we rebuild it from the GGUF file, and as transformers does."""
    path = smollm2_gguf()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # the file's pre-tokenizer splits digits one by one, which that loader leaves out
    theirs._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return Tokenizer(rebuild_text_assets(open_gguf(path).metadata)), theirs


def test_real_gguf_vocabulary_equals_transformers(real):
    ours, theirs = real
    assert differing(ours, lambda text: theirs.encode(text, add_special_tokens=False)) == []
    marked = [f"<|im_start|>user\n{text}<|im_end|>\n" for text in TEXTS]
    assert differing(ours, lambda t: theirs.encode(t, add_special_tokens=False), marked, parse_special=True) == []


def test_a_text_of_control_tokens_as_transformers_splits_it(real):
    ours, theirs = real
    for text in ("<|im_end|>", "hi<|im_end|>\n<|im_start|>system", "<|endoftext|><|im_start|>", "a <|im_end|> b"):
        plain = theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
        assert list(ours.encode(text, parse_special=False)) == plain
        assert not {0, 1, 2} & set(plain)


def test_tiny_byte_level_directory_equals_transformers(tmp_path):
    save_hf(tmp_path, "llama")
    ours = Tokenizer(read_text_assets(tmp_path))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert differing(ours, theirs.encode) == []
    marked = [f"{text}<|im_end|>{text}" for text in TEXTS]
    assert differing(ours, theirs.encode, marked, parse_special=True) == []


def test_tiny_byte_level_gguf_equals_its_tokenizer_json(tmp_path):
    save_hf(tmp_path, "llama")
    save_gguf(tmp_path / "tiny.gguf", "llama")
    ours = Tokenizer(rebuild_text_assets(open_gguf(tmp_path / "tiny.gguf").metadata))
    theirs = Tokenizer(read_text_assets(tmp_path))
    assert differing(ours, lambda text: theirs.encode(text, parse_special=False)) == []


PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+",
}
PATTERNS["smaug-bpe"] = PATTERNS["llama-bpe"]  # the same split, but without llama's rule of whole words first


def byte_level_metadata(pre):
    tokenizer = tiny_tokenizer()
    tokens = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text in SPECIALS else 1 for text in tokens],
        "tokenizer.ggml.merges": merges_of(tokenizer),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata if pre is None else {**metadata, "tokenizer.ggml.pre": pre}


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "smaug-bpe", "qwen2"])
def test_bc154_pre_tokenizers_split_as_their_models_do(pre):
    """Against a tokenizer.json written out here as the models of that name carry it."""
    document = json.loads(tiny_tokenizer().to_str())
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    if pre in PATTERNS:
        split = {"type": "Split", "pattern": {"Regex": PATTERNS[pre]}, "behavior": "Isolated", "invert": False}
        steps = [split, {**byte_level, "use_regex": False}]
        document["model"]["ignore_merges"] = pre == "llama-bpe"
        document["normalizer"] = {"type": "NFC"} if pre == "qwen2" else None
    else:
        steps = [{"type": "Digits", "individual_digits": True}, byte_level] if pre == "smollm" else [byte_level]
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    reference = transformers.PreTrainedTokenizerFast(tokenizer_object=Engine.from_str(json.dumps(document)))
    assets = rebuild_text_assets(byte_level_metadata(pre))
    bos = [1] if pre == "llama-bpe" else []
    assert assets.add_bos == bool(bos)
    assert differing(Tokenizer(assets), lambda text: bos + reference.encode(text, add_special_tokens=False)) == []


def test_the_default_pre_tokenizer_is_taken_with_a_warning(caplog):
    tokenizer = Tokenizer(rebuild_text_assets(byte_level_metadata("default")))
    assert "'default'" in caplog.text
    engine = tokenizer._parsing.pre_tokenizer
    assert [piece for piece, _ in engine.pre_tokenize_str("1234567 a+b")] == ["123", "456", "7", "Ġa", "+", "b"]


@pytest.mark.parametrize(("pre", "words"), [(None, "is missing"), ("never-heard-of", "is 'never-heard-of'")])
def test_absent_and_unknown_pre_tokenizers_are_refused(pre, words):
    with pytest.raises(TokenizerError, match=words) as caught:
        rebuild_text_assets(byte_level_metadata(pre))
    assert "Supported: gpt-2" in str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokenizer.ggml.model": "t5"}, "'t5'; supported: gpt2"),
        ({"tokenizer.ggml.merges": None}, "merges is missing"),
        ({"tokenizer.ggml.tokens": None}, "tokens is missing"),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": None}, "'a' has the ids 0 and 2"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "one type for each of 384"),
        ({"tokenizer.ggml.model": "llama"}, "one score for each of 384"),
    ],
)
def test_incomplete_vocabularies_are_refused(change, words):
    metadata = {k: v for k, v in {**byte_level_metadata("gpt-2"), **change}.items() if v is not None}
    with pytest.raises(TokenizerError, match=words):
        rebuild_text_assets(metadata)


def test_without_token_types_the_named_ids_are_control_tokens():
    metadata = byte_level_metadata("gpt-2")
    del metadata["tokenizer.ggml.token_type"]
    tokenizer = Tokenizer(rebuild_text_assets(metadata))
    assert set(tokenizer.control_texts) == set(SPECIALS)


@pytest.mark.parametrize("kind", [1, 4])
def test_bc044_turn_marks_are_control_tokens_whatever_their_type_says(kind):
    """Older files list them as normal or user-defined tokens, as which a user's text could forge a turn."""
    metadata = byte_level_metadata("gpt-2")
    marked = [kind if text in SPECIALS else 1 for text in metadata["tokenizer.ggml.tokens"]]
    template = {"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"}
    assets = rebuild_text_assets({**metadata, "tokenizer.ggml.token_type": marked, **template})
    tokenizer = Tokenizer(assets)
    assert set(tokenizer.control_texts) == set(SPECIALS)
    assert not {0, 1, 2} & set(tokenizer.encode("<|im_end|>\n<|im_start|>system", parse_special=False))
    assert assets.eos_ids == (2,)


def test_bc079_padding_at_the_end_of_a_vocabulary_has_no_ids():
    """Converters list a token of type unused for every embedding row beyond the model's own vocabulary."""
    plain = byte_level_metadata("gpt-2")
    tokens, kinds = plain["tokenizer.ggml.tokens"], plain["tokenizer.ggml.token_type"]
    listed = {
        "tokenizer.ggml.tokens": [*tokens, *(f"[PAD{len(tokens) + n}]" for n in range(3))],
        "tokenizer.ggml.token_type": [*kinds, 5, 5, 5],
    }
    padded = Tokenizer(rebuild_text_assets({**plain, **listed}))
    assert padded.num_ids == Tokenizer(rebuild_text_assets(plain)).num_ids == len(tokens)
    assert padded.table.raw(len(tokens)) == b""
    assert differing(padded, lambda text: Tokenizer(rebuild_text_assets(plain)).encode(text, parse_special=False)) == []
    of_use = Tokenizer(rebuild_text_assets({**plain, **listed, "tokenizer.ggml.token_type": [*kinds, 5, 5, 1]}))
    assert of_use.num_ids == len(tokens) + 3


def test_bc079_padding_of_a_sentencepiece_vocabulary():
    plain = gguf_metadata(trained())
    size = len(plain["tokenizer.ggml.tokens"])
    padded = {
        **plain,
        "tokenizer.ggml.tokens": [*plain["tokenizer.ggml.tokens"], "[PAD1]", "[PAD2]"],
        "tokenizer.ggml.scores": [*plain["tokenizer.ggml.scores"], -1000.0, -1000.0],
        "tokenizer.ggml.token_type": [*plain["tokenizer.ggml.token_type"], 5, 5],
    }
    ours, theirs = Tokenizer(rebuild_text_assets(padded)), Tokenizer(rebuild_text_assets(plain))
    assert ours.num_ids == size
    assert differing(ours, lambda text: theirs.encode(text, parse_special=False)) == []


def test_sentencepiece_gguf_equals_sentencepiece():
    proto = trained()
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    ours = Tokenizer(rebuild_text_assets(gguf_metadata(proto)))
    assert differing(ours, lambda text: [1, *reference.encode(text)]) == []


def test_sentencepiece_without_dummy_prefix():
    proto = trained()
    proto.normalizer_spec.add_dummy_prefix = False
    reference = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    ours = Tokenizer(rebuild_text_assets(gguf_metadata(proto, space_prefix=False)))
    assert differing(ours, lambda text: [1, *reference.encode(text)]) == []


@pytest.fixture(scope="module", params=[True, False], ids=["legacy", "first"])
def spm_directory(request, tmp_path_factory):
    """A transformers directory with a SentencePiece tokenizer, in both ways of placing the leading space."""
    folder = tmp_path_factory.mktemp("spm")
    (folder / "tokenizer.model").write_bytes(trained().SerializeToString())
    fast = transformers.LlamaTokenizer.from_pretrained(folder, legacy=request.param)
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|end|>"]})
    fast.save_pretrained(folder)
    (folder / "tokenizer.model").unlink()
    return folder


def test_sentencepiece_directory_equals_transformers(spm_directory):
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(spm_directory)
    ours = Tokenizer(read_text_assets(spm_directory))
    assert differing(ours, theirs.encode) == []
    marked = [f"<|user|>{text}<|end|> {text}" for text in TEXTS]
    assert differing(ours, theirs.encode, marked, parse_special=True) == []


def test_scaffold_pieces_equal_one_parse_of_the_whole(spm_directory):
    """A rendered template is encoded piece by piece; without marks that must be what one parse gives."""
    tokenizer = Tokenizer(read_text_assets(spm_directory))
    for text in TEXTS:
        scaffold = f"<s><|user|>{text}<|end|>\n{text}</s>"
        assert tokenizer.encode_scaffold(scaffold, "") == tokenizer.encode(scaffold, parse_special=True)


def test_flags_of_control_tokens_are_kept_in_scaffolds():
    engine = tiny_tokenizer()
    engine.add_tokens([AddedToken("<l>", special=True, lstrip=True), AddedToken("<r>", special=True, rstrip=True)])
    engine.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = Tokenizer(TextAssets(tokenizer_json=engine.to_str()))
    for text in ("a \n<l> b", "a <r> \n b", "a  <l><r>  b<|im_end|> c", "<think>x</think> <r>  <l> <think>"):
        assert tokenizer.encode_scaffold(text, "") == tokenizer.encode(text, parse_special=True)
    think = engine.token_to_id("<think>")
    assert think in tokenizer.encode("<think>", parse_special=False)


def llama3_assets(**changes):
    return TextAssets(
        **{"tokenizer_json": tiny_tokenizer().to_str(), "add_bos": True, "bos_id": 1, "eos_ids": (2,), **changes}
    )


def test_bos_stands_once():
    tokenizer = Tokenizer(llama3_assets())
    assert tokenizer.encode("Hi", parse_special=True).count(1) == 1
    assert tokenizer.encode("<|im_start|>Hi", parse_special=True) == tokenizer.encode("Hi", parse_special=True)
    plain = tokenizer.encode("<|im_start|>Hi", parse_special=False)
    assert plain[0] == 1
    assert plain.count(1) == 1
    assert len(plain) > 4
    assert list(tokenizer.encode("", parse_special=True)) == [1]
    assert 1 not in Tokenizer(llama3_assets(add_bos=False)).encode("Hi", parse_special=True)


def test_bos_of_a_directory(tmp_path):
    """The configuration's word counts; without it, what the tokenizer's own post-processor does."""
    save_hf(tmp_path, "llama")
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|im_start|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|im_start|>": {"id": "<|im_start|>", "ids": [1], "tokens": ["<|im_start|>"]}},
    }
    assert not read_text_assets(tmp_path).add_bos
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    assert (read_text_assets(tmp_path).add_bos, read_text_assets(tmp_path).bos_id) == (True, 1)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "add_bos_token": False}))
    assert not read_text_assets(tmp_path).add_bos


def test_bc081_end_ids_of_a_directory(tmp_path):
    save_hf(tmp_path, "llama")
    assert read_text_assets(tmp_path).eos_ids == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert read_text_assets(tmp_path).eos_ids == (0, 2)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    (tmp_path / "config.json").unlink()
    assert read_text_assets(tmp_path).eos_ids == (0, 1, 2), "the third comes from tokenizer_config.json"


def test_end_ids_of_a_gguf_file_include_the_turn_end_that_the_template_writes():
    metadata = {**byte_level_metadata("gpt-2"), "tokenizer.ggml.eos_token_id": 0}
    assert rebuild_text_assets(metadata).eos_ids == (0,)
    template = {"tokenizer.chat_template": "{{ messages[0].content }}<|im_end|>"}
    assert rebuild_text_assets({**metadata, **template}).eos_ids == (0, 2)
    assert rebuild_text_assets({**metadata, "tokenizer.ggml.eot_token_id": 1}).eos_ids == (0, 1)


def test_damaged_documents_are_refused(tmp_path):
    with pytest.raises(TokenizerError, match="cannot be loaded"):
        Tokenizer(TextAssets(tokenizer_json="{}"))
    with pytest.raises(TokenizerError, match=r"tokenizer\.json not found"):
        read_text_assets(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(TokenizerError, match="fetch the file again"):
        read_text_assets(tmp_path)


def test_decoders_that_are_not_known_are_refused():
    document = json.loads(tiny_tokenizer().to_str())
    for decoder, words in (({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"), (None, "none")):
        with pytest.raises(TokenizerError, match=words):
            Tokenizer(TextAssets(tokenizer_json=json.dumps({**document, "decoder": decoder})))


def test_token_types_of_the_gguf_package_are_ours():
    kinds = gguf.TokenType
    assert (kinds.UNKNOWN, kinds.CONTROL, kinds.USER_DEFINED, kinds.BYTE) == (2, 3, 4, 6)
