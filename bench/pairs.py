"""Pairs of target and draft on devices of their own: one engine after another, a row per engine and batch size.

`bench/two_gpus.py` starts this in a process of its own for each pair, and reads the rows from a file, so that whatever
happens to a pair costs no other's numbers: `python -m bench.pairs JOBS.json`.
"""

from __future__ import annotations

import dataclasses
import json
import random
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.agreement import CORE, Agreement
from bench.cases import Case
from bench.checkpoints import lay_out_draft, lay_out_model
from bench.modes import Mode, OwnEngine, fit_cache, forget_engine
from bench.rounds import put_round
from bench.samples import Sample
from bench.shapes import shape
from bench.summary import Row, summarise
from bench.timeline import rounds
from ssd_ascend.config.engine import EngineConfig
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import SsdError, unknown_name

_WARM_UP_TOKENS = 24
OUT_OF_TIME = "out of time"
_FEWEST_WAVES, _SEQUENCES = 3, 4
"""Runs per batch size, each of other prompts: so few, or so many that as many sequences were served: one sequence
alone is lucky or unlucky."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Shapes of a target and its draft (None: an EAGLE-3 head made for the target), and how far the draft guesses.

    shorter: other lookaheads worth a try with either speculator, where drafting is what takes longest."""

    target: str
    draft: str | None
    lookahead: int
    shorter: tuple[int, ...] = ()
    core: int | None = None

    @property
    def drafter(self) -> str:
        """Registry key."""
        return "eagle3" if self.draft is None else "model"


