"""*ssd = sd = plain decoding, token for token*, on the emulated NPU: every speculator and drafter, in both dtypes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd_ascend.backends.base import Backend
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.speculation.registry import DRAFTERS, SPECULATORS
from tests.engine.harness import FAMILIES, Run, greedy, prompts_of, run, speculation, write_pair

SPECULATING = [name for name in SPECULATORS.names() if name != "none"]
PROMPTS = prompts_of([1, 5, 17, 140])  # the last one crosses a block of 128
ON_NPU = {"device": "npu", "num_kv_blocks": 64}

pytestmark = pytest.mark.usefixtures("backend")


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def plain(pair: Path, dtype: str, backend: Backend) -> Run:
    return run(pair, PROMPTS, greedy(), dtype=dtype, **ON_NPU)


@pytest.mark.parametrize("drafter", DRAFTERS.names())
@pytest.mark.parametrize("speculator", SPECULATING)
def test_greedy_tokens_are_those_of_plain_decoding(
    pair: Path, dtype: str, plain: Run, speculator: str, drafter: str
) -> None:
    other = run(pair, PROMPTS, greedy(), speculation(pair, speculator, drafter), dtype=dtype, **ON_NPU)
    assert other.tokens == plain.tokens
    if drafter == "model":
        assert other.stats.speculation.accepted > 0
        assert other.stats.steps < plain.stats.steps
        assert speculator != "ssd" or other.stats.speculation.hits > 0


def test_a_draft_worker_of_its_own(pair: Path, dtype: str, plain: Run) -> None:
    """Another process, which finds the emulator by itself."""
    if dtype != "float16":
        pytest.skip("one dtype is enough for a process")
    config = speculation(pair, "ssd", "model", worker="process", worker_timeout_s=60.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SSD_NPU_EMULATOR", "1")
        other = run(pair, PROMPTS, greedy(), config, dtype=dtype, **ON_NPU)
    assert other.tokens == plain.tokens
    assert other.stats.speculation.hits > 0


@pytest.mark.parametrize("speculator", ["none", *SPECULATING])
def test_sampling_with_every_stage_runs(pair: Path, speculator: str) -> None:
    """Penalties, bias, truncation and log-probabilities touch operators that greedy decoding never does.

    A seed fixes the tokens but where drafts depend on time: those of a worker that runs beside the target.
    """
    sampling = SamplingParams(
        temperature=0.8, top_k=8, top_p=0.9, min_p=0.01, repetition_penalty=1.2, frequency_penalty=0.1,
        presence_penalty=0.1, logit_bias={5: 1.0}, min_tokens=4, max_tokens=12, seed=3, logprobs=2,
    )  # fmt: skip
    config = None if speculator == "none" else speculation(pair, speculator, "model")
    first, second = (run(pair, PROMPTS, sampling, config, dtype="float16", **ON_NPU).tokens for _ in range(2))
    assert all(len(tokens) > 3 for tokens in first + second)
    assert first == second or speculator == "ssd"
