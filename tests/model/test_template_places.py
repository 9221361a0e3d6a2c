"""Where chat templates lie: each place a model may keep them, which wins, and what happens where there is none."""

import json

import gguf
import pytest

from api.ports import ChatMessage, ChatTemplateError
from appliance.model.codec import Codec
from appliance.model.gguf_file import open_gguf
from appliance.model.gguf_tokenizer import rebuild_text_assets
from appliance.model.hf_text import read_text_assets
from tests.support.tiny_models import save_hf, tiny_tokenizer, write_tokenizer

HI = [ChatMessage(role="user", content="Hi")]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


@pytest.fixture
def directory(tmp_path):
    """A Hugging Face directory without any template."""
    save_hf(tmp_path, "llama")
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    configure(tmp_path, chat_template=None)
    return tmp_path


def configure(path, **values):
    file = path / "tokenizer_config.json"
    config = {**json.loads(file.read_text()), **values}
    file.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def shown(codec, tools=()):
    return b"".join(map(codec.token_bytes, codec.encode_chat(HI, tools=tools))).decode()


def of_directory(path):
    return Codec(read_text_assets(path))


def of_gguf(path, templates):
    writer = gguf.GGUFWriter(path, "llama")
    write_tokenizer(writer)
    writer.add_chat_template(templates)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return Codec(rebuild_text_assets(open_gguf(path).metadata))


def test_bc043_one_template_in_the_configuration(directory):
    configure(directory, chat_template="plain {{ messages[0].content }}")
    assert shown(of_directory(directory)) == shown(of_directory(directory), TOOLS) == "plain Hi"


def test_bc043_a_list_in_the_configuration(directory):
    good = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    configure(directory, chat_template=[*good, {"name": "none"}, {"name": "default", "template": ["plain"]}, "text"])
    codec = of_directory(directory)
    assert (shown(codec), shown(codec, TOOLS)) == ("plain", "with tools")


def test_bc043_a_file_beside_the_configuration_wins(directory):
    configure(directory, chat_template="from the configuration")
    (directory / "chat_template.jinja").write_text("from the file")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("tools from a file")
    codec = of_directory(directory)
    assert (shown(codec), shown(codec, TOOLS)) == ("from the file", "tools from a file")


def test_bc043_the_older_file_serves_where_the_configuration_has_none(directory):
    (directory / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert shown(of_directory(directory)) == "from json"
    configure(directory, chat_template="from the configuration")
    assert shown(of_directory(directory)) == "from the configuration"


def test_bc043_templates_in_the_metadata_of_a_gguf_file(tmp_path):
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    codec = of_gguf(tmp_path / "both.gguf", both)
    assert (shown(codec), shown(codec, TOOLS)) == ("plain", "with tools")
    one = of_gguf(tmp_path / "one.gguf", "plain")
    assert shown(one) == shown(one, TOOLS) == "plain"


@pytest.mark.parametrize("given", [None, [], 7, {"default": "x"}])
def test_bc043_without_a_template_there_is_no_chat_but_text(directory, given):
    configure(directory, chat_template=given)
    codec = of_directory(directory)
    assert not codec.has_chat_template
    assert list(codec.encode("Hi", parse_special=True)) == tiny_tokenizer().encode("Hi").ids
    with pytest.raises(ChatTemplateError, match="this model has no chat template; use /v1/completions"):
        codec.encode_chat(HI)
