"""A small SentencePiece BPE vocabulary with byte fallback, trained here; equal calls, equal vocabularies."""

import io

import gguf
import sentencepiece
from sentencepiece import sentencepiece_model_pb2 as model_proto

CORPUS = [
    "The appliance serves open models and counts every token it gives.",
    "It keeps pages of keys and values, and pages of pages, and words of words.",
    "Hello world, hello words, two words and two more words.",
    "def step(batch): return [row for row in batch]",
    "Wer früh plant, rechnet später weniger und öfter.",
] * 8


def trained(vocab: int = 420) -> model_proto.ModelProto:
    """A trained model with <unk>, <s>, </s>, 256 bytes and two user-defined pieces."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_writer=out,
        vocab_size=vocab,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=True,
        user_defined_symbols=["<|user|>", "<|end|>"],
        minloglevel=2,
        num_threads=1,
    )
    proto = model_proto.ModelProto()
    proto.ParseFromString(out.getvalue())
    return proto


def gguf_metadata(proto: model_proto.ModelProto, *, space_prefix: bool = True) -> dict[str, object]:
    """The vocabulary as GGUF metadata, user-defined pieces as control tokens."""
    types = {1: 1, 2: 2, 3: 3, 4: 3, 5: 5, 6: 6}
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [piece.piece for piece in proto.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in proto.pieces],
        "tokenizer.ggml.token_type": [types[piece.type] for piece in proto.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


assert gguf.TokenType.BYTE == 6
