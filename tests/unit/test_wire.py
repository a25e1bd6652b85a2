"""The wire: every message survives the journey, and nothing that is no message gets through or breaks anything."""

from __future__ import annotations

import dataclasses
import struct
import zlib

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ssd_ascend.core.sampling import SamplingParams
from ssd_ascend.errors import TransportError
from ssd_ascend.transport import frame
from ssd_ascend.transport.messages import Answer, Attach, Hello, Message, Refusal, Request, Shutdown
from ssd_ascend.transport.wire import decode, encode
from tests.unit.plain_messages import answer, request, same
from tests.unit.transport_messages import messages

ATTACH = Attach(
    seq_id=3,
    token_ids=[5, 6, 7],
    num_prompt_tokens=2,
    sampling=SamplingParams(temperature=0.7, logit_bias={4: -1.5}, stop=("\n\n", "端"), max_tokens=9),
    seed=(1 << 64) - 1,
    stop_ids=frozenset({2, 9}),
    features=torch.arange(8, dtype=torch.bfloat16).view(2, 4),
)
SAMPLES: list[Message] = [
    Hello(
        version=1,
        target_vocab=100,
        draft_vocab=3,
        feature_width=8,
        lookahead=5,
        drafter="eagle3",
        to_target=torch.tensor([4, 99, 0]),
    ),
    dataclasses.replace(request(), released=[1, 2], attaches=[ATTACH]),
    answer(payload_bytes=64),
    Shutdown(),
]


def resealed(data: bytearray) -> bytearray:
    """Make both checksums true again, as a peer that means harm would; lets nonsense through to the checks behind."""
    words, floats, text = struct.unpack_from("=III", data, 16)
    struct.pack_into("=I", data, 28, zlib.crc32(data[40 : 40 + 8 * (words + floats) + text]))
    struct.pack_into("=I", data, 32, zlib.crc32(data[:32]))
    return data


def refused(buffer: bytearray, match: str | None = None) -> None:
    with pytest.raises(TransportError, match=match):
        decode(buffer)


@settings(deadline=None, max_examples=150)
@given(messages)
@example(SAMPLES[0])
@example(SAMPLES[1])
def test_every_message_comes_back_as_it_left(message: Message) -> None:
    assert same(decode(encode(message)), message)


@given(messages)
@settings(deadline=None, max_examples=30)
def test_the_same_message_has_the_same_bytes(message: Message) -> None:
    assert encode(message) == encode(message)


def test_a_decoded_tensor_is_a_view_and_a_sent_one_is_not_aliased() -> None:
    sent = answer(payload_bytes=64)
    buffer = encode(sent)
    got = decode(buffer)
    assert isinstance(got, Answer)
    assert got.law is not None
    assert sent.law is not None
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    end = start + len(buffer)
    assert start <= got.law.data_ptr() < end
    assert not start <= sent.law.data_ptr() < end
    assert got.law.data_ptr() % 8 == 0


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_every_truncation_is_refused(message: Message) -> None:
    data = encode(message)
    for size in range(len(data)):
        refused(bytearray(data[:size]), "truncated")


