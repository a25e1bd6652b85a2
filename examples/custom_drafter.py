"""A drafter of one's own in 40 lines: the text goes on as it did after the same token last time."""

import sys
from collections.abc import Callable, Sequence

import torch

from ssd_ascend import LLM, SamplingParams
from ssd_ascend.config.speculation import SpeculationConfig
from ssd_ascend.speculation.base import Branch, Chain, DraftSequence, Glue
from ssd_ascend.speculation.setup import DrafterKind


class LastTime:
    """`ssd_ascend.speculation.base.Drafter` says what each method is asked. To guess nothing is always allowed."""

    wants_features, to_target = False, None

    def chain(self, seqs: Sequence[DraftSequence], lookahead: int) -> Chain:
        found = [self.follow(seq.token_ids, lookahead) for seq in seqs]
        tokens = [guess + [0] * (lookahead - len(guess)) for guess in found]
        return Chain(torch.tensor(tokens), [len(guess) for guess in found], None, [False] * len(seqs), None)

    def follow(self, tokens: list[int], most: int) -> list[int]:
        places = (at for at in range(len(tokens) - 2, -1, -1) if tokens[at] == tokens[-1])
        at = next(places, len(tokens) - 1)
        return tokens[at + 1 : at + 1 + most]

    def glue(self, seqs: Sequence[DraftSequence], sent: object, hidden: object) -> Glue:
        """What a worker of `ssd` foresees outcomes by: this one foresees none."""
        return Glue(torch.empty(0, 0), None, [0] * len(seqs))

    def branch(
        self, branches: Sequence[Branch], guesses: object, glue: Glue, sent: object, k: int, stop: Callable[[], bool]
    ) -> Chain:
        return self.chain([branch.seq for branch in branches], k)

    def release(self, seq: DraftSequence) -> None:
        """Nothing is kept."""


KIND = DrafterKind(build=lambda setup: LastTime(), capture_layers=lambda path, target: (), is_free=True)


def main(model: str = "smollm2-135m", prompt: str = "one two three, one two three, one two") -> None:
    config = SpeculationConfig(speculator="sd", drafter=f"{__name__}:KIND", lookahead=5)
    with LLM(model, speculation=config) as llm:
        [output] = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=32))
        print(repr(output.answers[0].text), llm.stats_of(output.answers[0]))


if __name__ == "__main__":
    main(*sys.argv[1:])
