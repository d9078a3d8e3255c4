# SPDX-License-Identifier: Apache-2.0
"""Content coding: what real encoders make is read back, everything else is refused before it costs memory."""

from __future__ import annotations

import contextlib
import gzip
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidArgument, TooLarge
from headrace.net.http import coding
from headrace.net.http.coding import choose_coding, deflate, inflate

TEXT = b"headrace brings requests to models. " * 500


def raw_deflate(data: bytes, level: int = 6) -> bytes:
    packer = zlib.compressobj(level, zlib.DEFLATED, -15)
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize("name", [b"gzip", b"x-gzip", b" GZip "])
def test_gzip_is_inflated(name: bytes) -> None:
    assert inflate(name, gzip.compress(TEXT), len(TEXT)) == TEXT


@pytest.mark.parametrize("level", [0, 1, 6, 9])
def test_deflate_with_and_without_zlib_header(level: int) -> None:
    assert inflate(b"deflate", zlib.compress(TEXT, level), len(TEXT)) == TEXT
    assert inflate(b"deflate", raw_deflate(TEXT, level), len(TEXT)) == TEXT


@pytest.mark.parametrize("wbits", range(9, 16))
def test_every_zlib_window_size_is_recognised(wbits: int) -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, wbits)
    assert inflate(b"deflate", packer.compress(TEXT) + packer.flush(), len(TEXT)) == TEXT


@pytest.mark.parametrize("body", [TEXT, bytearray(TEXT), memoryview(TEXT)])
def test_identity_is_passed_through_within_the_limit(body: bytes) -> None:
    assert inflate(b"identity", body, len(TEXT)) == TEXT
    with pytest.raises(TooLarge):
        inflate(b"identity", body, len(TEXT) - 1)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_kind_of_buffer_can_be_inflated(kind: type) -> None:
    assert inflate(b"gzip", kind(gzip.compress(TEXT)), len(TEXT)) == TEXT


def test_an_empty_body_stays_empty() -> None:
    assert inflate(b"gzip", b"", 10) == b""


@pytest.mark.parametrize("name", [b"br", b"zstd", b"gzip, gzip", b"deflate,gzip", b"\xff"])
def test_other_codings_are_refused_with_what_is_supported(name: bytes) -> None:
    with pytest.raises(InvalidArgument, match="gzip, deflate, identity"):
        inflate(name, b"whatever", 100)


@pytest.mark.parametrize(("name", "body"), [(b"gzip", gzip.compress(TEXT, mtime=0)), (b"deflate", zlib.compress(TEXT))])
def test_exactly_the_limit_is_allowed_and_one_more_is_not(name: bytes, body: bytes) -> None:
    assert len(inflate(name, body, len(TEXT))) == len(TEXT)
    with pytest.raises(TooLarge, match=str(len(TEXT) - 1)):
        inflate(name, body, len(TEXT) - 1)
    with pytest.raises(TooLarge):
        inflate(name, body, 0)


def test_a_bomb_never_gets_more_memory_than_the_limit() -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    zeros = bytes(1 << 20)
    bomb = b"".join(packer.compress(zeros) for _ in range(64)) + packer.flush()
    limit = 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(TooLarge):
            inflate(b"gzip", bomb, limit)
        assert tracemalloc.get_traced_memory()[1] < 3 * limit
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("packed", [gzip.compress(TEXT, mtime=0), zlib.compress(TEXT), raw_deflate(TEXT)])
def test_a_truncated_body_is_refused_wherever_it_is_cut(packed: bytes) -> None:
    name = b"gzip" if packed[:2] == b"\x1f\x8b" else b"deflate"
    for end in range(1, len(packed)):
        with pytest.raises(InvalidArgument):
            inflate(name, packed[:end], len(TEXT))


@pytest.mark.parametrize("tail", [b"x", b"\0\0\0", b"\x1f\x8b", b"\x1f\x8bxxxxxxxxxxxxxxxx"])
@pytest.mark.parametrize("packed", [gzip.compress(TEXT, mtime=0), zlib.compress(TEXT), raw_deflate(TEXT)])
def test_bytes_after_the_end_are_refused(packed: bytes, tail: bytes) -> None:
    name = b"gzip" if packed[:2] == b"\x1f\x8b" else b"deflate"
    with pytest.raises(InvalidArgument):
        inflate(name, packed + tail, len(TEXT))


def test_a_wrong_checksum_is_refused() -> None:
    packed = bytearray(gzip.compress(TEXT))
    packed[-6] ^= 1
    with pytest.raises(InvalidArgument):
        inflate(b"gzip", packed, len(TEXT))


