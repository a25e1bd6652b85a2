"""The one composition root: from an `EngineConfig` to an `Engine`. Every choice of an implementation is made here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from ssd_ascend import catalogue
from ssd_ascend.backends.base import Backend, Collectives, SummingBackend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.model import ModelConfig
from ssd_ascend.distributed.collectives import GroupCollectives, SingleRank
from ssd_ascend.engine.all_ranks import AllRanks
from ssd_ascend.engine.engine import Engine
from ssd_ascend.engine.executor import Executor
from ssd_ascend.engine.gather import gather_ranks
from ssd_ascend.engine.hits_ahead import HitsAhead
from ssd_ascend.engine.identity import EngineInfo, EngineLimits
from ssd_ascend.engine.practice import ForetellingSpeculator, Practice
from ssd_ascend.engine.rounds_ahead import RoundsAhead
from ssd_ascend.engine.run_ahead import Ahead, RunAhead
from ssd_ascend.engine.scheduler import Scheduler
from ssd_ascend.errors import ConfigError
from ssd_ascend.kv.blocks import BlockManager
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.graphs import captured_tokens
from ssd_ascend.runtime.load import CacheSize, LoadedModel, choose_block_size, choose_dtype, load_runner
from ssd_ascend.runtime.threads import settle_threads
from ssd_ascend.runtime.token_masks import TokenMasks
from ssd_ascend.speculation.base import AheadSpeculator, LookingUpSpeculator, Speculator
from ssd_ascend.speculation.registry import DRAFTERS, SPECULATORS
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup, TargetFacts, TargetSide
from ssd_ascend.speculation.verifier import Verifier
from ssd_ascend.weights.loader import read_config

Progress = Callable[[int, int], None]
_DEFAULT_MODEL_LEN = 8192
_log = get_logger(__name__)


def build_engine(config: EngineConfig, *, progress: Progress | None = None) -> Engine:
    """Load everything and wire it up. Raises `ConfigError` in one sentence when something cannot work."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = open_backend(config)
    path = catalogue.resolve_model(config.model)
    model_config = read_config(path)
    draft_path, kind = find_drafter(config)
    capture = kind.capture_layers(draft_path, model_config) if config.speculation.enabled else ()
    max_model_len = _max_model_len(config, model_config)
    _check_lookahead(config, backend)
    if progress is not None:
        progress(0, 0)  # nothing cheap stands in the way any more
    with ExitStack() as undo:
        ranks = gather_ranks(config, backend, model_config)
        if ranks is not None:
            undo.callback(ranks.close)
            undo.enter_context(ranks.explaining())
        device = backend.device(0)
        collectives = SingleRank() if ranks is None else ranks.collectives
        target = load_target(config, backend, device, collectives, capture_layers=capture, progress=progress)
        executor = Executor(target.runner, ranks)
        side = _target_side(config, backend, target, executor, path, draft_path, kind, capture)
        speculator = SPECULATORS.get(config.speculation.speculator)(side)
        undo.callback(speculator.close)
        executor.ahead = _ahead(config, executor.target, speculator) if _may_run_ahead(config, backend) else None
        engine = _assemble(config, backend, target, executor, speculator, side, max_model_len)
        undo.pop_all()
    settle_threads(backend.capabilities, config.threads)
    return engine


def _may_run_ahead(config: EngineConfig, backend: Backend) -> bool:
    """Whether the next step may be queued before this one's tokens are known."""
    able = backend.capabilities
    if able.host_memory:  # the host is the device: a step queued early would only hold this one's tokens back
        return False
    return config.graphs and able.graphs and able.device_lengths


