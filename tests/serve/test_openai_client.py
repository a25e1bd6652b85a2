"""The official client against a live server around the scripted engine, which says its prompt over and over."""

from __future__ import annotations

import openai
import pytest

from tests.serve.live import LiveServer

HELLO = [{"role": "user", "content": "hello"}]
SAID = "user\nhello"  # the parrot repeats its prompt until the </s> that ends the user's turn


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="parrot", messages=HELLO)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", SAID, "stop")
    assert answer.object == "chat.completion"
    assert answer.model == "parrot"
    usage = answer.usage
    assert usage is not None
    assert usage.completion_tokens == 1 + len(SAID) + 1  # the turn mark and </s> count, and have no text
    assert usage.prompt_tokens == len("\x01user\nhello\x01\x01assistant\n")
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 1
    details = usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (9, 0)


def test_chat_streamed(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="parrot", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SAID
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == len(SAID) + 2
    assert len({chunk.id for chunk in [*chunks, last]}) == 1


def test_completion_continues_and_streams_alike(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="parrot", prompt="abcde", max_tokens=7)
    assert (whole.choices[0].text, whole.choices[0].finish_reason) == ("abcdeab", "length")
    stream = client.completions.create(model="parrot", prompt="abcde", max_tokens=7, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abcdeab"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["abab"]),
        (["ab", "cd"], ["abab", "cdcd"]),
    ],
)
def test_prompts_as_text_and_as_tokens(
    server: LiveServer, client: openai.OpenAI, prompt: str | list[str], texts: list[str]
) -> None:
    each = [prompt] if isinstance(prompt, str) else prompt
    ids = [server.post("/tokenize", {"prompt": text}).json()["tokens"] for text in each]
    for form in (prompt, ids[0] if isinstance(prompt, str) else ids):
        answer = client.completions.create(model="parrot", prompt=form, max_tokens=4)
        assert [choice.text for choice in answer.choices] == texts
        assert [choice.index for choice in answer.choices] == list(range(len(texts)))


def test_n_answers_to_several_prompts(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="parrot", prompt=["ab", "cd"], max_tokens=3, n=2)
    assert [(choice.index, choice.text) for choice in answer.choices] == list(enumerate(["aba", "aba", "cdc", "cdc"]))
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 12)


def test_n_streamed(client: openai.OpenAI) -> None:
    texts = {0: "", 1: "", 2: ""}
    reasons: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for chunk in client.chat.completions.create(model="parrot", messages=HELLO, n=3, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] += [choice.finish_reason] if choice.finish_reason else []
    assert texts == dict.fromkeys(range(3), SAID)
    assert reasons == {index: ["stop"] for index in range(3)}


@pytest.mark.parametrize("size", range(1, 7))
def test_stop_strings_straddle_steps_and_never_leak(client: openai.OpenAI, size: int) -> None:
    """B04: however the stop lies over the parrot's steps of four tokens."""
    pad = "x" * size
    stream = client.completions.create(
        model="parrot", prompt=f"{pad}alpha beta gamma delta", max_tokens=60, stop=["beta gamma"], stream=True
    )
    texts = [chunk.choices[0].text for chunk in stream]
    assert "".join(texts) == f"{pad}alpha "
    assert not any("b" in text for text in texts)


def test_stop_is_billed_up_to_the_token_that_completes_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="parrot", prompt="abcdefgh", max_tokens=60, stop="c")
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("ab", "stop")
    assert answer.choices[0].model_extra["stop_reason"] == "c"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_extensions(server: LiveServer, client: openai.OpenAI) -> None:
    def text(**extra: object) -> str:
        return client.completions.create(model="parrot", prompt="abcd", max_tokens=6, extra_body=extra).choices[0].text

    (c,) = server.post("/tokenize", {"prompt": "c"}).json()["tokens"]
    assert text() == "abcdab"
    assert text(stop_token_ids=[c]) == "ab"
    assert text(stop_token_ids=[c], include_stop_str_in_output=True) == "abc"
    assert text(stop="c", include_stop_str_in_output=True) == "abc"
    assert text(stop="b", min_tokens=2) == "abcda"
    assert text(top_k=5, min_p=0.1, repetition_penalty=1.1, ignore_eos=True) == "abcdab"


def test_ignore_eos(client: openai.OpenAI) -> None:
    """B08: with ignore_eos exactly max_tokens come, and no special token shows."""
    answer = client.chat.completions.create(
        model="parrot", messages=HELLO, max_completion_tokens=40, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 40
    assert "</s>" not in (answer.choices[0].message.content or "")


def test_chat_logprobs(client: openai.OpenAI) -> None:
    asked = {"model": "parrot", "messages": HELLO, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**asked).choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == f"<|turn|>{SAID}</s>"
    assert [entry.logprob for entry in content] == [-0.25] * len(content)
    assert bytes(content[1].bytes) == b"u"
    assert [other.logprob for other in content[1].top_logprobs] == [-0.25, -1.5, -9999.0]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="parrot", prompt="abcd", max_tokens=8, logprobs=2, stop="d")
    logprobs = answer.choices[0].logprobs
    assert logprobs.tokens == ["a", "b", "c", "d"]
    assert logprobs.token_logprobs == [-0.25] * 4
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.top_logprobs[0]["a"] == -0.25


def test_echo(client: openai.OpenAI) -> None:
    asked = {"model": "parrot", "prompt": ["ab", "cd"], "max_tokens": 2, "echo": True}
    assert [choice.text for choice in client.completions.create(**asked).choices] == ["abab", "cdcd"]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**asked, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "abab", 1: "cdcd"}


def test_characters_cut_over_tokens_stream_whole(client: openai.OpenAI) -> None:
    prompt = "é你好🙂👩🏽‍🚀"
    stream = client.completions.create(model="parrot", prompt=prompt, max_tokens=64, stream=True)
    texts = [chunk.choices[0].text for chunk in stream]
    whole = client.completions.create(model="parrot", prompt=prompt, max_tokens=64).choices[0].text
    assert "".join(texts) == whole
    assert "\ufffd" not in whole.rstrip("\ufffd")


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["parrot"]
    assert client.models.retrieve("parrot").id == "parrot"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("owl")


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="owl", messages=HELLO)
    assert missing.value.code == "model_not_found"
    assert "'parrot'" in str(missing.value)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="parrot", messages=HELLO, temperature=-1)
    assert bad.value.param == "temperature"


def test_one_failing_sequence_is_an_error_and_not_an_answer(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError, match="choked"):
        client.completions.create(model="parrot", prompt="FAIL please", max_tokens=50)
    with pytest.raises(openai.APIError, match="choked"):
        for _ in client.completions.create(model="parrot", prompt="FAIL please", max_tokens=50, stream=True):
            pass
