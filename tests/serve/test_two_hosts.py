"""The server on one "host", its speculator on another, 16 streams, and a cable that is cut for five seconds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ssd_ascend import LLM, SamplingParams
from tests.engine.harness import write_pair
from tests.two_hosts import PORT, SPECULATOR, TARGET, THERE, cut, mend, running, told, two_hosts, until_hits_grow
from tests.unit.text_toys import byte_level_backend, write_directory

STREAMS, TOKENS, SECONDS = 16, 60, 60
CUT_S, BACK_S = 5.0, 5.0
URL = "http://127.0.0.1:8000"


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    """A tiny pair that reads and writes bytes."""
    backend = byte_level_backend()
    folder = write_pair(tmp_path / "pair", "llama", vocab=backend.get_vocab_size())
    write_directory(folder / "target", backend, eos_token="</s>")
    return folder


def plain_answers(pair: Path) -> dict[str, str]:
    """What plain decoding says to each stream's prompt."""
    prompts = [f"stream {i}: " + "the end " * (i % 5) for i in range(STREAMS)]
    with LLM(str(pair / "target"), device="cpu", dtype="float32", max_model_len=256) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=TOKENS))
    return {prompt: output.answers[0].text for prompt, output in zip(prompts, outputs, strict=True)}


@pytest.mark.slow
def test_no_request_fails_when_the_cable_is_cut(pair: Path, tmp_path: Path) -> None:
    """Every answer is plain decoding's, tokens flow meanwhile, and hits are back within 5 s."""
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps(plain_answers(pair)))
    flags = ["--model", str(pair / "target"), "--draft", str(pair / "model"), "--device", "cpu", "--dtype", "float32"]
    flags += ["--speculator", "ssd", "--drafter", "model", "--lookahead", "4", "--fan-out", "2"]
    flags += ["--max-model-len", "256", "--max-num-seqs", str(STREAMS)]
    where = ["--host", THERE, "--port", str(PORT)]
    serve = [*flags, "--speculators", f"{THERE}:{PORT}", "--served-model-name", "pair", "--port", "8000"]
    with (
        two_hosts(),
        running(SPECULATOR, "-m", "ssd_ascend.speculate", *flags, *where) as speculator,
        running(TARGET, "-m", "ssd_ascend.serve", *serve) as server,
    ):
        for process in (speculator, server):
            assert process.stdout is not None
            while not process.stdout.readline().startswith("ready"):
                assert process.poll() is None
        words = [URL, str(answers), str(TOKENS), str(SECONDS)]
        with running(TARGET, "-m", "tests.serve.streaming_clients", *words) as clients:
            until_hits_grow(clients)
            cut()
            report = began = told(clients)
            while report["time"] < began["time"] + CUT_S:
                report = told(clients)
            assert report["tokens"] > began["tokens"], "the answers stand still without the speculator"
            mend()
            mended = told(clients)["time"]
            back = until_hits_grow(clients, after=mended)
            print(f"speculation came back {back['time'] - mended:.2f} s after the cable")
            assert back["time"] - mended < BACK_S
            while "right" not in (report := told(clients)):
                pass
    print(f"{report['answers']} answers")
    assert report["errors"] == []
    assert report["right"]
    assert report["answers"] >= STREAMS
