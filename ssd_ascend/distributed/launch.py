"""Where the ranks of one model come from: started here as processes of our own, or found as those of `torchrun`.

`lead` is called by rank 0's builder and returns once all have met; every other rank begins with `call`, then `meet`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed

from ssd_ascend import env
from ssd_ascend.core.exit_status import how_it_ended
from ssd_ascend.distributed import control
from ssd_ascend.distributed.collectives import GroupCollectives, join_group
from ssd_ascend.errors import ConfigError, WorkerError
from ssd_ascend.log import get_logger
from ssd_ascend.transport import tcp

START_TIMEOUT_S: Final = 300.0
_LOOPBACK: Final = "127.0.0.1"
_GRACE_S: Final = 10.0
_DEATH_S: Final = 10.0
"""How long we wait for those that were killed: a device's driver may hold one for ever."""
_LAST_WORDS_S: Final = 3.0
"""A broken collective may be seen before the broken line that explains it."""
_MEETING: Final = "ssd_ascend/control"
_STDERR: Final = 2
_LOOK_EVERY_S: Final = 0.25
_log = get_logger(__name__)
_BOOT: Final = """
import signal
# a terminal's Ctrl-C and a supervisor's SIGTERM reach the whole group; rank 0 decides
signal.signal(signal.SIGINT, signal.SIG_IGN)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
import json, sys
spec = json.load(sys.stdin)
sys.path[:] = spec["path"]
from importlib import import_module
module, _, name = spec["entry"].partition(":")
getattr(import_module(module), name)(spec)
"""


@dataclass(frozen=True, slots=True)
class Place:
    """This process among the ranks of one model; `local_rank` is its device's index on its host."""

    rank: int
    size: int
    local_rank: int


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a rank that we start finds the others; plain values, so that they travel as JSON. Holds a secret."""

    store: str
    """A file that all ranks of this host can reach."""
    host: str
    port: int
    secret: str


def torchrun_place(size: int) -> Place | None:
    """Our place when `torchrun` (or who speaks like it) started us as one of `size` ranks; None when it did not.

    ConfigError when it started another number of them.
    """
    texts = [env.foreign(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")]
    if size == 1 or any(text is None for text in texts) or texts[1] == "1":
        return None
    rank, world, local_rank = (int(text or 0) for text in texts[:3])
    if world != size:
        raise ConfigError(
            f"this is one of {world} processes (WORLD_SIZE), but --tp is {size}",
            remedy=f"give --tp {world}, or start {size} processes",
        )
    return Place(rank, world, local_rank)


class Ranks:
    """All that rank 0 holds of the others. `close` once, at the end."""

    def __init__(self, collectives: GroupCollectives, leader: control.Leader, cleanup: contextlib.ExitStack) -> None:
        self.collectives = collectives
        self.leader = leader
        self._cleanup = cleanup

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Inside, an error of a device or a collective (a RuntimeError of whatever library, or torch's ValueError for a
        group that was aborted a moment ago) that comes of a lost rank says so. Whoever gave a device work after the
        loss leaves here, too: nothing would end his wait for it."""
        try:
            yield
            self.leader.check()
        except (RuntimeError, ValueError) as error:
            lost = self.leader.lost(wait_s=_LAST_WORDS_S)
            if lost is None:
                raise
            raise lost from error

    def close(self) -> None:
        """Tell the other ranks to leave, and see to it that those we started are gone."""
        lost = self.leader.failure is not None
        self.leader.close()
        self.collectives.close(lost=lost)
        self._cleanup.close()


class Children:
    """The processes of ranks 1, 2, ... that we started."""

    def __init__(self, entry: str, config: Mapping[str, Any], size: int, meeting: Meeting) -> None:
        """entry: "module:function", called with an object that holds `config`, `place` and `meeting`."""
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        try:
            for rank in range(1, size):
                self._processes[rank] = _start(entry, config, Place(rank, size, rank), meeting)
        except OSError:
            self.close()
            raise

    def fate(self, rank: int) -> str | None:
        """How a rank's process ended; None while it lives."""
        process = self._processes[rank]
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = process.wait(0.2)  # its line breaks a moment before it can be waited for
            return f"(process {process.pid}) {how_it_ended(code)}"
        return None

    def end(self) -> None:
        """End them all now: one is lost, so the others are of no use. One that was stopped holds its connections, and
        with them a collective that waits for it."""
        for process in self._processes.values():
            process.kill()

    def close(self) -> None:
        """Wait for all to leave; who does not in time is ended, and who does not even end then is left to itself."""
        staying = _still_there(self._processes.values(), _GRACE_S)
        for process in staying:
            process.kill()
        for process in _still_there(staying, _DEATH_S):
            _log.warning(
                "process %d of a rank was killed, and is held by the system: it is left to itself", process.pid
            )


def _still_there(processes: Iterable[subprocess.Popen[bytes]], patience_s: float) -> list[subprocess.Popen[bytes]]:
    """Those that have not ended after so long, which is for all of them together."""
    deadline = time.monotonic() + patience_s
    staying = []
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            staying.append(process)
    return staying


def _start(entry: str, config: Mapping[str, Any], place: Place, meeting: Meeting) -> subprocess.Popen[bytes]:
    spec = {
        "entry": entry,
        "config": dict(config),
        "place": [place.rank, place.size, place.local_rank],
        "meeting": [meeting.store, meeting.host, meeting.port, meeting.secret],
        "path": sys.path,
    }
    child = subprocess.Popen([sys.executable, "-c", _BOOT], stdin=subprocess.PIPE, stdout=_STDERR)
    assert child.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; whoever waits for it will say so
        child.stdin.write(json.dumps(spec).encode())
        child.stdin.close()
    return child


