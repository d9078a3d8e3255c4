# SPDX-License-Identifier: Apache-2.0
"""Objects of a store, as local files: whole or not at all, and never outside of the folder."""

from __future__ import annotations

import copy
import json
import logging
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from store_stub import SECRET, StoreStub

from headrace.core.errors import Cancelled, InvalidArgument, NotFound, PermissionDenied, Unavailable
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import ObjectLocation, parse_location
from headrace.models.storage.object_stores import Listing, ObjectLimits, ObjectSource

OBJECTS = {
    "models/m/config.json": b"{}",
    "models/m/": b"",
    "models/m/1/": b"",
    "models/m/1/model.bin": b"x" * 100_000,
    "models/m/a b#?%ü.txt": b"odd",
    "models/m2/other": b"not this",
    "top": b"1",
}
QUICK = ObjectLimits(idle_seconds=30, retry_seconds=0.1)


@pytest.fixture
def store() -> Iterator[StoreStub]:
    with StoreStub({"bkt": dict(OBJECTS)}) as stub:
        yield stub


def source(store: StoreStub, url: str, limits: ObjectLimits = QUICK) -> ObjectSource:
    place = parse_location(url)
    assert isinstance(place, ObjectLocation)
    return ObjectSource(place, CloudCredentials.from_metadata(store.metadata("bkt")), limits)


