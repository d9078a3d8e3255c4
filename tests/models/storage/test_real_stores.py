# SPDX-License-Identifier: Apache-2.0
"""The same against programs that others wrote: moto's S3 and Azurite (`scripts/platforms/object_stores.sh install`)."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path
from typing import Any

import pytest
from azure_server import azure_server
from s3_server import s3_server

from headrace.core.errors import NotFound, PermissionDenied
from headrace.models.storage.checksums import Checksum, from_headers
from headrace.models.storage.credentials import CloudCredentials
from headrace.models.storage.fetch import fetch_location
from headrace.models.storage.locations import ObjectLocation, parse_location
from headrace.models.storage.object_stores import ObjectLimits, ObjectSource, headers_of

pytestmark = pytest.mark.platform

OBJECTS = {"m/config.json": b"{}", "m/sub/a b#?%.bin": bytes(range(250)) * 24_000, "m2/other": b"no"}


def check(url: str, metadata: dict[str, Any], folder: Path) -> None:
    credentials = CloudCredentials.from_metadata(metadata)
    path = fetch_location(f"{url}/m", folder, credentials)
    results = {f"m/{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert results == {key: body for key, body in OBJECTS.items() if key.startswith("m/")}
    place = parse_location(f"{url}/m")
    assert isinstance(place, ObjectLocation)
    parts = ObjectSource(place, credentials, ObjectLimits(part_bytes=1_000_000))
    (folder / "parts").mkdir()
    parts.download(parts.read_listing(), folder / "parts")
    assert (folder / "parts" / "sub" / "a b#?%.bin").read_bytes() == OBJECTS["m/sub/a b#?%.bin"]
    with pytest.raises(NotFound):
        fetch_location(f"{url}/none", folder, credentials)


def test_moto(tmp_path: Path) -> None:
    with s3_server(tmp_path) as store:
        store.make("bkt", OBJECTS)
        check("s3://bkt", {"aws": {"bkt": store.details("bkt")}}, tmp_path)


def test_azurite(tmp_path: Path) -> None:
    with azure_server(tmp_path) as server:
        server.make("cont", OBJECTS)
        details = {**server.details("cont"), "secret_key": server.secret}
        check("az://cont", {"azure": {"cont": details}}, tmp_path / "cache")
        body = OBJECTS["m/config.json"]
        place = ObjectLocation("azure", "cont", "m/config.json")
        output = headers_of(server.store("cont"), place, None, place.key)
        assert output is not None and from_headers(output) == Checksum("md5", hashlib.md5(body).digest())
        wrong = {**details, "access_key": base64.b64encode(b"x" * 64).decode()}
        with pytest.raises(PermissionDenied):
            fetch_location(
                "az://cont/m", tmp_path / "cache", CloudCredentials.from_metadata({"azure": {"cont": wrong}})
            )
