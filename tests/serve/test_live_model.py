"""The whole house at once: the official client, HTTP, engine process, a tiny random model; with and without drafts."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from tests.engine.harness import BLOCK, DEVICE, DTYPE, needs_devices
from tests.serve.conftest import TEMPLATE
from tests.serve.live import PATIENCE_S, LiveServer
from tests.serve.test_streams import open_stream
from tests.toys import llama_config, write_checkpoint
from tests.unit.text_toys import byte_level_backend, write_directory

SPECULATORS = {"none": (), "sd": ("--speculator", "sd", "--drafter", "ngram", "--lookahead", "3")}
PROMPT = "ab ab ab the the the"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = byte_level_backend()
    path = tmp_path_factory.mktemp("models") / "tiny"
    config = llama_config(
        vocab_size=backend.get_vocab_size(),
        bos_token_id=backend.token_to_id("<s>"),
        eos_token_id=backend.token_to_id("</s>"),
    )
    write_checkpoint(path, config)
    return write_directory(path, backend, eos_token="</s>", chat_template=TEMPLATE)


@pytest.fixture(scope="module", params=sorted(SPECULATORS))
def live(model: Path, request: pytest.FixtureRequest) -> Iterator[LiveServer]:
    flags = ("--dtype", DTYPE, "--threads", "1", "--max-num-seqs", "8", "--num-kv-blocks", "64", "--device", DEVICE)
    with LiveServer("--model", str(model), *flags, *SPECULATORS[request.param], module="ssd_ascend.serve") as server:
        yield server.wait_until_ready()
        server.wait_until_idle()
        assert server.stop() == 0


@pytest.fixture
def client(live: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made


def name_of(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


def test_streamed_equals_whole_and_repeats(client: openai.OpenAI) -> None:
    asked = {"model": name_of(client), "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**asked).choices[0]
    chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks if chunk.logprobs for token in chunk.logprobs.tokens] == whole.logprobs.tokens
    assert len(whole.logprobs.token_logprobs) == 40
    assert all(chosen == max(top.values()) for chosen, top in _pairs(whole))  # greedy takes the likeliest
    assert client.completions.create(**asked).choices[0].text == whole.text


def _pairs(choice: openai.types.CompletionChoice) -> list[tuple[float, dict[str, float]]]:
    assert choice.logprobs is not None
    return list(zip(choice.logprobs.token_logprobs or [], choice.logprobs.top_logprobs or [], strict=True))


def test_a_stop_string_cuts_the_same_text(client: openai.OpenAI) -> None:
    asked = {"model": name_of(client), "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[len(text) // 2 :][:2]
    cut = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_seeds(client: openai.OpenAI) -> None:
    """B13, B15: a seed repeats, its n answers differ, and no seed never repeats."""

    def texts(**more: object) -> list[str]:
        answer = client.completions.create(model=name_of(client), prompt=PROMPT, max_tokens=24, **more)
        return [choice.text for choice in answer.choices]

    assert texts(seed=7, n=3) == texts(seed=7, n=3)
    assert len(set(texts(seed=7, n=3))) == 3
    assert texts(seed=7) == texts(seed=7, n=3)[:1] != texts(seed=8)
    assert len({text for _ in range(6) for text in texts()}) == 6


def test_chat_and_prefix_cache(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "a long story about" + " the" * BLOCK}]
    asked = {"model": name_of(client), "messages": messages, "max_completion_tokens": 10, "temperature": 0}
    first, second = (client.chat.completions.create(**asked) for _ in range(2))
    assert first.choices[0].message.content == second.choices[0].message.content
    assert second.usage is not None
    assert second.usage.prompt_tokens_details is not None
    assert second.usage.prompt_tokens_details.cached_tokens >= BLOCK
    assert second.usage.completion_tokens <= 10


def test_speculation_shows_in_the_usual_places(live: LiveServer, client: openai.OpenAI) -> None:
    """Drafts of one request: accepted and rejected add up to what the engine counted; none without a speculator."""
    live.wait_until_idle()
    before = live.metric("ssd_drafted_tokens_total")
    answer = client.completions.create(model=name_of(client), prompt=PROMPT, max_tokens=40, temperature=0)
    live.wait_until_idle()
    drafted = live.metric("ssd_drafted_tokens_total") - before
    assert answer.usage is not None
    details = answer.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) + (details.rejected_prediction_tokens or 0) == drafted
    # over all tests so far: a single answer may give n-grams nothing to guess from
    assert (live.metric("ssd_drafted_tokens_total") > 0) == ("sd" in live.process.args)  # type: ignore[operator]


def test_limits(live: LiveServer, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="256") as refused:
        client.completions.create(model=name_of(client), prompt="b" * 250, max_tokens=10)
    assert refused.value.param == "max_tokens"
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=name_of(client), prompt="b" * 256)
    assert refused.value.param == "prompt"
    answer = client.completions.create(model=name_of(client), prompt="b" * 250, extra_body={"ignore_eos": True})
    assert (answer.choices[0].finish_reason, answer.usage.total_tokens) == ("length", 256)


def test_more_streams_than_seats(live: LiveServer, client: openai.OpenAI) -> None:
    """Preemption and queueing included: 64 blocks of 16 tokens for 16 answers of up to 120."""

    def ask(number: int) -> str:
        stream = client.completions.create(
            model=name_of(client), prompt=f"{number} {PROMPT}", max_tokens=100, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in stream)

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, range(16)))
    assert [ask(number) for number in (0, 7, 15)] == [together[number] for number in (0, 7, 15)]


def test_dropped_streams_leave_no_block_in_use(live: LiveServer) -> None:
    for _ in range(4):
        connections = [open_stream(live, PROMPT, 200) for _ in range(10)]
        connections[0].getresponse().readline()
        for connection in connections:
            connection.close()
    live.wait_until_idle()


def test_a_truncated_checkpoint_is_told_in_one_sentence(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with LiveServer("--model", str(broken), "--device", DEVICE, module="ssd_ascend.serve") as live:
        assert live.wait() == 1
    assert live.errors[-1].startswith("ssd_ascend.serve: ")
    assert "model.safetensors" in live.errors[-1]
    assert not any("Traceback" in line for line in live.errors)


def test_a_signal_to_all_processes_drains(model: Path) -> None:
    """As systemd sends it without KillMode=mixed: also to ranks and draft workers, which are still needed."""
    needs_devices(2)
    flags = ("--tp", "2", "--dtype", DTYPE, "--threads", "1", "--num-kv-blocks", "64", "--device", DEVICE)
    drafts = ("--speculator", "ssd", "--drafter", "ngram", "--lookahead", "3", "--worker", "process")
    with LiveServer("--model", str(model), *flags, *drafts, module="ssd_ascend.serve", own_group=True) as server:
        server.wait_until_ready()
        asked = {"prompt": PROMPT, "max_tokens": 220, "ignore_eos": True}
        stream = server.events("/v1/completions", asked)
        first = next(stream)
        os.killpg(server.process.pid, signal.SIGTERM)
        events = [first, *stream]
        assert events[-1] == "[DONE]"
        assert events[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait() == 0
        assert not [line for line in server.errors if "lost" in line or "killed" in line]