@pytest.mark.parametrize("message", SAMPLES, ids=lambda m: type(m).__name__)
def test_every_flipped_bit_of_header_and_control_is_noticed(message: Message) -> None:
    data = encode(message)
    words, floats, text = struct.unpack_from("=III", data, 16)
    steering = [*range(36), *range(40, 40 + 8 * (words + floats) + text)]
    for at in steering:
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        refused(bytearray(damaged))


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(SAMPLES), st.data())
def test_nonsense_with_true_checksums_is_refused_or_read_but_never_breaks_anything(
    message: Message, data: st.DataObject
) -> None:
    damaged = encode(message)
    for _ in range(data.draw(st.integers(1, 4))):
        if data.draw(st.booleans()) and len(damaged) > 48:
            word = 40 + 8 * data.draw(st.integers(0, (len(damaged) - 48) // 8))
            value = data.draw(st.sampled_from([-1, 0, 1, 2, 1 << 31, 1 << 40, (1 << 63) - 1, -(1 << 63)]))
            struct.pack_into("=q", damaged, word, value)
        else:
            damaged[data.draw(st.integers(6, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        got = decode(resealed(damaged))
    except TransportError:
        return
    assert isinstance(got, (Hello, Request, Answer, Shutdown, Refusal))


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused(data: bytes) -> None:
    refused(bytearray(data))


def test_header_errors_name_what_they_saw() -> None:
    data = encode(SAMPLES[1])
    refused(bytearray(b"HTTP/1.1 400 Bad Request" + bytes(40)), "bad magic 0x")
    other = bytearray(data)
    struct.pack_into("=H", other, 4, 77)
    refused(resealed(other), "wire version 77 from the other side, 1 here")
    kind = encode(Shutdown())
    struct.pack_into("=H", kind, 6, 9)
    refused(resealed(kind), "message kind 9")
    huge = bytearray(data)
    struct.pack_into("=Q", huge, 8, 1 << 60)
    refused(resealed(huge), f"frame of {1 << 60} bytes")
    words = bytearray(data)
    struct.pack_into("=I", words, 16, 1 << 25)
    struct.pack_into("=I", words, 32, zlib.crc32(words[:32]))
    refused(bytearray(words), f"{1 << 25} words")
    longer = encode(Shutdown()) + bytes(8)
    struct.pack_into("=Q", longer, 8, len(longer))
    refused(resealed(longer), "longer than its contents")


def test_a_length_that_lies_allocates_nothing() -> None:
    data = encode(SAMPLES[2])
    for word in range((len(data) - 40) // 8):
        damaged = bytearray(data)
        struct.pack_into("=q", damaged, 40 + 8 * word, 1 << 62)
        try:
            got = decode(resealed(damaged))
        except TransportError:
            continue
        assert isinstance(got, Answer)
        assert sum(map(len, got.drafts)) + (got.law.numel() if got.law is not None else 0) < len(data)


def with_answer(**changes: object) -> bytearray:
    return encode(dataclasses.replace(answer(rows=2, payload_bytes=64), **changes))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"drafts": [[1, -4], [1, 2]]}, "drafts holds -4"),
        ({"drafts": [[1, 2]]}, "rows"),
        ({"drafts": [[1, 2]] * 3}, "rows"),
        ({"drafts": [[1, 2, 3], [1]]}, r"rows of \[3\] drafts"),
        ({"sources": [5, 0]}, "sources holds 5"),
        ({"seq_ids": [1, -2]}, "seq_ids holds -2"),
        ({"has_law": [True, True]}, "shape of law"),
        ({"has_law": [False, False]}, "shape of law"),
        ({"law": None}, "was not sent"),
        ({"law": torch.full((1, 2, 3), torch.nan)}, "NaN"),
        ({"law": torch.full((1, 2, 3), torch.inf)}, r"\+inf"),
        ({"law": torch.full((1, 2, 3), -torch.inf)}, "no token at all"),
        ({"law": torch.empty(1, 2, 0)}, "a law of shape"),
        ({"law": torch.zeros(1, 2, 3, dtype=torch.int64)}, "law is torch.int64"),
        ({"number": -1}, "answer number has -1"),
    ],
)
def test_an_answer_that_cannot_be_is_refused(changes: dict[str, object], complaint: str) -> None:
    refused(with_answer(**changes), complaint)


def test_only_used_positions_of_a_law_must_be_sound() -> None:
    law = torch.zeros(1, 2, 3)
    law[0, 1] = torch.nan
    assert isinstance(decode(with_answer(drafts=[[1], [1, 2]], law=law)), Answer)
    refused(with_answer(drafts=[[1, 2], [1, 2]], law=law), "NaN")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"token_ids": []}, "0 tokens"),
        ({"token_ids": [5, -1, 7]}, "token_ids holds -1"),
        ({"num_prompt_tokens": 4}, "4 of them its prompt"),
        ({"features": torch.zeros(3, 4)}, "shape of features"),
        ({"features": torch.zeros(2, 4, dtype=torch.int64)}, "features is torch.int64"),
    ],
)
def test_a_sequence_that_cannot_be_is_refused(changes: dict[str, object], complaint: str) -> None:
    refused(encode(Request(number=1, attaches=[dataclasses.replace(ATTACH, **changes)])), complaint)


@pytest.mark.parametrize(("name", "value"), [("temperature", float("nan")), ("top_p", 0.0), ("n", 0), ("top_k", -7)])
def test_sampling_parameters_are_checked_on_arrival(name: str, value: float) -> None:
    sampling = SamplingParams()
    object.__setattr__(sampling, name, value)
    buffer = encode(Request(number=1, attaches=[dataclasses.replace(ATTACH, sampling=sampling)]))
    refused(buffer, f"sampling parameters: {name}")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"target_vocab": 0}, "target_vocab has 0"),
        ({"to_target": torch.tensor([4, 100, 0])}, "to_target holds 100"),
        ({"draft_vocab": 4}, "shape of to_target"),
        ({"drafter": "x" * 300}, "drafter has 300"),
    ],
)
def test_a_hello_that_cannot_be_is_refused(changes: dict[str, object], complaint: str) -> None:
    refused(encode(dataclasses.replace(SAMPLES[0], **changes)), complaint)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        (Request(number=1 << 63), "no int64"),
        (Request(number=1, released=[1.5]), "no int64"),
        (dataclasses.replace(answer(), law=torch.zeros(1, 2, 3, dtype=torch.float64)), "cannot travel"),
    ],
)
def test_what_cannot_travel_is_refused_before_it_leaves(message: Message, complaint: str) -> None:
    with pytest.raises(TransportError, match=complaint):
        encode(message)


def test_both_sides_keep_to_a_limit() -> None:
    big = answer(payload_bytes=4096)
    with pytest.raises(TransportError, match="limit is 1024"):
        encode(big, limit=1024)
    with pytest.raises(TransportError, match="expected 40 to 1024"):
        decode(encode(big), limit=1024)
    assert frame.total_bytes(encode(big)[:40]) == len(encode(big))