def lead(
    library: str, device: torch.device, size: int, *, entry: str, config: Mapping[str, Any], place: Place | None
) -> Ranks:
    """Rank 0: start the others (or meet those of `torchrun`, when `place` says so), and form a group with them.

    library: of the collectives. Raises WorkerError when a rank dies or does not come.
    """
    return _lead_own(library, device, size, entry, config) if place is None else _lead_found(library, device, place)


def _lead_own(library: str, device: torch.device, size: int, entry: str, config: Mapping[str, Any]) -> Ranks:
    env.provide({"GLOO_SOCKET_IFNAME": "lo"})  # all ranks are on this host
    folder = tempfile.mkdtemp(prefix="ssd-ranks-")
    secret = tcp.new_secret()
    listener = tcp.Listener(_LOOPBACK, 0, secret)
    with contextlib.ExitStack() as cleanup, contextlib.closing(listener):
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        meeting = Meeting(str(Path(folder) / "store"), _LOOPBACK, listener.port, secret)
        children = Children(entry, config, size, meeting)
        cleanup.callback(children.close)
        leader = _gather(listener, size, children.fate, end=children.end)
        store = distributed.FileStore(meeting.store, size)
        collectives = _form(leader, lambda: join_group(library, store, 0, size, device))
        return Ranks(collectives, leader, cleanup.pop_all())
    raise AssertionError("an exit stack hides no error")


def _lead_found(library: str, device: torch.device, place: Place) -> Ranks:
    store = _torchrun_store(place)
    host = env.foreign("MASTER_ADDR") or _LOOPBACK
    secret = tcp.new_secret()
    with contextlib.closing(tcp.Listener(host, 0, secret)) as listener:
        store.set(_MEETING, json.dumps([host, listener.port, secret]))
        leader = _gather(listener, place.size, lambda rank: None)
    collectives = _form(leader, lambda: join_group(library, store, 0, place.size, device))
    return Ranks(collectives, leader, contextlib.ExitStack())


def _gather(
    listener: tcp.Listener, size: int, fate: Callable[[int], str | None], *, end: Callable[[], None] = lambda: None
) -> control.Leader:
    """end: the other ranks' processes, where they are ours."""

    def wake() -> None:
        end()
        GroupCollectives.abort()

    lines = control.gather(listener, size, timeout_s=START_TIMEOUT_S, fate=fate)
    return control.Leader(lines, fate=fate, on_failure=wake)


def _form(leader: control.Leader, join: Callable[[], GroupCollectives]) -> GroupCollectives:
    """The group, once all ranks are ready for it; closes the line when it does not come about."""
    try:
        leader.call_roll(timeout_s=START_TIMEOUT_S)
        group = _joined(leader, join)
        group.meet_by(leader.barrier)
        return group
    except BaseException as error:
        lost = leader.lost(wait_s=_LAST_WORDS_S) if isinstance(error, WorkerError) else None
        leader.close()
        if lost is None:
            raise
        raise lost from error


def _joined(leader: control.Leader, join: Callable[[], GroupCollectives]) -> GroupCollectives:
    """What `join` gives; WorkerError when a rank is lost meanwhile.

    Joining waits inside the library for every rank, where nothing wakes it. So another thread does it, which is left
    there when a rank is lost: a daemon that holds nothing.
    """
    met: Future[GroupCollectives] = Future()

    def work() -> None:
        try:
            met.set_result(join())
        except BaseException as error:  # noqa: BLE001  whatever it is, the caller's thread raises it
            met.set_exception(error)

    threading.Thread(target=work, name="ssd-join", daemon=True).start()
    while not wait([met], _LOOK_EVERY_S).done:
        leader.check()
    return met.result()


def call(place: Place, meeting: Meeting | None) -> tuple[distributed.Store, control.Follower]:
    """Any other rank: call rank 0. The store is where the group then meets. `meeting` is None under `torchrun`."""
    if meeting is not None:
        line = control.join(meeting.host, meeting.port, meeting.secret, place.rank)
        return distributed.FileStore(meeting.store, place.size), line
    store = _torchrun_store(place)
    host, port, secret = json.loads(store.get(_MEETING))
    return store, control.join(host, port, secret, place.rank)


def meet(
    library: str, store: distributed.Store, line: control.Follower, place: Place, device: torch.device
) -> GroupCollectives:
    """Any other rank, when it has its device: join the group. Rank 0 goes there once all have come so far."""
    line.ready()
    group = join_group(library, store, place.rank, place.size, device)
    group.meet_by(line.barrier)
    return group


def _torchrun_store(place: Place) -> distributed.Store:
    """The launcher's own store, under a prefix of ours; rank 0 opens it where no launcher keeps one."""
    agent = env.foreign("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = distributed.TCPStore(
        env.foreign("MASTER_ADDR") or _LOOPBACK,
        int(env.foreign("MASTER_PORT") or 0),
        place.size,
        is_master=place.rank == 0 and not agent,
        wait_for_workers=False,
    )
    attempt = env.foreign("TORCHELASTIC_RESTART_COUNT") or "0"
    return distributed.PrefixStore(f"ssd_ascend/{attempt}", store)
