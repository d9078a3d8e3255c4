# SPDX-License-Identifier: Apache-2.0
"""Texts that name places, and the keys of a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidArgument, PermissionDenied
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import (
    HubLocation,
    LocalLocation,
    Location,
    ObjectLocation,
    WebLocation,
    parse_location,
    public_text,
)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/models/a", LocalLocation(Path("/models/a"))),
        ("models/a:b", LocalLocation(Path("models/a:b"))),
        ("file:///models/a%20b", LocalLocation(Path("/models/a b"))),
        ("file://localhost/a", LocalLocation(Path("/a"))),
        ("s3://bkt/a/b", ObjectLocation("aws", "bkt", "a/b")),
        ("aws://bkt/a/b/", ObjectLocation("aws", "bkt", "a/b")),
        ("S3://bkt", ObjectLocation("aws", "bkt", "")),
        ("s3://bkt/a?b#c%20", ObjectLocation("aws", "bkt", "a?b#c%20")),
        ("gs://bkt/a", ObjectLocation("gcp", "bkt", "a")),
        ("az://bkt/a", ObjectLocation("azure", "bkt", "a")),
        ("azure://bkt/a", ObjectLocation("azure", "bkt", "a")),
        ("seaweedfs://bkt/a", ObjectLocation("seaweedfs", "bkt", "a")),
        ("hf_model://org/name", HubLocation("org/name")),
        ("hf_model://org/name@v1.0", HubLocation("org/name", "v1.0")),
        ("hf_model://gpt2", HubLocation("gpt2")),
        ("hf://org/name@v1.0", HubLocation("org/name", "v1.0")),
        ("https://host/a?b=c", WebLocation("https://host/a?b=c")),
    ],
)
def test_places(text: str, place: Location) -> None:
    assert parse_location(text) == place


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a\0b",
        "cs://bkt/a",
        "ssh://host/a",
        "file://host/a",
        "file://",
        "s3://",
        "s3:///a",
        "s3://b@d/a",
        "s3://bkt/../a",
        "s3://bkt/a/../../b",
        "s3://bkt/a//b",
        "s3://bkt/a\nb",
        "hf_model://",
        "hf_model://../etc",
        "hf_model://a/b/c",
        "hf_model://org/name@",
        "hf_model://org/name@../x",
    ],
)
def test_texts_that_name_nothing(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_location(text)


def test_secrets_of_urls_are_not_shown() -> None:
    url = "https://user:p4ss@host/path?sig=s3cr3t#s3cr3t"
    assert public_text(url) == str(WebLocation(url)) == "https://host/path"
    assert "s3cr3t" not in repr(WebLocation(url))
    assert public_text("https://host/a\x1b[2J") == "https://host/a?[2J"


def test_credentials_are_found_by_their_bucket() -> None:
    credentials = CloudCredentials.from_metadata(
        {
            "aws": {"one": {"access_key": "a1", "secret_key": "s1"}, "two": {"access_key": "a2", "endpoint_url": None}},
            "seaweedfs": {"weed": {"access_key": "a3", "endpoint_url": "http://weed:8333/"}},
            "huggingface": {"": {"token": "hf_x"}},
            "self_hosted": {"any": {"thing": 1}},
        }
    )
    assert credentials.keys_of("aws", "two").access_key == "a2"
    assert credentials.keys_of("aws", "weed").endpoint_url == "http://weed:8333"
    assert credentials.hub_token == "hf_x"
    for cloud, bucket in (("azure", "one"), ("aws", "three"), ("seaweedfs", "one")):
        with pytest.raises(PermissionDenied, match=bucket):
            credentials.keys_of(cloud, bucket)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ([], "cloud_metadata"),
        ({"aws": []}, "cloud_metadata.aws"),
        ({"aws": {"b": "s3cr3t"}}, "cloud_metadata.aws.b"),
        ({"aws": {"b": {"access_key": ["s3cr3t"]}}}, "access_key"),
        ({"aws": {"b": {"endpoint_url": "ftp://s3cr3t/"}}}, "endpoint_url"),
        ({"aws": {"b": {"endpoint_url": "http://user:s3cr3t@host/"}}}, "endpoint_url"),
        ({"aws": {"b": {"endpoint_url": "http://host:port/"}}}, "endpoint_url"),
    ],
)
def test_metadata_that_is_wrong_names_the_field_and_not_its_value(metadata: Any, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named) as caught:
        CloudCredentials.from_metadata(metadata)
    assert "s3cr3t" not in caught.value.message
