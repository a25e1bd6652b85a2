"""Training text: what is whose in a conversation, what user turns begin with, and what is refused."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest
import torch

from ssd_ascend.errors import ConfigError
from ssd_ascend.text import Tokenizer
from ssd_ascend.training.conversations import Conversations, read_jsonl, split
from ssd_ascend.training.prompts import Openings, turn_marks
from ssd_ascend.training.synthesis import sane_length
from ssd_ascend.training.vocabulary import choose_vocabulary
from tests.training.chatty import write_chatty
from tests.training.toys import random_text

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return write_chatty(tmp_path_factory.mktemp("chatty"))[1]


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), "utf-8")
    return path


def said(*contents: str) -> dict[str, object]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def test_answers_are_marked_with_their_end_and_nothing_else(tmp_path: Path, tokenizer: Tokenizer) -> None:
    data = read_jsonl(write_lines(tmp_path / "d.jsonl", said("hi", "then", "a", "the end")), tokenizer, max_length=256)
    marked = [token for token, own in zip(data.row(0), data.answer.tolist(), strict=True) if own]
    assert tokenizer.decode(marked, skip_special_tokens=False) == "then</s>the end</s>"
    whole = tokenizer.decode(data.row(0), skip_special_tokens=False)
    assert whole.startswith("<s>user\nhi</s>\n<s>assistant\nthen</s>\n<s>user\na</s>")


def test_what_follows_the_length_is_cut_and_conversations_without_answers_are_dropped(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    file = write_lines(tmp_path / "d.jsonl", said("hi"), said("hi", "a long answer"), "")
    data = read_jsonl(file, tokenizer, max_length=24)
    assert len(data) == 1
    assert len(data.tokens) == 24


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["{}"], "line 1 has no messages"),
        ([said("a", "b"), "not json"], "line 2 is no JSON"),
        ([said("a", "b"), {"messages": [{"role": "user"}]}], "line 2 has a message without role or content"),
        ([said("only a question")], "holds no answers"),
        ([], "holds no answers"),
    ],
)
def test_lines_that_cannot_be_used(tmp_path: Path, tokenizer: Tokenizer, lines: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_jsonl(write_lines(tmp_path / "d.jsonl", *lines), tokenizer, max_length=64)
    assert "d.jsonl" in str(error.value)


def test_marks_of_the_template(tokenizer: Tokenizer) -> None:
    marks = turn_marks(tokenizer)

    def text(tokens: list[int]) -> str:
        return tokenizer.decode(tokens, skip_special_tokens=False)

    assert text(marks.before) == "<s>user\n"
    assert text(marks.after_user) == "</s>\n<s>assistant\n"
    assert marks.after_answer is not None
    assert text(marks.after_answer) == "\n<s>user\n"
    assert marks.ends == tokenizer.eos_ids


def test_openings_fill_their_slots(tokenizer: Tokenizer) -> None:
    source = "# comment\n@who: the {what} | hen\n@what: ten | den\nask {who}!\\nnow\ntell...\n"
    openings, rng = Openings(source, tokenizer, where="o.txt"), random.Random(0)
    drawn = {
        (tokenizer.decode(o.tokens, skip_special_tokens=False), o.is_open)
        for o in (openings.draw(rng) for _ in range(99))
    }
    assert drawn == {
        ("Ask the ten!\nnow", False),
        ("Ask the den!\nnow", False),
        ("Ask hen!\nnow", False),
        ("Tell", True),
    }


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\nask {who}", "line 2: there is no list 'who'"),
        ("@who\nask", "line 1: '@who' is no list"),
        ("#", "no openings"),
    ],
)
def test_openings_that_cannot_be_understood(tokenizer: Tokenizer, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Openings(source, tokenizer, where="o.txt")


def test_the_prompts_that_judge_heads_are_not_near_the_openings(tokenizer: Tokenizer) -> None:
    """No prompt shares seven words in a row (a shorter one: all its words) with any of 20000 openings of our list."""
    openings, rng = Openings.load(None, tokenizer), random.Random(1)

    def words(text: str) -> str:
        return " ".join(["", *re.findall(r"\w+", text.lower()), ""])

    known = "|".join({words(openings.fill(rng)) for _ in range(20_000)})
    lines = (REPOSITORY / "bench/prompts/held_out.jsonl").read_text("utf-8").splitlines()
    prompts = [json.loads(line)["text"] for line in lines]
    assert len(set(prompts)) == 64
    for prompt in prompts:
        own = words(prompt).split()
        size = min(7, len(own))
        runs = (" " + " ".join(own[i : i + size]) + " " for i in range(len(own) - size + 1))
        assert not [run for run in runs if run in known], prompt


def test_split_keeps_everything_once() -> None:
    text = random_text(tuple(range(8, 28)))
    learn, judged = split(text, 0.2, 3)
    rows = sorted(tuple(part.row(i)) for part in (learn, judged) for i in range(len(part)))
    assert len(judged) == 4
    assert rows == sorted(tuple(text.row(i)) for i in range(len(text)))


def test_text_is_kept_and_rubbish_is_refused(tmp_path: Path) -> None:
    text = random_text()
    text.save(tmp_path / "t.safetensors")
    again = Conversations.load(tmp_path / "t.safetensors")
    assert all(torch.equal(getattr(text, name), getattr(again, name)) for name in text.__slots__)
    (tmp_path / "t.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="holds no conversations"):
        Conversations.load(tmp_path / "t.safetensors")


def test_vocabulary_is_the_most_frequent_answer_tokens() -> None:
    text = random_text()
    written = text.tokens[text.answer].tolist()
    vocabulary = choose_vocabulary(text, 10, 64, frozenset({2}))
    chosen = vocabulary.to_target.tolist()
    assert chosen == sorted(chosen)
    assert 2 in chosen, "the end token is always in"
    floor = min(written.count(token) for token in chosen if token != 2)
    assert all(written.count(token) <= floor for token in range(64) if token not in chosen)
    assert vocabulary.covered == pytest.approx(sum(written.count(token) for token in chosen) / len(written))
    tables = vocabulary.tables()
    assert (torch.arange(10) + tables["d2t"]).tolist() == chosen
    assert tables["t2d"].nonzero().flatten().tolist() == chosen
    with pytest.raises(ConfigError, match="exceeds the target's of 64"):
        choose_vocabulary(text, 65, 64)


def test_loops_are_cut_after_three_rounds() -> None:
    head, loop = [1, 2, 3, 4, 5], [7, 8, 9]
    rows = [head + loop * 10, head + loop * 10, list(range(10, 45)), [6] * 35]
    lengths = torch.tensor([35, 12, 35, 20])
    assert sane_length(torch.tensor(rows), lengths).tolist() == [len(head) + 9, 12, 35, 3]
