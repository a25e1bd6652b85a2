"""How a target gets its draft worker: built in this process, in a thread of it, or supervised in one of its own.

`serve_worker` is where the worker's process starts.
"""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ssd_ascend.backends.base import Backend, MeetingBackend, SharingBackend
from ssd_ascend.backends.registry import load_backend
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.errors import ConfigError, TransportError
from ssd_ascend.log import get_logger
from ssd_ascend.runtime.threads import settle_threads
from ssd_ascend.speculation.base import Drafter
from ssd_ascend.speculation.branch_budget import BranchBudget
from ssd_ascend.speculation.branch_depth import WindowDepth
from ssd_ascend.speculation.draft_worker import DraftWorker
from ssd_ascend.speculation.fallback import FallbackPolicy
from ssd_ascend.speculation.fan_out import make_fan_out
from ssd_ascend.speculation.registry import DRAFTERS
from ssd_ascend.speculation.rehearsal import rehearse
from ssd_ascend.speculation.setup import DrafterKind, DraftSetup, TargetFacts, TargetSide
from ssd_ascend.speculation.supervisor import WorkerSupervisor
from ssd_ascend.speculation.unsupervised import UnsupervisedLink
from ssd_ascend.speculation.worker_thread import ThreadLink
from ssd_ascend.speculation.workers import START_TIMEOUT_S, Worker, WorkerLink
from ssd_ascend.transport.base import Transport
from ssd_ascend.transport.inprocess import InProcessTransport
from ssd_ascend.transport.link import DeviceLink, Link, Meeting
from ssd_ascend.transport.messages import PROTOCOL_VERSION, Hello

_ENTRY = f"{__name__}:serve_worker"
log = get_logger(__name__)


def make_link(side: TargetSide) -> WorkerLink:
    """A link to a worker of our own. Waits for a first worker; ConfigError when none comes up."""
    if side.setup.config.worker == "inprocess":
        return InProcessLink(side)
    if _lives_in_a_thread(side.setup):
        return _in_a_thread(side)
    supervisor = WorkerSupervisor(
        _ENTRY, _to_json(side), check_hello=_checks(side.setup), new_link=_device_line(side.setup)
    )
    if not supervisor.wait_ready(START_TIMEOUT_S, or_lost=True):
        reason = supervisor.reason or f"it took more than {START_TIMEOUT_S:.0f} s"
        supervisor.close()
        raise ConfigError(f"the draft worker did not start: {reason}", remedy="its own message is above")
    return supervisor


def _shared_features(side: TargetSide) -> str | None:
    """What a worker needs to read the target's features in the target's memory; None where they are sent to it."""
    setup, store = side.setup, None if side.features is None else side.features.features
    if store is None or setup.config.worker_line == "socket" or _draft_device(setup)[0] != setup.backend.name:
        return None
    return setup.backend.share(store) if isinstance(setup.backend, SharingBackend) else None


def _device_line(setup: DraftSetup) -> Callable[[int], Link] | None:
    """How to make a line over the devices themselves; None where messages go over a socket."""
    if setup.config.worker_line != "device" or isinstance(setup.backend, SharingBackend):
        return None  # where memory is shared, only small numbers are left to send
    kind, index = _draft_device(setup)
    backend, ours = setup.backend, setup.device.index or 0
    if not isinstance(backend, MeetingBackend) or kind != backend.name:
        raise ConfigError(
            f"no line over devices between {backend.name} and {kind}", remedy="leave --worker-line at its default"
        )
    if index == ours:
        raise ConfigError(
            "a line over devices needs two of them, and target and draft worker are on one",
            remedy=f"add --draft-device {kind}:{ours + 1}",
        )
    meeting = Meeting(backend.meeting, ours, index)
    return lambda generation: DeviceLink(meeting, generation)


def _draft_device(setup: DraftSetup) -> tuple[str, int]:
    """Kind and index of the worker's device."""
    kind, index = setup.config.draft_place
    return kind or setup.backend.name, index


def build_drafter(kind: DrafterKind, setup: DraftSetup) -> Drafter:
    """Load the drafter, with room for the branches that the configuration asks for."""
    return kind.build(replace(setup, width=make_fan_out(setup.config.fan_out, setup.lookahead).width))


def _lives_in_a_thread(setup: DraftSetup) -> bool:
    """Whether the worker is one of our threads: told so, or left to us where a thread beside the target is faster."""
    config = setup.config
    if config.worker != "auto":
        return config.worker == "thread"
    # a target of one rank, and no line over devices was asked for
    alone = setup.share is not None and config.worker_line != "device"
    return alone and setup.backend.capabilities.streams_overlap and is_beside_the_target(setup)


def is_beside_the_target(setup: DraftSetup) -> bool:
    """Whether the worker's device is the target's own."""
    return _draft_device(setup) == (setup.backend.name, setup.device.index or 0)


def _in_a_thread(side: TargetSide) -> ThreadLink:
    """A worker beside the target, on the target's own device."""
    setup = side.setup
    if not is_beside_the_target(setup):
        raise ConfigError(
            f"a draft worker in a thread is on the target's device, not on {setup.config.draft_device}",
            remedy="leave --draft-device out, or --worker at its default",
        )

    def build(setup: DraftSetup, line: Transport) -> tuple[DraftWorker, Hello]:
        drafter = build_drafter(side.kind, setup)
        warm_up(drafter, setup)
        return make_worker(drafter, setup, line, overlaps=True), hello_of(drafter, setup)

    return ThreadLink(build, setup, start_timeout_s=START_TIMEOUT_S)


