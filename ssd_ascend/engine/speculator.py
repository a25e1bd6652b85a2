"""Builds what `python -m ssd_ascend.speculate` runs: a drafter from an engine's configuration, behind a listener.

Of the target itself only the config is read (and the embedding, for a head that borrows it).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from ssd_ascend import catalogue
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.engine.builder import find_drafter, open_backend, target_facts
from ssd_ascend.errors import ConfigError
from ssd_ascend.runtime.load import choose_dtype
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.identity import identity_of
from ssd_ascend.speculation.remote_link import required_secret
from ssd_ascend.speculation.service import SpeculatorService
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup
from ssd_ascend.speculation.worker_link import build_drafter, hello_of, make_worker, warm_up
from ssd_ascend.transport.socket import SocketTransport
from ssd_ascend.transport.tcp import Listener
from ssd_ascend.weights.loader import read_config

_FOLLOWED_TOKENS = 4096
"""Of each sequence, on average: what a cache is made for unless `--num-kv-blocks` says otherwise."""
_SEND_S = 1.0
"""A target that takes nothing for so long is given up: the others wait for their turn."""


def open_service(config: EngineConfig, host: str, port: int) -> tuple[SpeculatorService, str]:
    """Load the drafter and listen; returns the service and its address. ConfigError in one sentence when it cannot."""
    secret = required_secret()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    setup, kind = _setup(config)
    drafter = build_drafter(kind, setup)
    warm_up(drafter, setup)
    model = read_config(setup.target.path)
    hello = dataclasses.replace(
        hello_of(drafter, setup), target=identity_of(model), max_model_len=setup.target.max_model_len
    )

    # not before the drafter is there: a target that calls too early should call again, not wait
    try:
        listener = Listener(host, port, secret, send_timeout_s=_SEND_S)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}", remedy="choose another --port") from error

    def worker_for(line: SocketTransport, others_wait: Callable[[], bool]) -> DraftWorker:
        return make_worker(drafter, setup, line, overlaps=True, others_wait=others_wait)

    return SpeculatorService(listener, worker_for, hello), f"{host}:{listener.port}"


def _setup(config: EngineConfig) -> tuple[DraftSetup, DrafterKind]:
    backend = open_backend(config)
    path = catalogue.resolve_model(config.model)
    model = read_config(path)
    draft_path, kind = find_drafter(config)
    capture = kind.capture_layers(draft_path, model)
    facts = target_facts(
        config, path, model, capture, kv_tokens=0, dtype=choose_dtype(config.dtype, model.dtype, backend.capabilities)
    )
    tokens = config.max_num_seqs * min(facts.max_model_len, _FOLLOWED_TOKENS)
    facts = dataclasses.replace(facts, kv_tokens=tokens)
    speculation = config.speculation
    if config.num_kv_blocks is not None:
        speculation = dataclasses.replace(speculation, draft_kv_blocks=config.num_kv_blocks)
    setup = DraftSetup(
        backend=backend,
        device=backend.device(0),
        config=speculation,
        target=facts,
        path=draft_path,
        width=0,
        grammars=facts.grammars(),
    )
    return setup, kind
