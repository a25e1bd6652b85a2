"""The flags every door shares, and how they become an `EngineConfig`: a flag beats the environment, which beats a
preset.

Torch-free, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any, Literal

from ssd_ascend import catalogue, env
from ssd_ascend.config.engine import DTYPES, EngineConfig
from ssd_ascend.config.speculation import FanOutSpec, SpeculationConfig
from ssd_ascend.errors import ConfigError, unknown_name
from ssd_ascend.flag_rules import check_use
from ssd_ascend.registry import Registry
from ssd_ascend.speculation.registry import DRAFTERS, SPECULATORS


def _lookahead(text: str) -> int | Literal["auto"]:
    return "auto" if text == "auto" else _whole_number(text, "a number, or auto")


def fan_out(text: str) -> FanOutSpec:
    if text == "auto":
        return "auto"
    numbers = tuple(_whole_number(part, "a number, a list such as 4,3,2,1, or auto") for part in text.split(","))
    return numbers[0] if len(numbers) == 1 else numbers


def _names(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _kept_in(registry: Registry[Any]) -> dict[str, Any]:
    """How argparse reads a name of a registry, or the place of one's own, which is known when it is imported."""

    def name(text: str) -> str:
        if text not in registry and ":" not in text:
            raise argparse.ArgumentTypeError(str(unknown_name(registry.kind, text, registry)))
        return text

    return {"type": name, "metavar": "|".join(registry)}


def positive_list(text: str, flag: str) -> list[int]:
    """`1,8,32`; ConfigError naming the flag otherwise."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ConfigError(f"{flag} is {text!r}", remedy="give whole numbers above 0, separated by commas")
    return [int(part) for part in parts]


def _whole_number(text: str, expected: str) -> int:
    try:
        return int(text.strip(" []"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {expected}") from None


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the engine's flags. Flags that were not given stay absent, so that defaults have one home: the config."""
    _add_model_arguments(parser.add_argument_group("model"))
    _add_capacity_arguments(parser.add_argument_group("capacity"))
    _add_speculation_arguments(parser.add_argument_group("speculation"))


def _flag(group: argparse._ArgumentGroup, *names: str, **options: Any) -> None:
    group.add_argument(*names, default=argparse.SUPPRESS, **options)


