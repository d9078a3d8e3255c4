# SPDX-License-Identifier: Apache-2.0
"""Unary calls by grpcio: messages, metadata, status, compression, sizes."""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Iterator

import grpc
import pytest
from grpc_echo_client import SECONDS, aio_channel, channel_to, collect, expand, raised, unary
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.errors import INTERNAL_TEXT, InvalidArgument, Unavailable
from headrace.core.limits import Limits
from headrace.net.grpc.call import GrpcCall
from headrace.net.grpc.services import Services
from headrace.net.grpc.status import Status
from headrace.net.http.heads import Buffer
from headrace.net.site import Site
from support.serving import Serving, echo_site, serving

MB = 1_000_000


@pytest.mark.parametrize("size", [0, 1, 5, 1023, 1024, 16_384, 65_531, 65_536, 300_000])
def test_a_message_is_returned(channel: grpc.Channel, size: int) -> None:
    message = os.urandom(size)
    assert unary(channel)(message, timeout=SECONDS) == message


def test_twenty_megabytes_in_both_directions(channel: grpc.Channel) -> None:
    message = os.urandom(20 * MB)
    assert unary(channel)(message, timeout=3 * SECONDS) == message


async def _aio_round(server: Serving) -> list[bytes]:
    async with aio_channel(server) as channel:
        return [await unary(channel)(b"%d" % number, timeout=SECONDS) for number in range(5)]


def test_the_aio_client_is_served(server: Serving) -> None:
    assert asyncio.run(_aio_round(server)) == [b"0", b"1", b"2", b"3", b"4"]


def test_many_calls_share_a_channel_and_get_their_own_answers(channel: grpc.Channel) -> None:
    futures = [unary(channel).future(b"call %d" % number, timeout=SECONDS) for number in range(500)]
    assert [future.result() for future in futures] == [b"call %d" % number for number in range(500)]


# Metadata.


def test_spaces_around_metadata_are_stripped_as_grpcio_does(channel: grpc.Channel) -> None:
    sent = [("x-padded", " a b "), ("x-plain", "a")]
    _, call = unary(channel, "Metadata").with_call(b"m", metadata=sent, timeout=SECONDS)
    back = dict(call.initial_metadata())
    assert (back["x-padded"], back["x-plain"]) == ("a b", "a")


def test_metadata_in_both_directions(channel: grpc.Channel) -> None:
    sent = (
        ("x-text", "plain text, with a comma"),
        ("x-twice", "one"),
        ("x-twice", "two"),
        ("x-empty", ""),
        ("x-raw-bin", bytes(range(256))),
        ("x-none-bin", b""),
        ("x-odd-bin", b"\xff"),
    )
    _, call = unary(channel, "Metadata").with_call(b"m", metadata=sent, timeout=SECONDS)
    initial = [(key, value) for key, value in call.initial_metadata() if key.startswith("x-")]
    assert sorted(initial) == sorted([*sent, ("x-first", "initial")])
    trailing = dict(call.trailing_metadata())
    assert trailing["x-last"] == "trailing"
    assert trailing["x-last-bin"] == b"\x00\xff"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["x-a-bin", "x-b-bin", "x-c-bin"]), st.binary(max_size=64)), max_size=8))
def test_any_binary_metadata_is_returned(server: Serving, pairs: list[tuple[str, bytes]]) -> None:
    with channel_to(server) as channel:
        _, call = unary(channel, "Metadata").with_call(b"", metadata=pairs, timeout=SECONDS)
        assert sorted(pair for pair in call.initial_metadata() if pair[0] in dict(pairs)) == sorted(pairs)


# Status.


def test_an_error_carries_its_status_and_its_text(channel: grpc.Channel) -> None:
    error = raised(lambda: unary(channel, "Refuse")(b"", timeout=SECONDS))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "not like that: 100% wrong, naïve"


def test_details_travel_as_bytes(channel: grpc.Channel) -> None:
    details = bytes(range(256))
    error = raised(lambda: unary(channel, "Details")(details, timeout=SECONDS))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert error.details() == "see the details"
    assert dict(error.trailing_metadata())["grpc-status-details-bin"] == details