def test_gzip_members_are_joined_and_count_together() -> None:
    # Larger than the feeding window and incompressible, so that members begin inside and across windows.
    noise = b"".join(zlib.crc32(b"%d" % n).to_bytes(4, "big") for n in range(40_000))
    members = [noise, b"", b"small", noise[:70_000], b"end"]
    packed = b"".join(gzip.compress(member) for member in members)
    whole = b"".join(members)
    assert inflate(b"gzip", packed, len(whole)) == whole
    with pytest.raises(TooLarge):
        inflate(b"gzip", packed, len(whole) - 1)


def test_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coding, "_MAX_MEMBERS", 10)
    member = gzip.compress(b"x")
    assert inflate(b"gzip", member * 9, 100) == b"x" * 9
    with pytest.raises(TooLarge, match="10 members"):
        inflate(b"gzip", member * 11, 100)


def test_a_preset_dictionary_is_refused() -> None:
    packer = zlib.compressobj(6, zlib.DEFLATED, 15, zdict=TEXT[:100])
    with pytest.raises(InvalidArgument):
        inflate(b"deflate", packer.compress(TEXT) + packer.flush(), len(TEXT))


@given(
    name=st.sampled_from([b"gzip", b"deflate"]),
    body=st.binary(max_size=300),
    start=st.sampled_from([b"", b"\x1f\x8b\x08\0", b"x\x9c"]),
)
def test_any_bytes_give_a_result_or_our_error(name: bytes, body: bytes, start: bytes) -> None:
    with contextlib.suppress(InvalidArgument, TooLarge):
        assert len(inflate(name, start + body, 1000)) <= 1000


@given(pieces=st.lists(st.binary(max_size=200)))
def test_what_deflate_makes_inflate_reads(pieces: list[bytes]) -> None:
    whole = b"".join(pieces)
    for name in (b"gzip", b"deflate"):
        packed = deflate(name, [memoryview(piece) for piece in pieces])
        assert inflate(name, packed, len(whole)) == whole
    assert gzip.decompress(deflate(b"gzip", pieces)) == whole
    assert zlib.decompress(deflate(b"deflate", pieces)) == whole


def test_gzip_carries_no_time() -> None:
    assert deflate(b"gzip", [TEXT])[4:8] == bytes(4)


def test_an_unknown_response_coding_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="br"):
        deflate(b"br", [b""])


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        (b"", None),
        (b"gzip", b"gzip"),
        (b"GZIP", b"gzip"),
        (b"x-gzip", b"gzip"),
        (b"deflate", b"deflate"),
        (b"gzip, deflate, br", b"gzip"),
        (b"deflate, gzip", b"gzip"),
        (b"br", None),
        (b"br;q=1.0, gzip;q=0.8, *;q=0.1", b"gzip"),
        (b"gzip;q=0.5, deflate;q=0.9", b"deflate"),
        (b"gzip ; q=0.5 , deflate ; Q = 0.9", b"deflate"),
        (b"gzip;q=0", None),
        (b"gzip;q=0.000", None),
        (b"gzip;q=0, *", b"deflate"),
        (b"*", b"gzip"),
        (b"*;q=0", None),
        (b"*;q=0, gzip;q=0.1", b"gzip"),
        (b"identity", None),
        (b"identity;q=0", None),
        (b"identity;q=0, gzip", b"gzip"),
        (b"identity, gzip;q=0.5", None),
        (b"identity;q=0.5, gzip;q=0.5", b"gzip"),
        (b"gzip;q=1.5", None),
        (b"gzip;q=-1", None),
        (b"gzip;q=nan", None),
        (b"gzip;q=", None),
        (b"gzip;q=0.1234", None),
        (b",,;q=1,gzip", b"gzip"),
        (b"gzip;level=9", b"gzip"),
    ],
)
def test_the_response_coding_follows_accept_encoding(accept: bytes, chosen: bytes | None) -> None:
    assert choose_coding(accept) == chosen
    assert choose_coding(accept) == chosen  # again, from memory
    assert choose_coding(accept + b" " * 300) == chosen  # too long to be remembered


def test_what_is_remembered_is_bounded() -> None:
    for n in range(1000):
        choose_coding(b"gzip;x=%d" % n)
        choose_coding(b"gzip;x=%d" % n + b" " * 300)
    info = coding._choose_cached.cache_info()
    assert info.maxsize is not None
    assert info.currsize <= info.maxsize <= 1000


@given(accept=st.binary(max_size=100))
def test_any_accept_encoding_gives_a_choice(accept: bytes) -> None:
    assert choose_coding(accept) in (None, b"gzip", b"deflate")
