"""A picture of a run: loss, accuracy by step of self-conditioning, and tokens per round. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ssd_ascend.errors import ConfigError
from ssd_ascend.training.run_folder import writing

PICTURE = "training.png"


def draw(result: Mapping[str, Any], file: Path) -> None:
    """Draw what `pipeline.make_head` returned into a PNG; ConfigError when matplotlib is missing."""
    try:
        importlib.import_module("matplotlib").use("Agg")
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ModuleNotFoundError as error:
        raise ConfigError(
            "the picture needs matplotlib",
            remedy="pip install matplotlib, then `train --plot` with the head's directory",
        ) from error
    log: Sequence[Mapping[str, Any]] = result["log"]
    steps = [record["step"] for record in log]
    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(13, 4), layout="constrained")
    left.plot(steps, [record["loss"] for record in log], color="#3d5a80")
    left.set(title="loss", xlabel="step")
    depths = len(log[-1]["accuracy"])
    held_out = [record for record in log if "held_out_by_depth" in record]
    for depth in range(depths):
        shade = str(0.15 + 0.6 * depth / max(1, depths - 1))
        middle.plot(steps, [record["accuracy"][depth] for record in log], color=shade, lw=0.8)
        if held_out and depth < len(held_out[-1]["held_out_by_depth"]):
            points = [record["held_out_by_depth"][depth] for record in held_out]
            middle.plot([record["step"] for record in held_out], points, color=shade, ls=":", label=f"step {depth + 1}")
    middle.set(
        title="by step of self-conditioning\nsolid: agrees with the target's best token (training)\n"
        "dotted: is the text's token (held out, any temperature)",
        xlabel="step",
    )
    if held_out:
        middle.legend(fontsize=7)
        rounds = [record["held_out_tokens_per_round"] for record in held_out]
        right.plot([record["step"] for record in held_out], rounds, color="#e07a5f")
    right.set(title="tokens per round on held-out text,\ngreedy, lookahead 5", xlabel="step")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    with writing(file):
        figure.savefig(file, dpi=130)
    pyplot.close(figure)
