"""The door `python -m ssd_ascend.chat`: talk to a model in the terminal, in this process, seeing words as they come."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING

from ssd_ascend import env
from ssd_ascend.errors import RequestError, SsdError, needs_packages
from ssd_ascend.flags import add_engine_arguments, engine_config

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ssd_ascend.core.sampling import SamplingParams
    from ssd_ascend.engine.answers import AnswerStats
    from ssd_ascend.llm import LLM

HELP = """/help   this list
/reset  forget the conversation
/stats  show or hide, after each answer, how fast it came and how its drafts did
/exit   leave (so does Ctrl-D); Ctrl-C stops an answer"""


class Conversation:
    """The turns so far, and the model that answers. `system` is a first message that /reset keeps."""

    def __init__(self, llm: LLM, sampling: SamplingParams, *, system: str | None = None) -> None:
        self._llm = llm
        self._sampling = sampling
        self._start = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = list(self._start)
        self.last_stats: AnswerStats | None = None

    def reset(self) -> None:
        """Forget all but the system message."""
        self.turns = list(self._start)
        self.last_stats = None

    def say(self, text: str) -> Generator[str]:
        """The answer to `text`, in pieces. One that is stopped early stays in the conversation as far as it came.

        Raises RequestError, and forgets `text`, when the conversation does not fit any more.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        prompt = self._llm.tokenizer.chat.render(turns, add_generation_prompt=True)
        answer, self.last_stats = "", None
        try:
            for delta in self._llm.stream(prompt, self._sampling, continuation=False):
                if delta.error is not None:
                    raise RequestError(delta.error)
                answer += delta.text
                self.last_stats = delta.stats
                yield delta.text  # empty ones too: between them the reader may stop
        finally:
            if answer or self.last_stats is not None:
                self.turns = [*turns, {"role": "assistant", "content": answer}]


def stats_line(stats: AnswerStats) -> str:
    """One line about an answer; drafts only when there were any."""
    parts = [
        f"{stats.completion_tokens} tokens",
        f"first after {stats.ttft_s:.2f} s",
        f"then {stats.decode_tokens_per_s:.1f} tokens/s",
    ]
    if stats.drafted:
        parts.append(f"{stats.acceptance_length:.2f} tokens a step")
        parts.append(f"{stats.accepted} of {stats.drafted} drafts accepted")
    if stats.cache_lookups:
        parts.append(f"{stats.cache_hits / stats.cache_lookups:.0%} cache hits")
    return f"[{', '.join(parts)}]"


def talk(
    conversation: Conversation, read: Callable[[], str], write: Callable[[str], object], *, show_stats: bool
) -> None:
    """Read lines and answer them until the input ends. Commands begin with a slash."""
    while True:
        try:
            line = read().strip()
        except (EOFError, KeyboardInterrupt):
            write("\n")
            return
        match line:
            case "":
                continue
            case "/exit" | "/quit":
                return
            case "/help":
                write(HELP + "\n")
            case "/reset":
                conversation.reset()
                write("(forgotten)\n")
            case "/stats":
                show_stats = not show_stats
                write(f"(statistics {'shown' if show_stats else 'hidden'})\n")
            case _ if line.startswith("/"):
                write(f"unknown command {line.split()[0]}\n{HELP}\n")
            case _:
                _answer(conversation, line, write, show_stats=show_stats)


def _answer(conversation: Conversation, line: str, write: Callable[[str], object], *, show_stats: bool) -> None:
    try:
        with _ctrl_c() as pressed, closing(conversation.say(line)) as pieces:
            for piece in pieces:
                write(piece)
                if pressed.is_set():
                    write(" (stopped)")
                    break
    except RequestError as error:
        write(f"error: {error}")
    write("\n")
    if show_stats and conversation.last_stats is not None:
        write(stats_line(conversation.last_stats) + "\n")


@contextmanager
def _ctrl_c() -> Iterator[threading.Event]:
    """Ctrl-C within the block sets the event instead of breaking into the engine, which is in the middle of a step."""
    pressed = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="ssd-ascend chat", description="Talk to a model in the terminal.", allow_abbrev=False
    )
    add_engine_arguments(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="what the model is told first")
    group.add_argument("--stats", action="store_true", help="after each answer, show speed, acceptance and cache hits")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most tokens per answer (default: what fits)")
    group.add_argument("--temperature", type=float, default=0.7, metavar="T", help="0 is greedy (default 0.7)")
    group.add_argument("--top-p", type=float, default=0.95, metavar="P", help="(default 0.95)")
    group.add_argument("--seed", type=int, metavar="S", help="makes answers repeatable")
    return parser


def run(args: argparse.Namespace) -> int:
    """Load, then talk. Returns the exit status."""
    from ssd_ascend.core.sampling import SamplingParams
    from ssd_ascend.llm import LLM  # not at the top: it brings torch, and --help should be instant
    from ssd_ascend.progress import bar

    sampling = SamplingParams(
        temperature=args.temperature, top_p=args.top_p, seed=args.seed, max_tokens=args.max_tokens
    )
    with bar("loading") as loaded:
        llm = LLM(engine_config(args), progress=loaded)
    with llm:
        print(f"{llm.info.model} on {llm.info.device}; /help lists commands", file=sys.stderr)
        _enable_line_editing()
        talk(Conversation(llm, sampling, system=args.system), _read_line, _write, show_stats=args.stats)
    return 0


def _enable_line_editing() -> None:
    """History and cursor keys for `input`, where Python was built with them."""
    try:
        import readline  # noqa: F401  importing it is what switches it on
    except ImportError:
        return


def _read_line() -> str:
    return input("> " if sys.stdin.isatty() else "")


def _write(text: str) -> None:
    print(text, end="", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; errors are one sentence on standard error."""
    env.let_threads_sleep()
    args = parser().parse_args(argv)
    try:
        with needs_packages():
            return run(args)
    except SsdError as error:
        print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
