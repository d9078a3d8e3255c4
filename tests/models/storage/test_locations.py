# SPDX-License-Identifier: Apache-2.0
"""Texts that name places, and the keys of a workspace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import InvalidArgument, PermissionDenied
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.locations import (
    HubPlace,
    LocalPlace,
    ObjectPlace,
    Place,
    WebPlace,
    parse_location,
    public_text,
)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("/models/a", LocalPlace(Path("/models/a"))),
        ("models/a:b", LocalPlace(Path("models/a:b"))),
        ("file:///models/a%20b", LocalPlace(Path("/models/a b"))),
        ("file://localhost/a", LocalPlace(Path("/a"))),
        ("s3://bkt/a/b", ObjectPlace("aws", "bkt", "a/b")),
        ("aws://bkt/a/b/", ObjectPlace("aws", "bkt", "a/b")),
        ("S3://bkt", ObjectPlace("aws", "bkt", "")),
        ("s3://bkt/a?b#c%20", ObjectPlace("aws", "bkt", "a?b#c%20")),
        ("gs://bkt/a", ObjectPlace("gcp", "bkt", "a")),
        ("az://bkt/a", ObjectPlace("azure", "bkt", "a")),
        ("azure://bkt/a", ObjectPlace("azure", "bkt", "a")),
        ("seaweedfs://bkt/a", ObjectPlace("seaweedfs", "bkt", "a")),
        ("hf_model://org/name", HubPlace("org/name")),
        ("hf_model://org/name@v1.0", HubPlace("org/name", "v1.0")),
        ("hf_model://gpt2", HubPlace("gpt2")),
        ("hf://org/name@v1.0", HubPlace("org/name", "v1.0")),
        ("https://host/a?b=c", WebPlace("https://host/a?b=c")),
    ],
)
def test_places(text: str, place: Place) -> None:
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
    assert public_text(url) == str(WebPlace(url)) == "https://host/path"
    assert "s3cr3t" not in repr(WebPlace(url))
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
