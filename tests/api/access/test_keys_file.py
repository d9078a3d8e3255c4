# SPDX-License-Identifier: Apache-2.0
"""The file of keys: what is written is read, and a broken one says where it is broken."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import threading
from pathlib import Path

import pytest

from headrace.api.access.api_keys import create_key, read_keys, revoke_key, set_tenant
from headrace.core.errors import AlreadyExists, HeadraceError, InvalidArgument, NotFound

DIGEST = "ab" * 32


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_what_is_made_is_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    key = create_key(path, "alice", ["infer", "read"], created=1000.0, expires=2000.0)
    other = create_key(path, "bob", ["admin"], created=1000.0)
    alice, bob = read_keys(path)
    assert (alice.name, alice.scopes, alice.created, alice.expires) == ("alice", {"infer", "read"}, 1000.0, 2000.0)
    assert alice.sha256 == hashlib.sha256(key.encode()).digest()
    assert (bob.name, bob.scopes, bob.expires) == ("bob", {"admin"}, None)
    assert key != other
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == [name]


@pytest.mark.parametrize("name", ["keys.yaml", "keys.json"])
def test_what_a_router_goes_by(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    create_key(path, "alice", ["infer"], created=0, tenant={"share": 0.5, "prompt_tokens_per_minute": 100})
    create_key(path, "bob", ["infer"], created=0)
    set_tenant(path, "alice", {"priority": -3, "output_tokens_per_minute": 10**9})
    alice, bob = read_keys(path)
    assert (alice.share, alice.priority) == (0.5, -3)
    assert (alice.prompt_tokens_per_minute, alice.output_tokens_per_minute) == (100, 10**9)
    assert (bob.share, bob.priority, bob.prompt_tokens_per_minute, bob.output_tokens_per_minute) == (1.0, 0, 0, 0)
    assert path.read_text().count("share") == path.read_text().count("priority") == 1  # what is as usual is not written
    with pytest.raises(NotFound, match="no key named 'carol'"):
        set_tenant(path, "carol", {"share": 2})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("share", 0),
        ("share", -1.0),
        ("share", 1e9),
        ("share", float("nan")),
        ("share", True),
        ("priority", 1.5),
        ("priority", 101),
        ("prompt_tokens_per_minute", -1),
        ("output_tokens_per_minute", "many"),
    ],
)
def test_what_a_router_cannot_go_by(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "keys.yaml"
    create_key(path, "alice", ["infer"], created=0)
    before = path.read_text()
    with pytest.raises(InvalidArgument, match=f"key 'alice': `{field}` is a"):
        set_tenant(path, "alice", {field: value})  # type: ignore[dict-item]
    assert path.read_text() == before
    path.write_text(before + f"  {field}: {json.dumps(value).replace('NaN', '.nan')}\n")
    with pytest.raises(InvalidArgument, match=rf"keys.yaml: key 1 \(alice\): `{field}` is a"):
        read_keys(path)


def test_a_key_has_256_random_bits(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.yaml", "a", ["infer"], created=0)
    assert key.startswith("hr_")
    assert len(key) == 3 + 43  # 256 bits in base64


def test_revoking(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    create_key(path, "alice", ["infer"], created=0)
    create_key(path, "bob", ["infer"], created=0)
    revoke_key(path, "alice")
    assert [key.name for key in read_keys(path)] == ["bob"]
    with pytest.raises(NotFound, match="no key named 'alice'"):
        revoke_key(path, "alice")
    revoke_key(path, "bob")
    assert read_keys(path) == []


def test_a_name_is_used_once_and_is_plain(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    create_key(path, "alice", ["infer"], created=0)
    before = path.read_text()
    with pytest.raises(AlreadyExists, match="revoke it first"):
        create_key(path, "alice", ["read"], created=0)
    for name in ("", "a b", "a\n", "x" * 65, "../a"):
        with pytest.raises(InvalidArgument, match="not a valid name for a key"):
            create_key(path, name, ["infer"], created=0)
    assert path.read_text() == before


def test_a_link_to_the_file_stays_one(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    real = tmp_path / "real/keys.yaml"
    create_key(real, "alice", ["infer"], created=0)
    link = tmp_path / "keys.yaml"
    link.symlink_to(real)
    create_key(link, "bob", ["infer"], created=0)
    assert link.is_symlink()
    assert [key.name for key in read_keys(real)] == ["alice", "bob"]


def test_a_file_that_cannot_be_written_is_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.yaml"
    create_key(path, "alice", ["infer"], created=0)
    before = path.read_text()

    def full(_file: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(InvalidArgument, match="No space left on device; it is unchanged"):
        create_key(path, "bob", ["infer"], created=0)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["keys.yaml"]


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    create_key(path, "first", ["infer"], created=0)
    threads = [
        threading.Thread(target=create_key, args=(path, f"k{number}", ["infer"]), kwargs={"created": 0})
        for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(path)} == {"first", *(f"k{number}" for number in range(8))}


def entry(**changes: object) -> dict[str, object]:
    return {"name": "a", "sha256": DIGEST, "scopes": ["infer"]} | changes


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "one list named `keys`"),
        ({"kees": []}, "one list named `keys`"),
        ({"keys": {}}, "one list named `keys`"),
        ({"keys": ["a"]}, "key 1: expected created, expires, name"),
        ({"keys": [entry(expire="2027-01-01")]}, "key 1: unknown field 'expire'"),
        ({"keys": [entry(), entry(name=3)]}, "key 2: `name`"),
        ({"keys": [entry(sha256="hr_plain")]}, "64 hexadecimal digits"),
        ({"keys": [entry(scopes=["root"])]}, "a list of infer, read, admin"),
        ({"keys": [entry(scopes=[])]}, "a list of infer, read, admin"),
        ({"keys": [entry(scopes="infer")]}, "a list of infer, read, admin"),
        ({"keys": [entry(expires="soon")]}, "`expires` must be a time"),
        ({"keys": [entry(expires=17)]}, "`expires` must be a time"),
        ({"keys": [entry(), entry(sha256="cd" * 32)]}, "two keys have the same name"),
        ({"keys": [entry(), entry(name="b")]}, "two keys have the same sha256"),
    ],
)
def test_a_broken_file_names_the_position(tmp_path: Path, document: object, complaint: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps(document))
    with pytest.raises(InvalidArgument, match=complaint):
        read_keys(path)


def test_text_that_is_not_a_document(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    with pytest.raises(NotFound, match="headrace keys create"):
        read_keys(path)
    path.write_text("")
    assert read_keys(path) == []
    path.write_text("keys:\n  - name: [\n")
    with pytest.raises(InvalidArgument, match=r"line \d: not YAML or JSON"):
        read_keys(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(InvalidArgument, match="not UTF-8"):
        read_keys(path)
    path.write_text("[" * 20000)
    with pytest.raises(HeadraceError):
        read_keys(path)


def test_times_as_yaml_has_them(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(
        f"keys:\n- {{name: a, sha256: {DIGEST}, scopes: [infer], created: 1970-01-01T00:00:10Z,"
        " expires: '1970-01-01T01:00:20+01:00'}\n"
    )
    (key,) = read_keys(path)
    assert (key.created, key.expires) == (10.0, 20.0)
