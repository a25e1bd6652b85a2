"""Many prompts at once, offline: `python examples/offline_batch.py [MODEL]`."""

import sys

from ssd_ascend import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "A haiku about autumn:",
    "def fibonacci(n):",
]


def main(model: str = "smollm2-135m") -> None:
    """Continue every prompt, greedily; the engine batches them by itself."""
    with LLM(model) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=24))
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            print(f"{prompt!r} -> {output.answers[0].text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