def _ahead(config: EngineConfig, target: AllRanks, speculator: Speculator) -> Ahead | None:
    """Who does that: nobody, where drafts come from elsewhere or by other means than captured graphs."""
    if not config.speculation.enabled:
        return RunAhead(target)
    lookahead = config.speculation.max_lookahead
    if isinstance(speculator, AheadSpeculator) and speculator.goes_ahead:
        return RoundsAhead(target, speculator, lookahead=lookahead)
    if isinstance(speculator, LookingUpSpeculator):
        hits = HitsAhead(target, lookahead=lookahead)
        speculator.queue_with(hits.queue)
        return hits
    return None


def _practice(executor: Executor, verifier: Verifier, speculator: Speculator) -> Practice | None:
    """For the host, where it waits for a device and nobody else waits for the host."""
    if isinstance(executor.ahead, HitsAhead) and isinstance(speculator, ForetellingSpeculator) and speculator.is_apart:
        return Practice(verifier, speculator, executor.ahead)
    return None


def open_backend(config: EngineConfig) -> Backend:
    """The backend of the device that the configuration asks for."""
    return load_backend(config.device)


def find_drafter(config: EngineConfig) -> tuple[Path | None, DrafterKind]:
    """Where the draft's weights lie, and what kind of drafter reads them."""
    speculation = config.speculation
    kind = DRAFTERS.get(speculation.drafter)
    if not speculation.enabled or speculation.draft is None or kind.is_free:
        return None, kind
    return catalogue.resolve_draft(speculation.draft), kind


def _max_model_len(config: EngineConfig, model: ModelConfig) -> int:
    trained = model.max_position_embeddings
    if config.max_model_len is None:
        return min(trained, _DEFAULT_MODEL_LEN)
    if config.max_model_len > trained:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model was made for {trained} positions",
            remedy=f"give at most {trained}",
        )
    return config.max_model_len


def _check_lookahead(config: EngineConfig, backend: Backend) -> None:
    limit = backend.capabilities.max_verify_tokens
    if limit is not None and config.speculation.max_lookahead + 1 > limit:
        raise ConfigError(
            f"lookahead is {config.speculation.max_lookahead}, but this device verifies at most {limit} tokens a row",
            remedy=f"give --lookahead {limit - 1} or less",
        )


def load_target(
    config: EngineConfig,
    backend: Backend,
    device: torch.device,
    collectives: Collectives,
    *,
    capture_layers: tuple[int, ...] = (),
    progress: Progress | None = None,
) -> LoadedModel:
    """This rank's part of the target, with its KV cache and its graphs. Called by every rank at the same time."""
    if isinstance(collectives, GroupCollectives) and isinstance(backend, SummingBackend):
        collectives.use(backend.small_sums(collectives, device))
    path = catalogue.resolve_model(config.model)
    model_config = read_config(path)
    max_model_len = _max_model_len(config, model_config)
    lookahead = config.speculation.max_lookahead if config.speculation.enabled else 0
    size = CacheSize(
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        num_blocks=config.num_kv_blocks,
        gigabytes=config.kv_cache_gb,
        captured=captured_tokens(backend, config.max_num_seqs, lookahead) if config.graphs else (),
    )
    loaded = load_runner(
        path,
        backend,
        device,
        collectives,
        dtype=choose_dtype(config.dtype, model_config.dtype, backend.capabilities),
        block_size=choose_block_size(config.block_size, backend.capabilities),
        size=size,
        capture_layers=capture_layers,
        progress=progress,
    )
    # what a host records has no place for a message to another process; devices' own libraries do
    if config.graphs and (collectives.size == 1 or not backend.capabilities.host_memory):
        loaded.runner.capture_graphs(
            backend,
            max_rows=config.max_num_seqs,
            lookahead=lookahead,
            max_len=max_model_len,
            longest_prompt=min(config.max_batched_tokens, max_model_len),
        )
    return loaded