def make_worker(
    drafter: Drafter,
    setup: DraftSetup,
    transport: Transport,
    *,
    overlaps: bool,
    others_wait: Callable[[], bool] = lambda: False,
) -> DraftWorker:
    """A worker for one target. Several may share a drafter, as long as they take turns.

    overlaps: whether it drafts while the target verifies, so that there is a window for `--lookahead auto` to fill.
    """
    config = setup.config
    return DraftWorker(
        drafter,
        transport,
        lookahead=setup.lookahead,
        fan_out=make_fan_out(config.fan_out, setup.lookahead),
        fallback=FallbackPolicy(config.on_miss),
        budget=BranchBudget() if overlaps else None,
        depth=WindowDepth(setup.lookahead) if overlaps and config.lookahead == "auto" else None,
        others_wait=others_wait,
    )


def hello_of(drafter: Drafter, setup: DraftSetup) -> Hello:
    """What a worker with this drafter says of itself."""
    return Hello(
        version=PROTOCOL_VERSION,
        target_vocab=setup.target.vocab_size,
        draft_vocab=setup.target.vocab_size if drafter.to_target is None else int(drafter.to_target.shape[0]),
        feature_width=setup.target.feature_width if drafter.wants_features else 0,
        lookahead=setup.lookahead,
        drafter=setup.config.drafter,
        to_target=drafter.to_target,
        reads_features=setup.feature_store is not None and drafter.wants_features,
    )


def warm_up(drafter: Drafter, setup: DraftSetup) -> None:
    """Let the drafter compile and capture before anybody waits for it."""
    started = time.monotonic()
    rehearse(
        lambda line: make_worker(drafter, setup, line, overlaps=False),
        max_len=setup.target.max_model_len,
        feature_width=setup.target.feature_width if drafter.wants_features else 0,
        shared=setup.feature_store is not None,
        crowd=0 if setup.backend.capabilities.host_memory else setup.target.max_num_seqs,
        feature_dtype=torch.float32 if setup.backend.capabilities.wide_activations else setup.dtype(None),
    )
    log.info("rehearsed in %.1f s", time.monotonic() - started)


# -- a process of its own ----------------------------------------------------------------------------------------------


def serve_worker(transport: Transport, config: Mapping[str, Any]) -> None:
    """Build the worker that `config` (of `_to_json`) describes, say hello, serve until the target leaves."""
    torch.set_num_threads(config["threads"])
    backend = load_backend(config["device"])
    speculation = dict(config["speculation"])
    if isinstance(speculation["fan_out"], list):
        speculation["fan_out"] = tuple(speculation["fan_out"])
    device = backend.device(config["device_index"])
    store = _open_store(backend, device, config["feature_store"])
    setup = DraftSetup(
        backend=backend,
        device=device,
        feature_store=store,
        config=SpeculationConfig(**speculation),
        target=TargetFacts(**config["target"]),
        path=None if config["path"] is None else Path(config["path"]),
        width=0,
    )
    drafter = build_drafter(DRAFTERS.get(setup.config.drafter), setup)
    settle_threads(backend.capabilities, setup.config.draft_threads)
    warm_up(drafter, setup)
    gc.collect()
    gc.freeze()  # a search through all that was loaded takes 0.1 to 0.2 s, and would come in the middle of a round
    transport.send(hello_of(drafter, setup))
    make_worker(drafter, setup, transport, overlaps=True).serve()


def _to_json(side: TargetSide) -> dict[str, Any]:
    """What `serve_worker` needs, as JSON can hold it."""
    setup = side.setup
    kind, index = _draft_device(setup)
    return {
        "device": kind,
        "device_index": index,
        "threads": setup.config.draft_threads or max(1, torch.get_num_threads() // 2),
        "speculation": dataclasses.asdict(setup.config),
        "target": dataclasses.asdict(setup.target),
        "path": None if setup.path is None else str(setup.path),
        "feature_store": _shared_features(side),
    }


def _open_store(backend: Backend, device: torch.device, text: str | None) -> torch.Tensor | None:
    """The target's features where they are, if they can be read here; else they are sent, which costs time only."""
    if text is None or not isinstance(backend, SharingBackend):
        return None
    try:
        return backend.open_shared(text, device)
    except TransportError as error:
        log.warning("features travel with the messages: %s", error)
        return None


def _checks(setup: DraftSetup) -> Callable[[Hello], None]:
    """A check of the worker's hello against what this side is; names both sides' values."""
    expected = {
        "version": PROTOCOL_VERSION,
        "target_vocab": setup.target.vocab_size,
        "feature_width": setup.target.feature_width,
        "lookahead": setup.lookahead,
        "drafter": setup.config.drafter,
    }

    def check(hello: Hello) -> None:
        for name, own in expected.items():
            if getattr(hello, name) != own:
                raise ConfigError(f"the draft worker has {name} {getattr(hello, name)!r}, the target {own!r}")

    return check


# -- in this process ---------------------------------------------------------------------------------------------------


class InProcessLink(UnsupervisedLink):
    """A worker in this very thread: it drafts while the target waits for the answer.

    For tests, and to measure against.
    """

    def __init__(self, side: TargetSide) -> None:
        target_end, self._worker_end = InProcessTransport.pair()
        super().__init__(target_end)
        drafter = build_drafter(side.kind, side.setup)
        self._draft_worker = make_worker(drafter, side.setup, self._worker_end, overlaps=False)
        self._worker_end.attach_pump(self._pump)
        self._worker = Worker(target_end, hello_of(drafter, side.setup), generation=0)

    def _pump(self) -> None:
        """Let the worker work. However it fails, it fails as a process of its own would: the target goes on alone."""
        try:
            self._draft_worker.pump()
        except Exception as error:
            log.exception("draft worker lost, serving without speculation")
            self._failure = f"the draft worker failed: {type(error).__name__}: {error}"
            self._worker_end.close()