def test_an_exception_is_internal_and_keeps_its_text_to_the_log(
    channel: grpc.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR, "headrace.wire"):
        error = raised(lambda: unary(channel, "Raise")(b"", timeout=SECONDS))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert error.details() == INTERNAL_TEXT
    assert "secret" not in str(error.trailing_metadata())
    (record,) = caplog.records
    assert record.exc_info is not None
    assert "secret" in str(record.exc_info[1])
    assert record.method == "/test.Echo/Raise"  # type: ignore[attr-defined]
    # The id by which the caller's complaint is found in the log.
    assert dict(error.trailing_metadata())["x-request-id"] == record.request_id  # type: ignore[attr-defined]


def test_a_callers_own_request_id_is_kept_if_it_is_fit_for_a_log(channel: grpc.Channel) -> None:
    for own, kept in (("abc-123", True), ("a b", False), ("x" * 129, False)):
        call = unary(channel, "Raise")
        error = raised(lambda call=call, own=own: call(b"", metadata=[("x-request-id", own)], timeout=SECONDS))
        assert (dict(error.trailing_metadata())["x-request-id"] == own) == kept


@pytest.mark.parametrize(
    "method", ["/test.Echo/Nope", "/test.Nope/Unary", "/nope", "/test.Echo/Unary/", "//", "/" + "x" * 4000]
)
def test_an_unknown_method_is_unimplemented(channel: grpc.Channel, method: str) -> None:
    error = raised(lambda: channel.unary_unary(method)(b"", timeout=SECONDS))
    assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method[:200] in error.details()


TEXTS = {
    "plain": "plain",
    "percent": "100% %41 %zz",
    "quotes": "\"'\\",
    "controls": "a\x00b\nc\rd\te\x7f",
    "latin": "naïve café",
    "wide": "日本語 🚰",
    "long": "x" * 4000,
    "longer": "y" * 100_000,
    "long and wide": "🚰" * 100_000,
    "surrogate": "half \ud800 of a pair",
}


class StatusService:
    """A service that answers every status, with every text."""

    def site(self) -> Site:
        services = Services()
        services.unary("test.Say", "Status", self.status)
        services.streaming("test.Say", "Stream", self.stream)
        services.unary("test.Say", "Trailers", self.trailers)
        services.unary("test.Say", "Nothing", lambda call, message: call.finish())
        services.unary("test.Say", "Busy", self.busy)
        services.unary("test.Say", "Twice", self.twice)
        return Site(services=services)

    def status(self, call: GrpcCall, message: Buffer) -> None:
        code, name = bytes(message).decode().split(",")
        call.finish(Status(int(code)), TEXTS[name])

    def stream(self, call: GrpcCall) -> None:
        call.send(b"first")
        call.on_half_close = lambda: call.fail(InvalidArgument("after the first"))

    def trailers(self, call: GrpcCall, message: Buffer) -> None:
        call.set_initial_metadata([("x-first", "1")])
        call.set_trailing_metadata([("x-last", "2")])
        call.details = b"details"
        call.fail(InvalidArgument("with trailers"))

    def busy(self, call: GrpcCall, message: Buffer) -> None:
        raise Unavailable("come again", retry_after_seconds=2.2)

    def twice(self, call: GrpcCall, message: Buffer) -> None:
        call.reply(b"first")
        call.reply(b"second")
        call.finish(Status.ABORTED, "too late")
        call.fail(RuntimeError("too late"))


@pytest.fixture(scope="module")
def status_server() -> Iterator[Serving]:
    with serving(StatusService().site) as running:
        yield running


@pytest.mark.parametrize("status", [status for status in Status if status is not Status.OK])
def test_every_status_arrives(status_server: Serving, status: Status) -> None:
    with channel_to(status_server) as channel:
        error = raised(lambda: channel.unary_unary("/test.Say/Status")(b"%d,plain" % status, timeout=SECONDS))
    assert error.code().value[0] == status
    assert error.code().name == status.name
    assert error.details() == "plain"