def target_facts(
    config: EngineConfig,
    path: Path,
    model: ModelConfig,
    capture: tuple[int, ...],
    *,
    kv_tokens: int,
    dtype: torch.dtype,
) -> TargetFacts:
    """What a drafter is told of the target. capture: the layers whose features it wants."""
    return TargetFacts(
        path=str(path),
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        max_model_len=_max_model_len(config, model),
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        feature_width=len(capture) * model.hidden_size,
        kv_tokens=kv_tokens,
        dtype=str(dtype).removeprefix("torch."),
        eos_ids=tuple(sorted(model.eos_token_ids)),
        graphs=config.graphs,
    )


def _target_side(
    config: EngineConfig,
    backend: Backend,
    target: LoadedModel,
    executor: Executor,
    path: Path,
    draft_path: Path | None,
    kind: DrafterKind,
    capture: tuple[int, ...],
) -> TargetSide:
    """What the speculator is told of the target."""
    kv = target.runner.kv
    tokens = kv.num_blocks * kv.block_size
    facts = target_facts(config, path, target.config, capture, kv_tokens=tokens, dtype=target.dtype)
    setup = DraftSetup(
        backend=backend,
        device=target.runner.device,
        config=config.speculation,
        target=facts,
        path=draft_path,
        width=0,
        share=target.model if config.tensor_parallel == 1 else None,  # a rank has only its part
        grammars=facts.grammars(),
    )
    if config.speculation.enabled:
        setup = kind.settle(setup, executor)
    graphs, per_row = target.runner.graphs, config.speculation.max_lookahead + 1
    verifications = graphs.inputs(per_row) if graphs is not None and _may_run_ahead(config, backend) else None
    return TargetSide(kind=kind, setup=setup, features=kv if capture else None, verifications=verifications)


def _assemble(
    config: EngineConfig,
    backend: Backend,
    target: LoadedModel,
    executor: Executor,
    speculator: Speculator,
    side: TargetSide,
    max_model_len: int,
) -> Engine:
    """The loop over what was loaded: who schedules, who judges, and what it says of itself."""
    kv = target.runner.kv
    blocks = BlockManager(kv.num_blocks, kv.block_size, prefix_cache=config.prefix_cache)
    scheduler = Scheduler(
        blocks,
        max_num_seqs=config.max_num_seqs,
        max_batched_tokens=config.max_batched_tokens,
        max_model_len=max_model_len,
        lookahead=speculator.lookahead,
        slots_ahead=executor.slots_ahead,
        speculation_stats=speculator.stats,
    )
    grammars = side.setup.grammars or side.setup.target.grammars()
    verifier = Verifier(backend.to_host, masks=TokenMasks(grammars))
    return Engine(
        scheduler=scheduler,
        executor=executor,
        verifier=verifier,
        practice=_practice(executor, verifier, speculator),
        grammars=grammars,
        speculator=speculator,
        info=_introduce(config, backend, target, speculator.lookahead, kv_tokens=blocks.capacity),
        limits=EngineLimits(
            max_model_len=max_model_len,
            max_tokens_that_fit=scheduler.max_tokens_that_fit,
            vocab_size=target.config.vocab_size,
        ),
        eos_ids=frozenset(target.config.eos_token_ids),
    )


def _introduce(
    config: EngineConfig, backend: Backend, target: LoadedModel, lookahead: int, *, kv_tokens: int
) -> EngineInfo:
    """What the engine says of itself; the log hears it first."""
    speculation = config.speculation
    info = EngineInfo(
        model=config.served_model_name or Path(config.model).name,
        device=backend.describe(target.runner.device),
        dtype=str(target.dtype).removeprefix("torch."),
        speculator=speculation.speculator,
        drafter=speculation.drafter if speculation.enabled else "none",
        lookahead=lookahead,
        kv_cache_bytes=target.runner.kv.num_bytes,
    )
    _log.info(
        "%s on %s in %s: KV cache %d tokens (%.0f MB), speculator %s, drafter %s, lookahead %d",
        info.model, info.device, info.dtype, kv_tokens, info.kv_cache_bytes / 1e6,
        info.speculator, info.drafter, info.lookahead,
    )  # fmt: skip
    return info