def files_in(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_prefix_is_a_folder(store: StoreStub, tmp_path: Path) -> None:
    result = source(store, "s3://bkt/models/m/")
    listing = result.read_listing()
    received: list[int] = []
    lock = threading.Lock()

    def on_bytes(size: int) -> None:
        with lock:
            received.append(size)

    result.download(listing, tmp_path, on_bytes)
    wanted = {
        key.removeprefix("models/m/"): body for key, body in OBJECTS.items() if key.startswith("models/m/") and body
    }
    assert files_in(tmp_path) == wanted
    assert not listing.is_file
    assert listing.size == sum(received) == sum(map(len, wanted.values()))


def test_a_key_is_a_file(store: StoreStub, tmp_path: Path) -> None:
    result = source(store, "aws://bkt/models/m/config.json")
    listing = result.read_listing()
    result.download(listing, tmp_path)
    assert listing.is_file
    assert files_in(tmp_path) == {"config.json": b"{}"}


def test_a_listing_changes_when_its_content_does(store: StoreStub) -> None:
    before = source(store, "s3://bkt/models/m").read_listing().digest
    assert source(store, "s3://bkt/models/m").read_listing().digest == before
    store.buckets["bkt"]["models/m/config.json"] = b"[]"
    assert source(store, "s3://bkt/models/m").read_listing().digest != before


def test_google_is_read_the_same_way(tmp_path: Path) -> None:
    with StoreStub({"bkt": dict(OBJECTS)}, signed=False) as store:
        account = {
            "gcs_base_url": store.url(""),
            "disable_oauth": True,
            "client_email": "",
            "private_key": "",
            "private_key_id": "",
        }
        metadata = {"gcp": {"bkt": {"secret_key": json.dumps(account), "endpoint_url": store.url("")}}}
        source = ObjectSource(
            ObjectLocation("gcp", "bkt", "models/m2"), CloudCredentials.from_metadata(metadata), QUICK
        )
        source.download(source.read_listing(), tmp_path)
    assert files_in(tmp_path) == {"other": b"not this"}


@pytest.mark.parametrize("url", ["s3://bkt/none", "s3://bkt/models/m/config", "s3://bkt/mod"])
def test_missing_objects_are_reported(url: str, store: StoreStub) -> None:
    with pytest.raises(NotFound, match=url):
        source(store, url).read_listing()


def test_keys_of_another_bucket_are_not_tried(store: StoreStub) -> None:
    store.buckets["theirs"] = {"a": b"secret"}
    with pytest.raises(PermissionDenied, match="no credentials for the aws bucket theirs"):
        source(store, "s3://theirs/a")
    assert store.seen == []


def test_wrong_keys_are_reported_and_not_shown(store: StoreStub, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    metadata = copy.deepcopy(store.metadata("bkt"))
    metadata["aws"]["bkt"]["secret_key"] = "wr0ng-s3cr3t"
    credentials = CloudCredentials.from_metadata(metadata)
    with pytest.raises(PermissionDenied, match="may not be read with these credentials") as caught:
        ObjectSource(ObjectLocation("aws", "bkt", "top"), credentials, QUICK).read_listing()
    assert "wr0ng" not in caught.value.message + caplog.text + repr(credentials)
    assert SECRET not in repr(CloudCredentials.from_metadata(store.metadata("bkt")).keys_of("aws", "bkt"))


def test_the_environment_does_not_mix_with_given_keys(
    store: StoreStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"):
        monkeypatch.setenv(name, "http://127.0.0.1:1/")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-someone-else")
    monkeypatch.setenv("AWS_REGION", "eu-north-1")
    result = source(store, "s3://bkt/top")
    result.download(result.read_listing(), tmp_path)
    assert files_in(tmp_path) == {"top": b"1"}
    assert not any("of-someone-else" in str(headers) for _, headers in store.seen)


@pytest.mark.parametrize("key", ["m/../../etc/passwd", "m/./a", "m//a", "m/..", "m/a\\b"])
def test_no_key_leads_out_of_the_folder(key: str, store: StoreStub) -> None:
    store.buckets["bkt"] = {"m/good": b"1", key: b"bad"}
    with pytest.raises(InvalidArgument, match="cannot be a file's name"):
        source(store, "s3://bkt/m").read_listing()


def test_file_and_folder_of_one_name_are_refused(store: StoreStub) -> None:
    store.buckets["bkt"] = {"m/a": b"1", "m/a/b": b"2"}
    with pytest.raises(InvalidArgument, match="file and folder of the same name"):
        source(store, "s3://bkt/m").read_listing()


def test_limits_apply_before_anything_is_downloaded(store: StoreStub) -> None:
    with pytest.raises(InvalidArgument, match="more than 1000 bytes"):
        source(store, "s3://bkt/models/m", ObjectLimits(max_bytes=1000)).read_listing()
    with pytest.raises(InvalidArgument, match="more than 2 objects"):
        source(store, "s3://bkt/models", ObjectLimits(max_files=2)).read_listing()


def test_an_object_that_is_cut_off_is_an_error(store: StoreStub, tmp_path: Path) -> None:
    store.cut_off.add("models/m/1/model.bin")
    result = source(store, "s3://bkt/models/m")
    with pytest.raises(Unavailable):
        result.download(result.read_listing(), tmp_path)


def test_an_object_that_grew_is_an_error(store: StoreStub, tmp_path: Path) -> None:
    result = source(store, "s3://bkt/top")
    listing = result.read_listing()
    store.buckets["bkt"]["top"] = b"12345"
    with pytest.raises(Unavailable, match="changed"):
        result.download(listing, tmp_path)


def test_large_objects_are_downloaded_in_parts(store: StoreStub, tmp_path: Path) -> None:
    store.buckets["bkt"]["large"] = bytes(range(256)) * 400
    result = source(store, "s3://bkt/large", replace(QUICK, part_bytes=10_000))
    listing = result.read_listing()
    result.download(listing, tmp_path)
    assert files_in(tmp_path) == {"large": bytes(range(256)) * 400}
    assert len([path for path, headers in store.seen if "Range" in headers or "range" in headers]) == 11
    store.buckets["bkt"]["large"] = b"\0" * 102_400
    (tmp_path / "large").unlink()
    with pytest.raises(Unavailable, match="changed"):
        result.download(listing, tmp_path)


def test_a_download_can_be_cancelled(store: StoreStub, tmp_path: Path) -> None:
    result = source(store, "s3://bkt/models/m")
    with pytest.raises(Cancelled):
        result.download(result.read_listing(), tmp_path, cancelled=lambda: True)


def test_plain_http_is_used_only_where_the_endpoint_says_so(store: StoreStub) -> None:
    metadata = store.metadata("bkt")
    metadata["aws"]["bkt"]["endpoint_url"] = f"127.0.0.1:{store.port}"
    with pytest.raises(Unavailable, match="check the endpoint") as caught:
        ObjectSource(
            ObjectLocation("aws", "bkt", "top"), CloudCredentials.from_metadata(metadata), QUICK
        ).read_listing()
    assert "127.0.0.1" not in caught.value.message
    assert store.seen == []


def test_an_empty_listing_has_no_size() -> None:
    assert Listing((), is_file=False).size == 0
