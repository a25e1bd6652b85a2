"""The command lines of the reference implementation (github.com/tanishqkumar/ssd, bench/bench.py), in our words.

`add_arguments` declares them, `translate` turns them into our flags and says what has no counterpart here. The table in
`docs/benchmarks.md` is the same mapping for readers.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from bench.cases import DATASETS
from ssd_ascend import catalogue, env
from ssd_ascend.config.preset import ModelPreset, Preset
from ssd_ascend.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([MB])(?![a-z])")
_DEFAULT_NUMSEQS = 128
_DEFAULT_OUTPUT_LEN = 512
_NO_COUNTERPART = {
    "flm": "after a miss, branches use the same fan-out as after a hit",
    "ttemp": "the target always samples at the request's temperature",
    "afn": "give --f auto for a fan-out that adapts",
    "block_sz": "the device chooses its block size; --block-size overrides it",
    "wandb": "give --json FILE and --plots DIR",
    "group": "it belongs to --wandb",
    "name": "it belongs to --wandb",
    "max_steps": "a run ends with its prompts",
    "debug": "nothing is dumped",
    "verbose": "SSD_LOG_LEVEL=DEBUG says more",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the reference's flags. Those that were not given stay absent."""
    group = parser.add_argument_group("the reference's own flags, accepted as they stand")

    def flag(*names: str, **options: Any) -> None:
        group.add_argument(*names, default=argparse.SUPPRESS, **options)

    for name, text in {
        "--llama": "the family: llama (default)",
        "--qwen": "the family: qwen3",
        "--spec": "--speculator sd",
        "--async": "with --spec or --eagle: --speculator ssd",
        "--eagle": "--drafter eagle3; implies --spec; here for every family, temperature, and without --async too",
        "--jit": "--on-miss draft",
        "--eager": "--no-graphs",
        "--all": "--numseqs prompts of each of humaneval, alpaca, gsm8k, ultrafeedback",
        "--example": "up to 8 chat prompts; prints the answers",
        "--random": "random tokens as prompts, --input_len of them",
    }.items():
        flag(name, action="store_true", help=text)
    flag("--size", metavar="N", help="size in billions: the preset of models/ of that family and size")
    flag("--gpus", type=int, metavar="G", help="devices in all; the target takes those that no drafter needs")
    flag("--k", type=int, metavar="K", help="--lookahead")
    flag("--f", metavar="F", help="--fan-out")
    flag("--flh", "--fl", dest="flh", nargs="+", metavar="F", help="--fan-out as a list of K + 1")
    flag("--x", type=float, metavar="C", help="--cache-bias: cache-aware (Saguaro) sampling")
    flag("--dtemp", type=float, metavar="T", help="--draft-temperature")
    flag("--backup", choices=("jit", "fast"), help="--on-miss draft, or decline")
    flag("--b", type=int, metavar="B", help="sequences that run at once")
    flag("--max_model_len", dest="max_model_len", type=int, metavar="N", help="--max-model-len")
    flag("--temp", type=float, metavar="T", help="--temperature")
    flag("--numseqs", type=int, metavar="N", help="prompts per data set (default 128)")
    flag("--output_len", dest="ref_output_len", type=int, metavar="N", help="--output-len (default 512)")
    flag("--input_len", dest="input_len", type=int, metavar="N", help="--input-len")
    for name in (*DATASETS, "gsm"):
        flag(f"--{name}", dest=name if name != "gsm" else "gsm8k", action="store_true", help="prompts of this data set")
    flag("--flm", nargs="+", metavar="F", help=_NO_COUNTERPART["flm"])
    for name in ("ttemp", "block_sz", "group", "name"):
        flag(f"--{name}", metavar="V", help=_NO_COUNTERPART[name])
    flag("--max-steps", dest="max_steps", metavar="N", help=_NO_COUNTERPART["max_steps"])
    for name in ("afn", "wandb", "debug", "verbose"):
        flag(f"--{name}", action="store_true", help=_NO_COUNTERPART[name])


