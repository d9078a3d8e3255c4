# SPDX-License-Identifier: Apache-2.0
"""Which version of a split gets a request: by sticky key or at random; and the labels that name versions.

A request is mapped to a point from 0 to 1. With a sticky key, the point is a hash of the model's name and the key: it is the
same in every process and after every restart, and users who get the new version of one model do not get the new version of
every other. Without a key, the point is random. The shares are laid side by side in the order of the version numbers: if
weight moves from one version to the next, only keys at the border between the two change versions.

`peek` and `take`: a request is first tried on the express path, which may decline it (`engine.express`). The random point is
then kept for the next request, which is usually the same one. Drawing again would give versions that decline often too
little traffic.

The sticky key comes from a header, a cookie or a field, whichever is found first. `sticky_key_of` is for protocols with
headers, `sticky_key_in` for requests in the engine, whose parameters may have the key. Both return the same key for the same
user.

Labels come from `version_labels` in a model's configuration, such as `1=v1.0.0,2=v1.2.0`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from headrace.core.requests import InferRequest
from headrace.engine.repository.directory import ServedModel
from headrace.engine.traffic.settings import StickyBy
from headrace.models.config.types import ModelConfig

RandomSource = Callable[[], float]
"""Returns a random number from 0 up to, but not including, 1."""

Choice = TypeVar("Choice")


class KeyHash:
    """Maps keys to points with a salted hash."""

    def __init__(self, salt: str) -> None:
        self._salted = blake2b(salt.encode() + b"\0", digest_size=8)

    def of(self, key: str) -> float:
        """Return a number from 0 up to, but not including, 1; always the same for a key."""
        hashed = self._salted.copy()
        # A client's key may contain unpaired surrogates.
        hashed.update(key.encode(errors="surrogatepass"))
        return (int.from_bytes(hashed.digest(), "big") >> 11) * 2.0**-53


class VersionChooser(Generic[Choice]):
    """Chooses by shares."""

    def __init__(self, salt: str, chance: RandomSource) -> None:
        self._points = KeyHash(salt)
        self._chance = chance
        self._drawn: float | None = None
        self._bounds: list[float] = []
        self._choices: list[Choice] = []

    def set_choices(self, choices: Sequence[tuple[float, Choice]]) -> None:
        """Replace the choices. A share of 0 is never chosen; the last choice gets what the shares lack to 1."""
        positive = [(share, choice) for share, choice in choices if share > 0]
        self._bounds = list(accumulate(share for share, _ in positive))[:-1]
        self._choices = [choice for _, choice in positive]

    def peek(self, key: str) -> Choice:
        """Return the choice for a request; without a key, the same one until `take`."""
        if key:
            point = self._points.of(key)
        else:
            drawn = self._drawn
            point = drawn if drawn is not None else self._chance()
            self._drawn = point
        return self._choices[bisect_right(self._bounds, point)]

    def take(self, key: str) -> None:
        """Confirm that the choice was used."""
        if not key:
            self._drawn = None


STICKY_KEY_PARAMETER = "sticky_key"
"""Request parameter with the sticky key, for any protocol."""


class Headers(Protocol):
    """Header fields of a request."""

    @property
    def fields(self) -> Sequence[tuple[bytes, bytes]]:
        """Lower-case names and values, in the order received."""

    def get(self, name: bytes, /) -> bytes | None:
        """Return the value of a field; None if there is none."""


def sticky_key_of(sticky: StickyBy, head: Headers, fields: Mapping[str, object]) -> str:
    """Return the sticky key of a request; "" if it has none of the configured sources."""
    if sticky.header:
        value = head.get(sticky.header.lower().encode())
        if value:
            return value.decode("latin-1").strip()
    if sticky.cookie:
        value = _cookie(head, sticky.cookie.encode())
        if value:
            return value.decode("latin-1")
    return _text(fields.get(sticky.field)) if sticky.field else ""


def sticky_key_in(request: InferRequest, sticky: StickyBy) -> str:
    """Return the sticky key of a request in the engine: its own, or from its parameters.

    Headers are parameters if the server forwards them (`--http-header-forward-pattern`).
    """
    if request.sticky_key:
        return request.sticky_key
    parameters = request.parameters
    if not parameters:
        return ""
    for name in (sticky.header.lower(), sticky.field, STICKY_KEY_PARAMETER):
        if name:
            key = _text(parameters.get(name))
            if key:
                return key
    return ""


def _text(value: object) -> str:
    return str(value) if isinstance(value, str | int | float) else ""


def _cookie(head: Headers, name: bytes) -> bytes:
    # HTTP/2 may send each cookie as a field of its own.
    for field, value in head.fields:
        if field == b"cookie":
            for pair in value.split(b";"):
                cookie, _, content = pair.strip().partition(b"=")
                if cookie == name:
                    return content.strip().strip(b'"')
    return b""


VERSION_LABELS_PARAMETER = "version_labels"


def version_labels(config: ModelConfig) -> dict[str, str]:
    """Return labels by number. Entries other than `NUMBER=LABEL` are ignored."""
    pairs = (pair.partition("=") for pair in config.parameters.get(VERSION_LABELS_PARAMETER, "").split(","))
    return {number.strip(): label.strip() for number, _, label in pairs if number.strip() and label.strip()}


def served_labels(model: ServedModel) -> dict[str, str]:
    """Return the labels of all versions that serve; on a conflict, those of the newest version."""
    labels: dict[str, str] = {}
    for version in model.versions.values():
        labels.update(version_labels(version.config))
    return labels


def version_number(version: str, labels: dict[str, str]) -> str:
    """Return the number of a version that is given as a number or a label; "" if it is neither."""
    if version.isascii() and version.isdigit():
        return str(int(version)) if len(version) < 20 else ""
    return next((number for number, label in labels.items() if label == version), "")
