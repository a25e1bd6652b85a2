"""What is asked of the engines: built-in prompts in four kinds, data sets of `SSD_DATASET_DIR`, or random tokens.

Data sets lie as the reference lays them out, `<dir>/<name>/<name>_data_10000.jsonl` with a "text" per line (its
`bench/bench_paths.py` and `scripts/get_data_from_hf.py`, github.com/tanishqkumar/ssd), and are used as raw text.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ssd_ascend import env
from ssd_ascend.errors import ConfigError, unknown_name
from ssd_ascend.text import Tokenizer

KINDS = ("code", "chat", "maths", "copy")
DATASETS = ("humaneval", "alpaca", "gsm8k", "ultrafeedback", "c4")
STAND_INS = {"humaneval": "code", "alpaca": "chat", "gsm8k": "maths", "ultrafeedback": "copy", "c4": "copy"}
"""The built-in kind that is used for a data set where there is no SSD_DATASET_DIR."""
_CHARACTERS_A_TOKEN = 4
_PROMPTS = Path(__file__).resolve().parent / "prompts"


@dataclass(frozen=True, slots=True)
class Case:
    """One prompt: where it is from, its text (empty for random tokens), and its tokens."""

    kind: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """Prompts of one kind before tokenizing, and a remark for the user when they are not quite what was asked for."""

    kind: str
    texts: list[str]
    notice: str | None = None


def built_in(kind: str, count: int | None = None) -> Texts:
    """The first `count` of our own prompts of a kind (all by default)."""
    if kind not in KINDS:
        raise unknown_name("kind of prompt", kind, KINDS)
    texts = read_texts(_PROMPTS / f"{kind}.jsonl")
    if count is not None and count > len(texts):
        return Texts(kind, texts, f"{kind}: {count} prompts asked for, {len(texts)} built in")
    return Texts(kind, texts[:count])


def data_set(name: str, count: int | None = None) -> Texts:
    """The first `count` texts of a data set; our own prompts of the nearest kind where SSD_DATASET_DIR is not set."""
    if name not in DATASETS:
        raise unknown_name("data set", name, DATASETS)
    folder = env.dataset_dir()
    if folder is None:
        own = built_in(STAND_INS[name], count)
        missing = f"SSD_DATASET_DIR is not set: {name} is replaced by {len(own.texts)} built-in prompts ({own.kind})"
        return Texts(name, own.texts, missing)
    texts = read_texts(_dataset_file(folder, name), count)
    short = f"{name}: {count} prompts asked for, {len(texts)} found" if count and len(texts) < count else None
    return Texts(name, texts, short)


def _dataset_file(folder: Path, name: str) -> Path:
    expected = folder / name / f"{name}_data_10000.jsonl"
    if expected.is_file():
        return expected
    others = sorted((folder / name).glob(f"{name}_data_*.jsonl"))
    if others:
        return others[-1]
    raise ConfigError(
        f"no data set {name!r}: looked at {expected}",
        remedy="put it there, or unset SSD_DATASET_DIR to use the built-in prompts",
    )


def read_texts(path: Path, count: int | None = None) -> list[str]:
    """The texts of a JSONL file, one object with "text" (or "prompt") a line; ConfigError names file and line."""
    texts: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if count is not None and len(texts) >= count:
                    break
                if line.strip():
                    texts.append(_text(line, f"{path}, line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not texts:
        raise ConfigError(f"{path} holds no prompts")
    return texts


def _text(line: str, where: str) -> str:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is no JSON: {error}") from error
    text = (value.get("text") or value.get("prompt")) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise ConfigError(f'{where} has no "text"')
    return text


def encode(groups: Iterable[Texts], tokenizer: Tokenizer, *, chat: bool) -> list[Case]:
    """Tokenize: as raw text, or as the user's message of a conversation. The kinds take turns."""
    columns = [[_case(group.kind, text, tokenizer, chat=chat) for text in group.texts] for group in groups]
    return _in_turns(columns)


def _in_turns(columns: Sequence[Sequence[Case]]) -> list[Case]:
    longest = max(map(len, columns), default=0)
    return [column[i] for i in range(longest) for column in columns if i < len(column)]


def _case(kind: str, text: str, tokenizer: Tokenizer, *, chat: bool) -> Case:
    if chat:
        ids = tokenizer.chat.render([{"role": "user", "content": text}], add_generation_prompt=True)
    else:
        ids = tokenizer.encode(text, add_special_tokens=True)
    return Case(kind, text, tuple(ids))


def random_cases(count: int, length: int, vocab_size: int, *, seed: int = 0) -> list[Case]:
    """Prompts of exactly `length` seeded random tokens; no model has anything sensible to say to them."""
    if length < 1:
        raise ConfigError(f"input_len is {length}", remedy="give at least 1")
    source = random.Random(seed)
    return [
        Case("random", "", tuple(source.randrange(min(10_000, vocab_size)) for _ in range(length)))
        for _ in range(count)
    ]


def random_like(groups: Iterable[Texts], vocab_size: int) -> list[Case]:
    """Random tokens in place of texts, about as many as the texts have; where there is no tokenizer to tell."""
    columns = [
        [replace(random_cases(1, max(1, len(text) // _CHARACTERS_A_TOKEN), vocab_size, seed=i)[0], kind=group.kind)
         for i, text in enumerate(group.texts)]
        for group in groups
    ]  # fmt: skip
    return _in_turns(columns)


def waves(cases: Sequence[Case], batch: int, repeat: int) -> list[list[Case]]:
    """Batches of exactly `batch` prompts that go through all `cases` `repeat` times, starting over where they end."""
    count = -(-len(cases) // batch) * repeat
    return [[cases[(wave * batch + i) % len(cases)] for i in range(batch)] for wave in range(count)]