def is_reference_line(args: argparse.Namespace) -> bool:
    """Whether a flag was given that says "run it as the reference does": all prompts through one engine, once."""
    return any(
        hasattr(args, name)
        for name in ("llama", "qwen", "size", "spec", "async", "eagle", "numseqs", "b", "ref_output_len", "all")
    )


def translate(args: argparse.Namespace, *, num_devices: int | None, device: str | None = None) -> list[str]:
    """Rewrite `args` in our words, in place; returns what the user should know. ConfigError when nothing can run.

    `num_devices` is how many accelerators there are, of the kind `device`; None on a CPU.
    """
    given = vars(args)
    notices = [f"--{name} is ignored: {why}" for name, why in _NO_COUNTERPART.items() if name in given]
    if given.get("qwen") and given.get("llama"):
        raise ConfigError("--llama and --qwen exclude each other", remedy="give one of them")
    _speculation(given)
    _renamed(given)
    if is_reference_line(args):
        notices += _models(given)
        notices += _devices(given, num_devices, device)
        given["continuous"] = True
        given.setdefault("batch", str(given.get("b", 1)))
        given.setdefault("prompts", _DEFAULT_NUMSEQS)
        given.setdefault("output_len", _DEFAULT_OUTPUT_LEN)
    given.setdefault("data_sets", _data_sets(given))
    return notices


def _speculation(given: dict[str, Any]) -> None:
    if given.get("eagle"):
        given.setdefault("drafter", "eagle3")
    drafts = given.get("spec") or given.get("eagle")
    if drafts:
        given.setdefault("drafter", "model")
        given.setdefault("modes", "ssd" if given.get("async") else "sd")
        given.setdefault("lookahead", given.get("k", 6))
    elif "async" in given:
        raise ConfigError("--async says how to speculate, but nothing does", remedy="add --spec or --eagle")
    if "modes" not in given and (is_reference_line(argparse.Namespace(**given))):
        given["modes"] = "none"


def _renamed(given: dict[str, Any]) -> None:
    names = {
        "k": "lookahead", "x": "cache_bias", "dtemp": "draft_temperature", "temp": "temperature",
        "numseqs": "prompts", "ref_output_len": "output_len",
    }  # fmt: skip
    for theirs, ours in names.items():
        if theirs in given:
            given.setdefault(ours, given[theirs])
    if "flh" in given:
        given.setdefault("fan_out", _list(given["flh"], "--flh"))
    elif "f" in given:
        given.setdefault("fan_out", given["f"] if given["f"] == "auto" else _list([given["f"]], "--f")[0])
    if given.get("eager"):
        given.setdefault("graphs", False)
    if "backup" in given or given.get("jit"):
        given.setdefault("on_miss", "decline" if given.get("backup") == "fast" else "draft")


def _list(words: list[str], flag: str) -> tuple[int, ...]:
    """`1 3 4`, `1,3,4` and `[1, 3, 4]` alike."""
    parts = re.split(r"[\s,]+", " ".join(words).strip("[] "))
    if not all(part.isdigit() for part in parts):
        raise ConfigError(f"{flag} is {' '.join(words)!r}", remedy="give whole numbers")
    return tuple(int(part) for part in parts)


def _data_sets(given: dict[str, Any]) -> list[str]:
    if given.get("all"):
        return ["humaneval", "alpaca", "gsm8k", "ultrafeedback"]
    chosen = [name for name in DATASETS if given.get(name)]
    free = given.get("example") or given.get("random")
    return chosen or (["gsm8k"] if given.get("continuous") and not free else [])


