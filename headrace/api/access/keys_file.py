# SPDX-License-Identifier: Apache-2.0
"""The file of API keys, YAML or JSON: read whole, written whole or not at all.

Read by `keys` and `headrace keys`; written by the latter only. Has the SHA-256 of each key, never a key.

    keys:
      - name: alice
        sha256: 1f0e...
        scopes: [infer, read]
        created: "2026-11-15T10:00:00Z"
        expires: "2026-12-15T10:00:00Z"
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import yaml

from headrace.api.access.keys import SCOPES, ApiKey
from headrace.api.access.settings import Scope
from headrace.core.errors import AlreadyExists, InvalidArgument, NotFound

_FIELDS = frozenset(("name", "sha256", "scopes", "created", "expires"))
_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
_PREFIX = "hr_"
"""So that a key in the wrong place is recognised, by people and by scanners for secrets."""


def new_key() -> str:
    """A key that nobody has: 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(32)


def create_key(path: Path, name: str, scopes: Sequence[Scope], *, created: float, expires: float | None = None) -> str:
    """Add a key to the file, which is made if it is not there; returns the key, which is kept nowhere."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(f"{name!r} is no name for a key: up to 64 letters, digits and '_.@-'")
    if not scopes:
        raise InvalidArgument(f"a key needs a scope: {', '.join(SCOPES)}")
    key = new_key()

    def change(keys: list[ApiKey]) -> list[ApiKey]:
        if any(each.name == name for each in keys):
            raise AlreadyExists(f"{path} has a key named '{name}' already: revoke it first, or choose another name")
        digest = hashlib.sha256(key.encode()).digest()
        return [*keys, ApiKey(name, digest, frozenset(scopes), created, expires)]

    _change(path, change, may_be_new=True)
    return key


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of the file. Running servers see it within a second or so of their next request."""

    def change(keys: list[ApiKey]) -> list[ApiKey]:
        left = [key for key in keys if key.name != name]
        if len(left) == len(keys):
            raise NotFound(f"{path} has no key named '{name}': `headrace keys list` shows those it has")
        return left

    _change(path, change, may_be_new=False)


def read_keys(path: Path) -> list[ApiKey]:
    """All keys of a file; what is wrong with it is told with the entry it is in."""
    try:
        text = path.read_text("utf-8")
    except FileNotFoundError:
        raise NotFound(f"{path} is not there: make it by `headrace keys create NAME --file {path}`") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidArgument(f"cannot read the API keys in {path}: {reason}") from None
    try:
        document = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # Not the error's own text: it quotes the file.
        mark = getattr(error, "problem_mark", None)
        line = mark.line + 1 if mark is not None else getattr(error, "lineno", None)
        raise InvalidArgument(f"{path}{'' if line is None else f', line {line}'}: not YAML or JSON") from None
    if document is None:
        return []
    if not isinstance(document, dict) or set(document) - {"keys"} or not isinstance(document.get("keys", []), list):
        raise InvalidArgument(f"{path}: expected one list named `keys`, and nothing beside it")
    keys = [_key_of(f"{path}: key {number}", each) for number, each in enumerate(document.get("keys", []), 1)]
    for field in ("name", "sha256"):
        if len({getattr(key, field) for key in keys}) != len(keys):
            raise InvalidArgument(f"{path}: two keys have the same {field}")
    return keys


def _key_of(place: str, entry: Any) -> ApiKey:
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{place}: expected {', '.join(sorted(_FIELDS))}")
    # A misspelt `expires` must not become a key for ever.
    unknown = sorted(str(field) for field in set(entry) - _FIELDS)
    if unknown:
        raise InvalidArgument(f"{place}: unknown field '{unknown[0][:64]}': there are {', '.join(sorted(_FIELDS))}")
    name, digest, scopes = entry.get("name"), entry.get("sha256"), entry.get("scopes")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidArgument(f"{place}: `name` is up to 64 letters, digits and '_.@-'")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest.lower()):
        raise InvalidArgument(f"{place} ({name}): `sha256` is the key's SHA-256, 64 hexadecimal digits")
    if not isinstance(scopes, list) or not scopes or not all(scope in SCOPES for scope in scopes):
        raise InvalidArgument(f"{place} ({name}): `scopes` is a list of {', '.join(SCOPES)}")
    created, expires = (_time_of(f"{place} ({name}): `{field}`", entry.get(field)) for field in ("created", "expires"))
    return ApiKey(name, bytes.fromhex(digest), frozenset(cast("list[Scope]", scopes)), created, expires)


def _time_of(place: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    if not isinstance(value, datetime):
        raise InvalidArgument(f'{place} is a time such as "2026-12-15T10:00:00Z"')
    return (value if value.tzinfo is not None else value.replace(tzinfo=UTC)).timestamp()


def _change(path: Path, change: Callable[[list[ApiKey]], list[ApiKey]], *, may_be_new: bool) -> None:
    # Behind a link, where the file is: what is replaced is the file and not the link.
    path = path.resolve()
    with _alone(path):
        keys = [] if may_be_new and not path.exists() else read_keys(path)
        _write(path, _document(change(keys)))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Nobody else changes a file of this folder: two changes at once would undo one of them."""
    try:
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}") from None
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _document(keys: list[ApiKey]) -> dict[str, Any]:
    entries = []
    for key in keys:
        entry: dict[str, Any] = {"name": key.name, "sha256": key.sha256.hex()}
        entry["scopes"] = [scope for scope in SCOPES if scope in key.scopes]
        for field, time in (("created", key.created), ("expires", key.expires)):
            if time is not None:
                entry[field] = time_text(time)
        entries.append(entry)
    return {"keys": entries}


def time_text(time: float) -> str:
    """Seconds since 1970 as people and the file write them."""
    return datetime.fromtimestamp(int(time), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _write(path: Path, document: dict[str, Any]) -> None:
    text = json.dumps(document, indent=2) if path.suffix == ".json" else yaml.safe_dump(document, sort_keys=False)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        target = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(target, "w", encoding="utf-8") as stream:
                if path.exists() and os.geteuid() == 0:
                    # The server that reads it need not be root's.
                    owner = path.stat()
                    os.fchown(stream.fileno(), owner.st_uid, owner.st_gid)
                stream.write(text.rstrip() + "\n")
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InvalidArgument(f"cannot write {path}: {error.strerror}; it is as it was") from None
