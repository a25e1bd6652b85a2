"""Every file of `examples/` does what it says, on a tiny model, and is as short as it says."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.serve.conftest import parrot_directory
from tests.serve.live import LiveServer
from tests.toys import llama_config, write_checkpoint
from tests.unit.text_toys import byte_level_backend

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random model that reads and writes text."""
    path = parrot_directory(tmp_path_factory.mktemp("models") / "tiny")
    backend = byte_level_backend()
    tokens = {f"{name}_token_id": backend.token_to_id(text) for name, text in (("bos", "<s>"), ("eos", "</s>"))}
    write_checkpoint(path, llama_config(vocab_size=backend.get_vocab_size(), **tokens))
    return str(path)


@pytest.fixture(scope="module")
def server(model: str) -> Iterator[LiveServer]:
    with LiveServer("--model", model, "--served-model-name", "parrot") as live:
        yield live.wait_until_ready()
        assert live.stop() == 0


def main_of(name: str) -> Callable[..., None]:
    main: Callable[..., None] = importlib.import_module(f"examples.{name}").main
    return main


def test_offline_batch(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    main_of("offline_batch")(model)
    assert capsys.readouterr().out.count(" -> ") == 4


def test_streaming_client(server: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    main_of("streaming_client")(f"{server.url}/v1", "Say ab ab")
    answer, _, counts = capsys.readouterr().out.rpartition("\n[")
    assert answer
    assert re.match(r"\d+ prompt tokens, \d+ new", counts)


def test_ssd(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same answer. A tiny target may be done before its worker has said anything, so steps are bounded only."""
    main_of("ssd_in_20_lines")(model, model)
    plain, plain_counts, ssd, ssd_counts = capsys.readouterr().out.splitlines()
    assert plain.removeprefix("plain: ") == ssd.removeprefix("ssd: ")
    counts, before = ast.literal_eval(ssd_counts), ast.literal_eval(plain_counts)
    assert counts["steps"] == before["steps"] - counts["accepted"] <= 31


def test_custom_drafter(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its drafts change nothing but the number of steps."""
    from ssd_ascend import LLM, SamplingParams

    main_of("custom_drafter")(model, "ab ab ab")
    said = capsys.readouterr().out
    with LLM(model) as llm:
        [output] = llm.generate(["ab ab ab"], SamplingParams(temperature=0, max_tokens=32))
    assert said.startswith(repr(output.answers[0].text))
    assert re.search(r"'drafted': [1-9]", said)


@pytest.mark.parametrize(("name", "most"), [("ssd_in_20_lines", 20), ("custom_drafter", 40)])
def test_as_short_as_it_says(name: str, most: int) -> None:
    text = (EXAMPLES / f"{name}.py").read_text()
    code = re.sub(r'""".*?"""', "", text, flags=re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= most


def test_every_example_is_run_here() -> None:
    tested = {name.removeprefix("test_") for name in globals() if name.startswith("test_")}
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert {name.removesuffix("_in_20_lines") for name in names} <= tested