PAIRS: dict[str, Pair] = {
    "8b-1b": Pair(target="llama-3.1-8b", draft="llama-3.2-1b", lookahead=5, shorter=(4, 3)),
    "8b-eagle3": Pair(target="llama-3.1-8b", draft=None, lookahead=6),
    "32b-0.6b": Pair(target="qwen3-32b", draft="qwen3-0.6b", lookahead=6),
    "tiny": Pair(target="tiny", draft="tiny-draft", lookahead=3, core=256),
    "tiny-eagle3": Pair(target="tiny", draft=None, lookahead=3, core=256),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What holds for all jobs. Plain values, so that they travel as JSON."""

    folder: str
    """Where checkpoints, tokens and rows lie."""
    device: str
    worker_device: str | None
    batches: tuple[int, ...]
    prompt_len: int
    output_len: int
    accepted: float
    foreseen: float
    fan_out: int
    speculation: dict[str, Any] = field(default_factory=dict)
    """More keys of `SpeculationConfig`."""
    noise: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One engine: a pair in a mode, its target on `tp` cards. lookahead None takes the pair's, line None the usual."""

    pair: str
    speculator: str
    tp: int = 1
    lookahead: int | None = None
    line: str | None = None

    @property
    def name(self) -> str:
        """For tables: the speculator, and the lookahead and the line where they are not the usual ones."""
        return ":".join(str(part) for part in (self.speculator, self.lookahead, self.line) if part is not None)


def find_pair(name: str) -> Pair:
    """The pair of that name; ConfigError naming the known ones."""
    if name not in PAIRS:
        raise unknown_name("pair", name, PAIRS)
    return PAIRS[name]


def lay_out(pair: Pair, settings: Settings) -> tuple[Path, Path]:
    """The checkpoints of target and draft, written where they are not there yet."""
    folder = Path(settings.folder)
    target, draft = folder / pair.target, folder / f"{pair.target}--{pair.draft or 'eagle3'}"
    agreement = Agreement(accepted=settings.accepted, foreseen=settings.foreseen, core=pair.core)
    kind = settings.device
    if not target.exists():
        lay_out_model(target, shape(pair.target), device_type=kind, seed=1, noise=settings.noise, core=pair.core)
    if not draft.exists():
        data = None if pair.draft is None else shape(pair.draft)
        lay_out_draft(draft, target, data, device_type=kind, agreement=agreement, noise=settings.noise)
    return target, draft


def engine_mode(job: Job, settings: Settings) -> Mode:
    """The engine of a job."""
    pair = find_pair(job.pair)
    target, draft = lay_out(pair, settings)
    drafts = job.speculator != "none"
    speculation = SpeculationConfig(
        **{
            "speculator": job.speculator,
            "drafter": pair.drafter,
            "draft": str(draft) if drafts else None,
            "lookahead": job.lookahead or pair.lookahead,
            "fan_out": settings.fan_out,
            "draft_device": settings.worker_device if job.speculator == "ssd" else None,
            **({} if job.line is None else {"worker_line": job.line}),
            **settings.speculation,
        }
    )
    longest = settings.prompt_len + settings.output_len
    config = EngineConfig(
        model=str(target),
        device=settings.device,
        tensor_parallel=job.tp,
        max_model_len=longest + 2 * (pair.lookahead + 1),
        prefix_cache=False,
        speculation=speculation,
    )
    return Mode(job.name, fit_cache(config, batch=max(settings.batches), tokens=longest))


def prompts(pair: Pair, settings: Settings, batch: int) -> list[list[Case]]:
    """Waves of `batch` prompts of tokens that the chain goes through; the same for every mode."""
    draw = random.Random(batch)
    most = min(pair.core or CORE, shape(pair.target)["vocab_size"])
    return [
        [Case("chain", "", tuple(draw.randrange(most) for _ in range(settings.prompt_len))) for _ in range(batch)]
        for _ in range(max(_FEWEST_WAVES, _SEQUENCES // batch))
    ]


def run_job(job: Job, settings: Settings) -> Iterator[dict[str, Any]]:
    """Build the engine, serve every batch size, and yield its row, and some of its rounds one by one."""
    began = time.perf_counter()
    sampling = SamplingParams(
        temperature=0.0, max_tokens=settings.output_len, ignore_eos=True, seed=0, reproducible=False
    )
    # a drafter meets new shapes for a while, and may capture each when it comes
    warm_up = settings.output_len if job.speculator != "none" else min(_WARM_UP_TOKENS, settings.output_len)
    first = dataclasses.replace(sampling, max_tokens=warm_up)
    with OwnEngine(engine_mode(job, settings)) as engine:
        built_s = time.perf_counter() - began
        for batch in settings.batches:
            waves = prompts(find_pair(job.pair), settings, batch)
            engine.run(waves[0], first)
            samples = [engine.run(wave, sampling) for wave in waves]
            row = summarise(job.name, batch, samples, num_devices=job.tp + (job.speculator == "ssd"))
            put_round(row, samples)
            row |= {"pair": job.pair, "tp": job.tp, "device": engine.engine.info.device}
            row |= {"lookahead": engine.engine.info.lookahead, "built_s": round(built_s, 2)}
            yield row | _equality(job, settings, batch, samples)
            yield {"timeline": f"{job.pair} {job.name}, batch {batch}", "bars": rounds(samples)}
            if sick := engine.engine.health():
                raise SsdError(f"{job.pair} {job.name}: {sick}")


def _equality(job: Job, settings: Settings, batch: int, samples: Sequence[Sample]) -> Row:
    """How many answers are those of plain decoding of the same target, kept in a file by the first who decodes it."""
    answers = [output for sample in samples for output in sample.outputs]
    kept = Path(settings.folder) / f"tokens-{find_pair(job.pair).target}-{batch}.json"
    if job.speculator == "none" and not kept.exists():
        kept.write_text(json.dumps(answers))
        return {}
    if not kept.exists():
        return {}
    plain = json.loads(kept.read_text())
    return {"answers": len(answers), "same_answers": sum(map(list.__eq__, plain, answers))}


def run_jobs(jobs: Sequence[Job], settings: Settings, rows: Path, deadline: float) -> None:
    """All jobs in turn; every row is in the file as soon as it is known. A job that fails leaves its reason."""
    for job in jobs:
        if time.time() > deadline:
            skip(rows, job, OUT_OF_TIME)
            continue
        try:
            for row in run_job(job, settings):
                append(rows, row)
        except Exception as error:  # noqa: BLE001  whatever it was, the next job may do better
            traceback.print_exc()
            skip(rows, job, f"{type(error).__name__}: {error}".splitlines()[0])
        forget_engine()


def skip(rows: Path, job: Job, reason: str) -> None:
    """Say why there is no row of a job."""
    append(rows, {"pair": job.pair, "mode": job.name, "tp": job.tp, "skipped": reason})


def append(file: Path, row: Mapping[str, Any]) -> None:
    """One more line of JSON."""
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def to_json(jobs: Sequence[Job], settings: Settings, rows: Path, deadline: float) -> str:
    """What `main` reads."""
    value: dict[str, Any] = {
        "jobs": [dataclasses.asdict(job) for job in jobs],
        "settings": dataclasses.asdict(settings),
    }
    return json.dumps(value | {"rows": str(rows), "deadline": deadline})


def main() -> None:
    """Body of the process of one pair."""
    given = json.loads(Path(sys.argv[1]).read_text())
    batches = tuple(given["settings"].pop("batches"))
    settings = Settings(batches=batches, **given["settings"])
    run_jobs([Job(**job) for job in given["jobs"]], settings, Path(given["rows"]), given["deadline"])


if __name__ == "__main__":
    main()