def _add_model_arguments(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--model", metavar="M", help="a directory, a .gguf file, a preset of models/, or a hub name")
    _flag(group, "--device", help="cpu, cuda or npu (default: SSD_DEVICE, else the best there is)")
    _flag(
        group, "--dtype", choices=DTYPES, help="serving dtype (default: the model's own, as far as the device has it)"
    )
    _flag(group, "--tp", dest="tensor_parallel", type=int, metavar="N", help="tensor-parallel ranks of the target")
    _flag(group, "--chat-template", metavar="FILE", help="a Jinja file to use instead of the model's own template")
    _flag(group, "--served-model-name", metavar="NAME", help="the name clients use (default: the model's)")


def _add_capacity_arguments(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--max-model-len", type=int, metavar="N", help="longest prompt + answer, tokens")
    _flag(group, "--max-num-seqs", type=int, metavar="N", help="most sequences that run at once")
    _flag(group, "--max-batched-tokens", type=int, metavar="N", help="most tokens of one forward")
    _flag(group, "--block-size", type=int, metavar="N", help="tokens of one KV block")
    _flag(group, "--kv-cache-gb", type=float, metavar="GB", help="size of the target's KV cache")
    _flag(group, "--num-kv-blocks", type=int, metavar="N", help="the same, in blocks")
    _flag(group, "--no-prefix-cache", dest="prefix_cache", action="store_false", help="compute every prompt in full")
    _flag(group, "--no-graphs", dest="graphs", action="store_false", help="never capture device graphs")
    _flag(group, "--threads", type=int, metavar="N", help="CPU threads of the target (default: all cores)")
    _flag(group, "--engine-seed", type=int, metavar="S", help="seeds requests that bring none, in their order")


def _add_speculation_arguments(group: argparse._ArgumentGroup) -> None:
    _flag(group, "--speculator", **_kept_in(SPECULATORS), help="when drafting happens: never, in turn, or meanwhile")
    _flag(group, "--drafter", **_kept_in(DRAFTERS), help="what drafts: a small model, an EAGLE-3 head, n-grams, or "
          "module:name, one's own")  # fmt: skip
    _flag(group, "--draft", metavar="D", help="the drafter's weights; same forms as --model")
    _flag(group, "--lookahead", type=_lookahead, metavar="K|auto", help="draft tokens per speculation")
    _flag(group, "--fan-out", type=fan_out, metavar="F|auto|LIST", help="guesses prepared per accepted length")
    _flag(group, "--on-miss", choices=("auto", "draft", "ngram", "decline"), help="what an unforeseen outcome gets")
    _flag(group, "--cache-bias", type=float, metavar="C", help="cache-aware sampling: 1 is off, smaller favours hits")
    _flag(group, "--draft-temperature", type=float, metavar="T", help="temperature of drafts (default: the request's)")
    _flag(group, "--draft-device", metavar="DEV", help="device of the drafter (default: the target's kind)")
    _flag(group, "--draft-dtype", choices=DTYPES, help="dtype of the drafter")
    _flag(group, "--draft-threads", type=int, metavar="N", help="CPU threads of an ssd worker (default: half)")
    _flag(group, "--draft-rope", choices=("draft", "target", "auto"), help="whose rope an EAGLE-3 head uses")
    _flag(group, "--branch-lowering", choices=("auto", "tree_mask", "rows"), help="how branches are laid out")
    _flag(
        group, "--speculators", type=_names, metavar="HOST:PORT,...",
        help="draft on these (started with ssd_ascend.speculate) instead of in a worker of our own",
    )  # fmt: skip
    _flag(group, "--worker", choices=("auto", "process", "thread", "inprocess"), help="where an ssd drafter lives "
          "(default auto: a thread where that is faster on one device, else a process)")  # fmt: skip
    _flag(group, "--worker-line", choices=("auto", "socket", "device"), help="what carries its messages (default auto: "
          "a socket; features stay on the device where the worker's can read them there)")  # fmt: skip


_SPECULATION_FIELDS = frozenset(SpeculationConfig.__dataclass_fields__)
_ENGINE_FIELDS = frozenset(EngineConfig.__dataclass_fields__) - {"speculation", "model", "seed"}
"""Those that have a flag of their name; `seed` is a request's at some doors."""


def engine_config(args: argparse.Namespace, *, is_final: bool = True) -> EngineConfig:
    """The engine that parsed flags ask for.

    Raises `ConfigError` when no model is named, values cannot go together, or a flag would mislead: it was given, and
    has no use. With `is_final` false the last is not asked: the caller has yet to choose the speculator.
    """
    given = vars(args)
    model = given.get("model") or env.target_model()
    if model is None:
        raise ConfigError("no model is named", remedy="give --model, or set SSD_TARGET_MODEL")
    speculation = SpeculationConfig()
    engine: dict[str, Any] = {}
    if catalogue.is_preset(model):
        preset = catalogue.find_preset(model)
        speculation = preset.speculation or speculation
        engine = {"max_model_len": preset.target.dims.max_model_len}
        if preset.draft is not None:
            speculation = replace(speculation, draft=model)
    if draft := env.draft_model():
        speculation = replace(speculation, draft=draft)
    asked = {name: value for name, value in given.items() if name in _SPECULATION_FIELDS}
    speculation = replace(speculation, **asked)
    if is_final:
        check_use(asked, speculation)
    engine.update({name: value for name, value in given.items() if name in _ENGINE_FIELDS})
    if "engine_seed" in given:
        engine["seed"] = given["engine_seed"]
    return EngineConfig(model=model, speculation=speculation, **engine)
