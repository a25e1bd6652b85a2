"""Errors say value, reason and remedy, and survive the trip between our processes."""

from __future__ import annotations

import pickle

import pytest

from ssd_ascend.errors import (
    ConfigError,
    RequestError,
    SsdError,
    TransportError,
    WorkerError,
    first_line,
    nearest,
    needs_packages,
    one_line,
    unknown_name,
)


def test_the_remedy_is_part_of_what_the_reader_sees() -> None:
    error = ConfigError("block_size is 0", remedy="give at least 1")
    assert str(error) == "block_size is 0 (give at least 1)"
    assert error.message == "block_size is 0"
    assert str(ConfigError("block_size is 0")) == "block_size is 0"


def test_a_request_error_names_the_parameter() -> None:
    error = RequestError("temperature is NaN", param="temperature", code="invalid_value")
    assert (error.param, error.code, str(error)) == ("temperature", "invalid_value", "temperature is NaN")


@pytest.mark.parametrize("kind", [ConfigError, RequestError, WorkerError, TransportError])
def test_every_error_of_ours_is_an_ssd_error(kind: type[SsdError]) -> None:
    assert issubclass(kind, SsdError)
    assert str(kind("gone")) == "gone"


def test_losing_the_line_to_a_speculator_is_losing_the_speculator() -> None:
    assert issubclass(TransportError, WorkerError)


def test_errors_cross_a_process_boundary_whole() -> None:
    sent = RequestError("n is 0", param="n", code="range", remedy="give 1 or more")
    got = pickle.loads(pickle.dumps(sent))
    assert (str(got), got.param, got.code, got.remedy) == (str(sent), "n", "range", "give 1 or more")


@pytest.mark.parametrize(("name", "guess"), [("lookahed", "lookahead"), ("LOOKAHEAD", "lookahead"), ("zzz", None)])
def test_nearest(name: str, guess: str | None) -> None:
    assert nearest(name, ["lookahead", "fan_out"]) == guess


def test_an_unknown_name_lists_the_known_and_guesses() -> None:
    error = unknown_name("drafter", "eagle", ["model", "eagle3"], where="x.toml")
    assert str(error) == "unknown drafter 'eagle' in x.toml; known: eagle3, model (did you mean 'eagle3'?)"
    assert str(unknown_name("drafter", "x", [])) == "unknown drafter 'x'; known: none"


def test_a_package_that_python_lacks_is_one_sentence_and_a_module_of_ours_is_a_fault() -> None:
    told = r"no package 'torch' \(.*make setup.*'ssd-ascend\[serve\]'"
    with pytest.raises(ConfigError, match=told), needs_packages(extra="[serve]"):
        raise ModuleNotFoundError("No module named 'torch'", name="torch")
    with pytest.raises(ModuleNotFoundError), needs_packages():
        raise ModuleNotFoundError("No module named 'ssd_ascend.x'", name="ssd_ascend.x")


@pytest.mark.parametrize(("text", "told"), [("a\nb", "a"), ("\n  a\nb", "a"), ("", "OSError"), (" \n", "OSError")])
def test_the_first_line_of_an_error_says_something(text: str, told: str) -> None:
    assert first_line(OSError(text)) == told


def test_what_is_told_is_one_line_that_can_be_read() -> None:
    assert str(ConfigError("a\nb\x1b[31m", remedy="c\rd")) == "a\\nb\\x1b[31m (c\\rd)"
    word = "".join(chr(97 + i % 26) for i in range(1000))
    assert one_line(f"{word} is long") == f"{word[:120]}...{word[-40:]} is long"
    text = " ".join(str(i) for i in range(5000))
    assert len(one_line(text)) < 2500
    assert one_line(text).startswith("0 1 2 ")
    assert one_line(text).endswith(" 4999")
    assert one_line("\u4e2d\u6587 stays") == "\u4e2d\u6587 stays"