@pytest.mark.parametrize("name", TEXTS)
def test_every_text_arrives(status_server: Serving, name: str) -> None:
    """Long ones are cut, so that they stay inside the 8 KiB of metadata that grpcio takes."""
    with channel_to(status_server) as channel:
        error = raised(lambda: channel.unary_unary("/test.Say/Status")(b"9,%b" % name.encode(), timeout=SECONDS))
    assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
    text = TEXTS[name].replace("\ud800", "?")
    assert text.startswith(error.details())
    assert len(error.details()) >= min(len(text), 300)
    assert len(text) > 4000 or error.details() == text


def test_a_status_after_messages_carries_its_text(status_server: Serving) -> None:
    with channel_to(status_server) as channel:
        responses = channel.unary_stream("/test.Say/Stream")(b"", timeout=SECONDS)
        assert next(responses) == b"first"
        error = raised(lambda: responses)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "after the first"


def test_an_error_without_messages_carries_all_metadata(status_server: Serving) -> None:
    with channel_to(status_server) as channel:
        error = raised(lambda: channel.unary_unary("/test.Say/Trailers")(b"", timeout=SECONDS))
    # A response of one header block has trailing metadata only.
    trailing = dict(error.trailing_metadata())
    assert trailing["x-last"] == "2"
    assert trailing["x-first"] == "1"
    assert trailing["grpc-status-details-bin"] == b"details"


def test_an_error_has_a_retry_time(status_server: Serving) -> None:
    with channel_to(status_server) as channel:
        error = raised(lambda: channel.unary_unary("/test.Say/Busy")(b"", timeout=SECONDS))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert dict(error.trailing_metadata())["retry-after"] == "3", "in whole seconds, rounded up"


def test_only_the_first_answer_counts(status_server: Serving) -> None:
    with channel_to(status_server) as channel:
        assert channel.unary_unary("/test.Say/Twice")(b"", timeout=SECONDS) == b"first"
        assert channel.unary_unary("/test.Say/Twice")(b"", timeout=SECONDS) == b"first"


# Compression.


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
@pytest.mark.parametrize("size", [0, 10, 2000, 3 * MB])
def test_a_compressed_message_is_returned(server: Serving, compression: grpc.Compression, size: int) -> None:
    message = (b"the same again and again " * (size // 20 + 1))[:size]
    with channel_to(server, compression=compression) as channel:
        assert unary(channel)(message, timeout=SECONDS) == message
        pieces = list(expand(channel)(b"3 5000", timeout=SECONDS))
    assert [len(piece) for piece in pieces] == [5004] * 3


def test_one_call_of_a_plain_channel_may_be_compressed(channel: grpc.Channel) -> None:
    message = b"a" * 100_000
    for compression in (grpc.Compression.Gzip, None, grpc.Compression.Deflate, grpc.Compression.NoCompression):
        assert unary(channel)(message, compression=compression, timeout=SECONDS) == message


# Sizes.


@pytest.fixture(scope="module")
def strict() -> Iterator[Serving]:
    with serving(echo_site(Limits(message_bytes=100_000))) as running:
        yield running


@pytest.mark.parametrize("size", [100_001, 120_000, 5 * MB])
def test_a_message_over_the_limit_is_refused(strict: Serving, size: int) -> None:
    with channel_to(strict) as channel:
        error = raised(lambda: unary(channel)(bytes(size), timeout=SECONDS))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == f"Received message larger than max ({size} vs. 100000)"
        assert unary(channel)(bytes(100_000), timeout=SECONDS) == bytes(100_000)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_a_bomb_is_refused(strict: Serving, compression: grpc.Compression) -> None:
    with channel_to(strict, compression=compression) as channel:
        bomb = bytes(20 * MB)
        assert len(zlib.compress(bomb)) < 100_000
        error = raised(lambda: unary(channel)(bomb, timeout=SECONDS))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "100000" in error.details()
        assert unary(channel)(bytes(100_000), timeout=SECONDS) == bytes(100_000)


def test_a_unary_call_has_exactly_one_message(channel: grpc.Channel) -> None:
    method = collect(channel, "Unary")
    for messages in ([], [b"one", b"two"], [b""] * 100):
        error = raised(lambda messages=messages: method(iter(messages), timeout=SECONDS))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
    assert method(iter([b"one"]), timeout=SECONDS) == b"one"
