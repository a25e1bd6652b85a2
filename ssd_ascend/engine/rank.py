"""What ranks 1, 2, ... of a target do: load their part, then run every step that rank 0 announces. No decisions.

Entered through `main` in a process that rank 0 started, or through `follow` by a door that `torchrun` started.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ssd_ascend import env
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.distributed.collectives import GroupCollectives
from ssd_ascend.distributed.control import Follower
from ssd_ascend.distributed.launch import Meeting, Place, call, meet, torchrun_place
from ssd_ascend.engine.all_ranks import drop_graphs, finish, run_announced
from ssd_ascend.engine.builder import load_target, open_backend
from ssd_ascend.engine.gather import from_plain
from ssd_ascend.engine.step_message import StepReader
from ssd_ascend.runtime.model_runner import ModelRunner


def main(spec: Mapping[str, Any]) -> None:
    """Body of a process that rank 0 started."""
    env.let_threads_sleep()
    _serve(from_plain(spec["config"]), Place(*spec["place"]), Meeting(*spec["meeting"]))


def follow(config: EngineConfig) -> bool:
    """Under `torchrun`, as any rank but the first: serve rank 0 to the end and return True. Else return False."""
    place = torchrun_place(config.tensor_parallel)
    if place is None or place.rank == 0:
        return False
    _serve(config, place, None)
    return True


def _serve(config: EngineConfig, place: Place, meeting: Meeting | None) -> None:
    """Raises SystemExit with status 1 when this rank cannot go on; rank 0 then has the reason."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    store, line = call(place, meeting)
    with line.telling(f"rank {place.rank} of {place.size}"):
        backend = open_backend(config)
        device = backend.device(place.local_rank)
        collectives = meet(backend.collective, store, line, place, device)
        loaded = load_target(config, backend, device, collectives)
        run_steps(loaded.runner, collectives, line)
        finish(loaded.runner)
        drop_graphs(loaded.runner)
        collectives.close()


@torch.inference_mode()
def run_steps(runner: ModelRunner, collectives: GroupCollectives, line: Follower) -> None:
    """Run what rank 0 announces, until it says to leave."""
    reader, output = StepReader(), None
    while (message := line.receive()) is not None:
        output = run_announced(runner, collectives, reader.unpack(message), output)
