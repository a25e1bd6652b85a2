"""Chat templates: exact ids, no second BOS, and a clean refusal for everything that cannot be rendered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ssd_ascend.errors import ConfigError, RequestError
from ssd_ascend.text import Tokenizer
from tests.unit.text_toys import byte_fallback_backend, byte_level_backend, load, putting_bos, write_directory

USER = [{"role": "user", "content": "the end"}]
PLAIN = "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}: {{ m.content }}\n{% endfor %}"
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
)


def chat(tmp_path: Path, template: object, **config: Any) -> Tokenizer:
    return load(
        tmp_path, putting_bos(byte_level_backend()), bos_token="<s>", eos_token="</s>", chat_template=template, **config
    )


def test_no_double_bos_and_the_prompt_is_what_the_template_says(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, PLAIN)
    ids = tokenizer.chat.render(USER, add_generation_prompt=False)
    assert ids.count(tokenizer.bos_id) == 1
    assert ids[0] == tokenizer.bos_id
    assert ids == tokenizer.encode("<s><|turn|>user: the end\n", add_special_tokens=False)
    assert tokenizer.encode("the", add_special_tokens=True)[0] == tokenizer.bos_id


def test_same_as_transformers(tmp_path: Path) -> None:
    """The extras templates rely on: tojson, namespace, loop controls, generation blocks, trimmed blocks."""
    from transformers import AutoTokenizer

    template = """{%- set ns = namespace(n=0) %}
{% for m in messages %}
    {% if m.role == 'skip' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
{{ ns.n }} {{ m.role | upper }} {% generation %}{{ m.content | trim }}{% endgeneration %}

{% endfor %}
{{ tools | tojson(indent=2) }}{% if add_generation_prompt %}<|turn|>assistant{{ extra }}{% endif %}"""
    tokenizer = chat(tmp_path, template, tokenizer_class="PreTrainedTokenizerFast")
    reference = AutoTokenizer.from_pretrained(str(tmp_path), trust_remote_code=False)
    messages = [*USER, {"role": "skip", "content": "x"}, {"role": "assistant", "content": " <b>é</b> 😀 "}]
    tools = [{"type": "function", "function": {"name": "f", "description": "a < b & 'é'"}}]
    ours = tokenizer.chat.render(messages, add_generation_prompt=True, tools=tools, extra="!")
    theirs = reference.apply_chat_template(
        messages, add_generation_prompt=True, tools=tools, extra="!", tokenize=True, return_dict=False
    )
    assert ours == theirs


def test_content_parts_become_the_string_a_template_expects(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, PLAIN)
    parts = [{"role": "user", "content": [{"type": "text", "text": "the"}, {"type": "text", "text": "end"}]}]
    text = tokenizer.chat.render_text(parts, add_generation_prompt=False)
    assert text == "<s><|turn|>user: the\nend\n"


def test_string_becomes_the_parts_a_template_walks_over(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, PARTS)
    assert tokenizer.chat.render_text(USER, add_generation_prompt=False) == "[the end]"


def test_image_part_is_refused(tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(RequestError, match=r"messages\[0\].*image_url") as caught:
        chat(tmp_path, PLAIN).chat.render([message], add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_no_template_is_a_request_error_with_a_hint(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_level_backend())
    assert not tokenizer.chat.available
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.chat.render(USER, add_generation_prompt=True)
    assert caught.value.param == "messages"
    assert "/v1/completions" in str(caught.value)


def test_no_messages_is_a_request_error(tmp_path: Path) -> None:
    """B34: an empty list must not reach the engine as an empty prompt."""
    with pytest.raises(RequestError, match="no messages") as caught:
        chat(tmp_path, PLAIN).chat.render([], add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_what_the_template_raises_reaches_the_user(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, ALTERNATE)
    assert tokenizer.chat.render_text(USER, add_generation_prompt=False) == "the end"
    with pytest.raises(RequestError, match="roles must alternate user/assistant") as caught:
        tokenizer.chat.render([*USER, *USER], add_generation_prompt=False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'x' + messages[0].nothing }}",
        "{{ messages[0].content + none }}",
        "{{ 1 // (messages | length - 1) }}",
        "{% for i in range(999999999) %}x{% endfor %}",
        "{{ messages[7].content }}",
    ],
)
def test_template_that_trips_over_the_data_refuses_it(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="refuses these messages"):
        chat(tmp_path, template).chat.render(USER, add_generation_prompt=False)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[0]['__class__'] }}",
        "{{ raise_exception.__globals__ }}",
        "{% set x = messages.append(1) %}",
        "{% set x = messages[0].update({'role': 'system'}) %}",
        "{{ '{0.__class__}'.format(1) }}",
        "{{ messages | map(attribute='__class__') | list }}",
    ],
)
def test_unsafe_template_is_refused(tmp_path: Path, template: str) -> None:
    with pytest.raises(RequestError, match="does what none may do") as caught:
        chat(tmp_path, template).chat.render(USER, add_generation_prompt=False)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("template", ["{% for %}", "{{ x | nosuchfilter }}", "{% nosuchtag %}"])
def test_broken_template_is_a_start_up_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        chat(tmp_path, template)


def test_rendering_leaves_the_messages_alone(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    chat(tmp_path, PLAIN).chat.render(messages, add_generation_prompt=True)
    assert json.dumps(messages) == before


def test_tool_call_arguments_are_objects_in_the_template(tmp_path: Path) -> None:
    tokenizer = chat(tmp_path, "{% for c in messages[0].tool_calls %}{{ c.function.arguments | tojson }};{% endfor %}")
    calls = [{"function": {"name": "f", "arguments": text}} for text in ('{"city": "Köln"}', "not json")]
    text = tokenizer.chat.render_text([{"role": "assistant", "tool_calls": calls}], add_generation_prompt=False)
    assert text == '{"city": "Köln"};"not json";'


def test_named_templates_and_where_they_come_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]
    directory = write_directory(tmp_path / "m", byte_level_backend(), chat_template=named)
    tools = [{"type": "function"}]
    assert Tokenizer.load(directory).chat.render_text(USER, add_generation_prompt=True) == "config"
    assert Tokenizer.load(directory).chat.render_text(USER, add_generation_prompt=True, tools=tools) == "tools"
    (directory / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(directory).chat.render_text(USER, add_generation_prompt=True) == "file"
    (tmp_path / "mine.jinja").write_text("mine")
    overridden = Tokenizer.load(directory, chat_template=tmp_path / "mine.jinja")
    assert overridden.chat.render_text(USER, add_generation_prompt=True, tools=tools) == "mine"
    with pytest.raises(ConfigError, match=r"none\.jinja"):
        Tokenizer.load(directory, chat_template=tmp_path / "none.jinja")


def test_sentencepiece_prompt_has_its_template_text_back(tmp_path: Path) -> None:
    tokenizer = load(tmp_path, byte_fallback_backend(), bos_token="<s>", chat_template=PLAIN)
    ids = tokenizer.chat.render(USER, add_generation_prompt=False)
    assert ids.count(tokenizer.bos_id) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True).replace(" ", "") == "user:theend\n"
