"""`transformers.generate` as a rival: the same weights, dtype, threads and prompts, in the same process and run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.cases import Case
from bench.samples import Sample, Step
from ssd_ascend import catalogue
from ssd_ascend.config.model import ModelConfig, RopeConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import ConfigError
from ssd_ascend.weights.gguf import GgufSource
from ssd_ascend.weights.loader import is_gguf, read_config

NAME = "transformers"


class TransformersRival:
    """`generate` of the transformers package. `batch` prompts at a time, padded on the left."""

    name = NAME
    num_devices = 1

    def __init__(self, model: str, *, dtype: str, device: torch.device, batch: int) -> None:
        path = catalogue.resolve_model(model)
        self._config = read_config(path)
        kind = getattr(torch, dtype)
        self._model = (_from_gguf(path, self._config, kind) if is_gguf(path) else _from_directory(path, kind)).to(
            device
        )
        self._model.eval()
        # `generate` fills what it is not told from here: an end-of-sequence token, though none was wanted
        self._model.generation_config = self._model.generation_config.__class__()
        self._model.config.eos_token_id = None
        self._device = device
        self._batch = batch

    @torch.inference_mode()
    def run(self, cases: Sequence[Case], sampling: SamplingParams) -> Sample:
        """Serve `cases`, `batch` at a time; steps are the gaps between the tokens as `generate` adds them."""
        steps: list[Step] = []
        ttft: list[int] = []
        outputs: list[list[int]] = []
        for first in range(0, len(cases), self._batch):
            part = cases[first : first + self._batch]
            clock, rows = self._generate(part, sampling)
            for index, wall in enumerate(clock.walls_ns):
                steps.append(Step(wall, len(part), len(part), is_decode=index > 0))
            ttft += [clock.walls_ns[0]] * len(part)
            outputs += rows
        return Sample(steps, sum(len(case.token_ids) for case in cases), ttft, outputs)

    def _generate(self, cases: Sequence[Case], sampling: SamplingParams) -> tuple[_Clock, list[list[int]]]:
        from transformers import GenerationConfig, StoppingCriteriaList

        longest = max(len(case.token_ids) for case in cases)
        ids = torch.zeros((len(cases), longest), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, case in enumerate(cases):
            ids[row, longest - len(case.token_ids) :] = torch.tensor(case.token_ids)
            mask[row, longest - len(case.token_ids) :] = 1
        eos = None if sampling.ignore_eos else list(self._config.eos_token_ids)
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=sampling.max_tokens,
            do_sample=not sampling.greedy,
            temperature=sampling.temperature or None,
            eos_token_id=eos,
            pad_token_id=0,
        )
        clock = _Clock()
        answer = self._model.generate(
            ids.to(self._device),
            attention_mask=mask.to(self._device),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        return clock, [_until_eos(row, eos) for row in answer[:, longest:].tolist()]


class _Clock:
    """A stopping criterion that never stops anything: it is called after every token, which is when to look."""

    def __init__(self) -> None:
        self.walls_ns: list[int] = []
        self._last = time.perf_counter_ns()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        if input_ids.device.type != "cpu":
            torch.accelerator.synchronize(input_ids.device)
        now = time.perf_counter_ns()
        self.walls_ns.append(now - self._last)
        self._last = now
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def _until_eos(tokens: list[int], eos: list[int] | None) -> list[int]:
    ends = [i for i, token in enumerate(tokens) if token in (eos or ())]
    return tokens[: ends[0] + 1] if ends else tokens


def _transformers() -> Any:
    transformers: Any = importlib.import_module("transformers")
    transformers.logging.set_verbosity_error()
    return transformers


def _from_directory(path: Path, dtype: torch.dtype) -> Any:
    return _transformers().AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)


def _from_gguf(path: Path, config: ModelConfig, dtype: torch.dtype) -> Any:
    """The very weights we serve: read and dequantised by our own loader, since transformers' own needs accelerate."""
    transformers = _transformers()
    settings = transformers.AutoConfig.for_model(config.family, **_hf_settings(config))
    settings.dtype = dtype
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = transformers.AutoModelForCausalLM.from_config(settings)
    finally:
        torch.set_default_dtype(before)
    with GgufSource(path, config, dtype) as source:
        state = {name: source.read(name) for name in source.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not (config.tie_word_embeddings and name == "lm_head.weight")]
    if missing or unexpected:
        raise ConfigError(f"transformers' {config.family} does not take these weights: {[*missing, *unexpected][:3]}")
    model.tie_weights()
    return model


def _hf_settings(config: ModelConfig) -> dict[str, Any]:
    """Our configuration under the names of a `config.json`."""
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.attention_bias,
        "max_position_embeddings": config.max_position_embeddings,
        "rope_theta": config.rope.theta,
        **_rope_settings(config.rope),
    }


def _rope_settings(rope: RopeConfig) -> dict[str, Any]:
    if rope.frequency_factors is not None or rope.type not in ("default", "linear"):
        raise ConfigError(
            f"the rope of this .gguf ({rope.type}) cannot be told to transformers",
            remedy="give the model's directory to --model when comparing with transformers",
        )
    scaling = {"rope_type": rope.type, "rope_theta": rope.theta}
    if rope.type == "linear":
        scaling["factor"] = rope.factor
    return {"rope_parameters": scaling}
