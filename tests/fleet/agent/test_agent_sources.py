# SPDX-License-Identifier: Apache-2.0
"""What a model's `storage` means, and the keys for it."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.fleet.agent.model_sources import credentials_from, parse_source
from headrace.models.storage.locations import HubLocation, ObjectLocation, WebLocation

PATH = "/mnt/models/m"


def storage(uri: str, path: str = PATH, **more: Any) -> dict[str, Any]:
    return {"spec": {"storage": {"storageUri": uri, **({"path": path} if path else {}), **more}}}


def secret(**values: str) -> dict[str, Any]:
    return {"data": {name: base64.b64encode(value.encode()).decode() for name, value in values.items()}}


@pytest.mark.parametrize(
    ("uri", "place"),
    [
        ("hf://org/name", HubLocation("org/name")),
        ("hf://org/name@v2", HubLocation("org/name", "v2")),
        ("s3://bucket/a/b", ObjectLocation("aws", "bucket", "a/b")),
        ("s3://bucket@eu-west-1/a/b", ObjectLocation("aws", "bucket", "a/b")),
        ("gs://bucket/a", ObjectLocation("gcp", "bucket", "a")),
        ("az://container/a", ObjectLocation("azure", "container", "a")),
        ("https://host/model.tar.gz", WebLocation("https://host/model.tar.gz")),
        ("oci://n/space/b/bucket/o/a/b", ObjectLocation("aws", "bucket", "a/b")),
        ("oci://space@us-phoenix-1/bucket/a", ObjectLocation("aws", "bucket", "a")),
        ("oci://bucket/a", ObjectLocation("aws", "bucket", "a")),
    ],
)
def test_places(uri: str, place: Any) -> None:
    more = {"parameters": {"region": "us-ashburn-1", "namespace": "space"}} if uri.startswith("oci") else {}
    source = parse_source(storage(uri, **more))
    assert (source.kind, source.place, source.path) == ("download", place, PATH)


@pytest.mark.parametrize(
    ("uri", "path", "way", "wanted"),
    [
        ("local:///data/m", "", "here", "/data/m"),
        ("local:///data/m", "/else/m", "here", "/else/m"),
        ("file:///data/m", "", "here", "/data/m"),
        ("vendor://openai/gpt/x", "", "vendor", ""),
        ("pvc://claim/sub", PATH, "claim", PATH),
        ("pvc://ns:claim/sub", "", "claim", ""),
    ],
)
def test_what_needs_no_download(uri: str, path: str, way: str, wanted: str) -> None:
    source = parse_source(storage(uri, path))
    assert (source.kind, source.path, source.place) == (way, wanted, None)


@pytest.mark.parametrize(
    ("uri", "path", "said"),
    [
        ("", PATH, "storageUri is missing"),
        ("hf://org/name", "", "spec.storage.path is missing"),
        ("github://org/name", PATH, "github:// is not a scheme"),
        ("hf://not a name", PATH, "is not hf_model://organisation/name"),
        ("local://relative/path", "", "absolute path"),
        ("oci://bucket/a", PATH, "oci:// needs namespace, region and bucket"),
        ("oci://n/space/b/bucket/o/a", PATH, "region in spec.storage.parameters"),
        ("s3:///key", PATH, "no bucket"),
    ],
)
def test_impossible_sources_are_reported(uri: str, path: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_source(storage(uri, path))


def test_keys_of_a_secret() -> None:
    source = parse_source(storage("s3://bucket@eu-west-1/a"))
    credentials = credentials_from(source, secret(AWS_ACCESS_KEY_ID="id", AWS_SECRET_ACCESS_KEY="hidden\n"))
    assert credentials is not None
    keys = credentials.keys_of("aws", "bucket")
    assert (keys.access_key, keys.secret_key, keys.region, keys.endpoint_url) == ("id", "hidden", "eu-west-1", "")
    azure = credentials_from(parse_source(storage("az://box/a")), secret(account_name="acc", account_key="k"))
    assert azure is not None and azure.keys_of("azure", "box").account_name == "acc"
    google = credentials_from(parse_source(storage("gs://b/a")), secret(**{"key.json": "{}"}))
    assert google is not None and google.keys_of("gcp", "b").secret_key == "{}"


def test_tokens_of_the_hub() -> None:
    named = {"parameters": {"secretKey": "mine"}}
    cases = [
        (storage("hf://org/name"), secret(token="a"), "a"),
        (storage("hf://org/name", **named), secret(token="a", mine="b"), "b"),
        (storage("hf://org/name", parameters={"token": "c"}), None, "c"),
        (storage("hf://org/name"), {"data": {"token": "%%% not base64"}}, ""),
    ]
    for model, given, wanted in cases:
        credentials = credentials_from(parse_source(model), given)
        assert credentials is not None and credentials.hub_token == wanted


def test_credentials_of_the_agent_are_sent_to_no_store_that_a_model_names() -> None:
    assert credentials_from(parse_source(storage("s3://b/a", parameters={"region": "x"})), None) is None
    for parameters in ({"endpoint": "http://evil"}, {"auth": "anonymous"}):
        credentials = credentials_from(parse_source(storage("s3://b/a", parameters=parameters)), None)
        assert credentials is not None and credentials.keys_of("aws", "b").access_key == ""


def test_oracle_is_reached_through_its_s3_api() -> None:
    source = parse_source(storage("oci://space@us-phoenix-1/bucket/a"))
    with pytest.raises(FailedPrecondition, match=r"access_key and secret_key.*spec\.storage\.key"):
        credentials_from(source, None)
    credentials = credentials_from(source, secret(access_key="id", secret_key="x"))
    assert credentials is not None
    keys = credentials.keys_of("aws", "bucket")
    assert keys.endpoint_url == "https://space.compat.objectstorage.us-phoenix-1.oraclecloud.com"
    assert keys.region == "us-phoenix-1"


def test_files_of_the_hub_can_be_chosen() -> None:
    source = parse_source(storage("hf://org/name", parameters={"files": "*.gguf, *.json"}))
    assert source.files == ("*.gguf", "*.json")
