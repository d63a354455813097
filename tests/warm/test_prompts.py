"""Reading prompts and turning them into tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from s3kv.errors import ConfigError
from s3kv.warm.prompts import BadPrompt, Prompt, read_prompts
from s3kv.warm.tokens import ByteTokenizer, Untokenized, load_tokenizer, tokens_of

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>\n{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>\n{% endif %}"
)


def one(line: str, kind: str = "jsonl") -> Prompt | BadPrompt:
    (prompt,) = read_prompts("p", [line], kind)  # type: ignore[arg-type]
    return prompt


def test_text_is_a_prompt_a_line() -> None:
    found = list(read_prompts("p.txt", ["first\n", "\n", '{"second"\n']))
    assert [each.text for each in found if isinstance(each, Prompt)] == ["first", '{"second"']
    assert [each.source for each in found] == ["p.txt:1", "p.txt:3"]


def test_standard_input_is_told_apart_by_its_first_line() -> None:
    assert one('{"prompt": "a"}', "auto") == Prompt("p:1", text="a")
    assert one("a", "auto") == Prompt("p:1", text="a")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object"),
        ("{}", "needs one of"),
        ('{"prompt": "a", "messages": [{}]}', "not 2"),
        ('{"prompt": 5}', "neither a string nor"),
        ('{"prompt_token_ids": [1, true]}', "neither a string nor"),
        ('{"prompt_token_ids": [-1]}', "neither a string nor"),
        ('{"messages": "hello"}', "not a list of objects"),
        ('{"prompt": "a", "cache_salt": 5}', "cache_salt"),
        ('{"prompt": "a", "lora": []}', "lora"),
        ('{"prompt": "a", "lora": 3, "lora_request": {"lora_int_id": 4}}', "lora or lora_request, not both"),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_line_says_why(line: str, reason: str) -> None:
    bad = one(line)
    assert isinstance(bad, BadPrompt) and reason in bad.reason


def test_lora_is_an_id_or_the_servers_own_object() -> None:
    request = {"lora_name": "x", "lora_int_id": 3, "lora_path": "/x"}
    by_object, by_id = one(json.dumps({"prompt": "a", "lora": request})), one('{"prompt": "a", "lora": 3}')
    assert isinstance(by_object, Prompt) and (by_object.lora, by_object.lora_request) == ("3", request)
    assert isinstance(by_id, Prompt) and by_id.lora == "3"
    for lora in ({"lora_request": request}, {"lora": None, "lora_request": request}):
        by_request = one(json.dumps({"prompt": "a", **lora}))
        assert isinstance(by_request, Prompt) and (by_request.lora, by_request.lora_request) == ("3", request)


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = ["[UNK]", "<s>", "hello", "world", "<", ">", "user", "assistant"]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<s>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folders_tokenizer_adds_its_special_tokens_to_text_and_the_template_to_messages(model_folder: Path) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    assert tokens_of(Prompt("p", text="hello world"), tokenizer) == [1, 2, 3]
    chat = tokens_of(Prompt("p", messages=({"role": "user", "content": "hello"},)), tokenizer)
    assert chat == [1, 4, 6, 5, 2, 4, 7, 5]


def test_what_the_template_refuses_is_this_prompts_error(model_folder: Path) -> None:
    tokenizer = load_tokenizer(str(model_folder))
    with pytest.raises(Untokenized, match="no such role"):
        tokenizer.chat([{"role": "bad", "content": ""}], None)


def test_a_template_runs_no_code(model_folder: Path) -> None:
    (model_folder / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    tokenizer = load_tokenizer(str(model_folder))
    with pytest.raises(Untokenized, match="SecurityError"):
        tokenizer.chat([{"role": "user", "content": ""}], None)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ConfigError, match="no such folder"):
        load_tokenizer(str(tmp_path / "absent"))


def test_token_ids_need_no_tokenizer_and_text_does() -> None:
    assert tokens_of(Prompt("p", token_ids=(1, 2)), None) == [1, 2]
    assert tokens_of(Prompt("p", text="é"), ByteTokenizer()) == [0xC3, 0xA9]
    with pytest.raises(Untokenized, match="--tokenizer"):
        tokens_of(Prompt("p", text="x"), None)