def _devices(given: dict[str, Any], num_devices: int | None, device: str | None) -> list[str]:
    gpus = given.get("gpus", 1)
    if gpus < 1:
        raise ConfigError(f"--gpus is {gpus}", remedy="give at least 1")
    if num_devices is None:
        return [f"--gpus {gpus} is ignored: this runs on the CPU"] if "gpus" in given else []
    if gpus > num_devices:
        raise ConfigError(f"--gpus is {gpus}, but this machine has {num_devices}", remedy="give what there is")
    own_device = bool(given.get("async")) and gpus > 1  # the drafter's: the last one
    given.setdefault("tensor_parallel", gpus - own_device)
    if own_device and device is not None:
        given.setdefault("draft_device", f"{device}:{gpus - 1}")
    return []


def _models(given: dict[str, Any]) -> list[str]:
    """Choose target and draft by family and size, as far as flags have not named them. Returns notices."""
    family = "qwen3" if given.get("qwen") else "llama"
    draft_size = _draft_size(given)
    if "model" not in given and "size" in given:
        given["model"] = _find(family, given["size"], eagle=bool(given.get("eagle")), draft=draft_size)
    model = given.get("model") or env.target_model()
    if model is None:
        raise ConfigError("no model is named", remedy="give --size N or --model M, or set SSD_TARGET_MODEL")
    preset = catalogue.find_preset(model) if catalogue.is_preset(model) else None
    if draft_size is not None:
        if preset is None or preset.draft is None or size_of(preset.draft) != float(draft_size):
            raise ConfigError(f"{model} has no draft of size {draft_size}", remedy="give --draft a name or a path")
        given["draft"] = model
    if not (given.get("spec") or given.get("eagle")) or "draft" in given or env.draft_model():
        return []
    drafter = given["drafter"]
    if drafter == "ngram" or (preset and preset.speculation and preset.speculation.drafter == drafter):
        return []
    if drafter == "eagle3":
        raise ConfigError(
            f"no EAGLE-3 head is known for {model!r}; looked at {catalogue.folder('models')}",
            remedy="give --draft, or set SSD_DRAFT_MODEL",
        )
    given["draft"] = model
    return [f"no draft is named: {model} drafts for itself; give --draft or set SSD_DRAFT_MODEL for a smaller one"]


def _draft_size(given: dict[str, Any]) -> str | None:
    """The reference's `--draft 1` or `--draft 0.6`: a size, not a name."""
    draft = given.get("draft", "")
    return draft if re.fullmatch(r"\d+(\.\d+)?", draft) else None


def size_of(model: ModelPreset) -> float | None:
    """Billions of parameters, as the model's name states them: 0.135 for SmolLM2-135M, 70 for Llama-3.3-70B."""
    found = _SIZE.search(model.name)
    if found is None:
        return None
    return float(found[1]) / (1000 if found[2] == "M" else 1)


def _find(family: str, size: str, *, eagle: bool, draft: str | None) -> str:
    """The preset whose target has this family and size, preferring one with the kind of draft that is asked for."""
    try:
        wanted = float(size)
    except ValueError:
        raise ConfigError(f"--size is {size!r}", remedy="give a number of billions, such as 70 or 0.6") from None
    presets = {name: catalogue.find_preset(name) for name in catalogue.names("models")}
    of_family = {
        name: preset for name, preset in presets.items() if preset.target.family.removesuffix("_moe") == family
    }
    fitting = [name for name, preset in of_family.items() if size_of(preset.target) == wanted]
    if not fitting:
        known = sorted({size_of(preset.target) or 0.0 for preset in of_family.values()})
        listed = ", ".join(f"{billions:g}" for billions in known) or "none"
        raise ConfigError(
            f"no preset of family {family} has size {size}; looked at {catalogue.folder('models')}, sizes: {listed}",
            remedy="give --model M, or leave --size out and set SSD_TARGET_MODEL",
        )
    return max(fitting, key=lambda name: _fits(presets[name], eagle=eagle, draft=draft))


def _fits(preset: Preset, *, eagle: bool, draft: str | None) -> int:
    has_head = preset.speculation is not None and preset.speculation.drafter == "eagle3"
    if preset.draft is None:
        return 1
    score = 2 if has_head == eagle else 0
    return score + (draft is not None and size_of(preset.draft) == float(draft))
