"""One scripted server for the whole room: tests that end their server start one of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.serve.live import PATIENCE_S, LiveServer
from tests.unit.text_toys import byte_level_backend, write_directory

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m['role'] }}\n{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def parrot_directory(path: Path) -> Path:
    """A tokenizer of bytes and a chat template; all the scripted engine needs of a model."""
    return write_directory(path, byte_level_backend(), eos_token="</s>", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def parrot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return parrot_directory(tmp_path_factory.mktemp("models") / "parrot")


@pytest.fixture(scope="session")
def server(parrot: Path) -> Iterator[LiveServer]:
    with LiveServer("--model", str(parrot), "--served-model-name", "parrot") as live:
        yield live.wait_until_ready()
        live.wait_until_idle()
        assert live.stop() == 0


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server whose model's template knows of thoughts."""
    template = "{% set closing = '</think>' %}" + TEMPLATE
    model = tmp_path_factory.mktemp("models") / "thinker"
    write_directory(model, byte_level_backend(), eos_token="</s>", chat_template=template)
    with LiveServer("--model", str(model), "--served-model-name", "parrot") as live:
        yield live.wait_until_ready()


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S) as made:
        yield made
