"""Speculative speculative decoding: a worker process drafts for every likely outcome while the target verifies."""

import sys

from ssd_ascend import LLM, SamplingParams
from ssd_ascend.config.speculation import SpeculationConfig


def main(model: str = "smollm2-135m", draft: str = "smollm2-135m") -> None:
    """The answer of plain decoding in fewer steps. With a draft as large as the target it is right, not faster."""
    speculation = SpeculationConfig(speculator="ssd", drafter="model", draft=draft, lookahead=4, fan_out=3)
    for name, config in {"plain": SpeculationConfig(), "ssd": speculation}.items():
        with LLM(model, speculation=config) as llm:
            [output] = llm.generate(["The three primary colours are"], SamplingParams(temperature=0, max_tokens=32))
            stats = llm.stats_of(output.answers[0])
            counts = {key: stats[key] for key in ("steps", "drafted", "accepted", "cache_lookups", "cache_hits")}
            print(f"{name}: {output.answers[0].text!r}\n{counts}")


if __name__ == "__main__":
    main(*sys.argv[1:])
