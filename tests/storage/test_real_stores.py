# SPDX-License-Identifier: Apache-2.0
"""The same against programs that others wrote: moto's S3 (`pip install moto[server]`) and Azurite (`npm install azurite`).

`HEADRACE_MOTO_SERVER` and `HEADRACE_AZURITE_BLOB` say where the programs are, if not beside Python.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ports import free_port

from headrace.core.errors import NotFound, PermissionDenied
from headrace.storage.bringing import bring
from headrace.storage.checksums import Checksum, from_headers
from headrace.storage.credentials import CloudCredentials
from headrace.storage.locations import ObjectPlace, parse_location
from headrace.storage.object_heads import headers_of
from headrace.storage.objects import ObjectLimits, ObjectSource

pytestmark = pytest.mark.platform

ACCOUNT = "devstoreaccount1"
# The key that every Azurite has, printed in its manual.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
OBJECTS = {"m/config.json": b"{}", "m/sub/a b#?%.bin": bytes(range(250)) * 24_000, "m2/other": b"no"}


@contextmanager
def running(variable: str, program: str, *arguments: str, port: int) -> Iterator[None]:
    path = os.environ.get(variable) or shutil.which(program, path=str(Path(sys.executable).parent))
    if not path:
        pytest.skip(f"{program} is not here; {variable} can say where it is")
    process = subprocess.Popen([path, *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > end or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(20)


def check(store: Any, url: str, metadata: dict[str, Any], folder: Path) -> None:
    for key, body in OBJECTS.items():
        store.put(key, body)
    credentials = CloudCredentials.from_metadata(metadata)
    path = bring(f"{url}/m", folder, credentials)
    found = {f"m/{file.relative_to(path)}": file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert found == {key: body for key, body in OBJECTS.items() if key.startswith("m/")}
    place = parse_location(f"{url}/m")
    assert isinstance(place, ObjectPlace)
    parts = ObjectSource(place, credentials, ObjectLimits(part_bytes=1_000_000))
    (folder / "parts").mkdir()
    parts.download(parts.look(), folder / "parts")
    assert (folder / "parts" / "sub" / "a b#?%.bin").read_bytes() == OBJECTS["m/sub/a b#?%.bin"]
    with pytest.raises(NotFound):
        bring(f"{url}/none", folder, credentials)


def test_moto(tmp_path: Path) -> None:
    from obstore.store import S3Store

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    with running("HEADRACE_MOTO_SERVER", "moto_server", "-H", "127.0.0.1", "-p", str(port), port=port):
        subprocess.run(["curl", "-sf", "-X", "PUT", f"{endpoint}/bkt"], check=True, capture_output=True)
        store = S3Store(
            "bkt",
            config={
                "endpoint": endpoint,
                "access_key_id": "a",
                "secret_access_key": "b",
                "region": "us-east-1",
                "virtual_hosted_style_request": False,
            },
            client_options={"allow_http": True},
        )
        details = {"access_key": "a", "secret_key": "b", "endpoint_url": endpoint, "cloud_region": "us-east-1"}
        check(store, "s3://bkt", {"aws": {"bkt": details}}, tmp_path)


def test_azurite(tmp_path: Path) -> None:
    from obstore.store import AzureStore

    port = free_port()
    endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
    arguments = ("--silent", "--location", str(tmp_path / "az"), "--blobHost", "127.0.0.1", "--blobPort", str(port))
    with running(
        "HEADRACE_AZURITE_BLOB", "azurite-blob", *arguments, "--skipApiVersionCheck", "--disableTelemetry", port=port
    ):
        _make_container(endpoint)
        store = AzureStore(
            "cont",
            config={"account_name": ACCOUNT, "account_key": KEY, "endpoint": endpoint},
            client_options={"allow_http": True},
        )
        details = {"account_name": ACCOUNT, "access_key": KEY, "secret_key": KEY, "endpoint_url": endpoint}
        check(store, "az://cont", {"azure": {"cont": details}}, tmp_path / "cache")
        body = OBJECTS["m/config.json"]
        place = ObjectPlace("azure", "cont", "m/config.json")
        said = headers_of(store, place, None, place.key)
        assert said is not None and from_headers(said) == Checksum("md5", hashlib.md5(body).digest())
        wrong = {**details, "access_key": base64.b64encode(b"x" * 64).decode()}
        with pytest.raises(PermissionDenied):
            bring("az://cont/m", tmp_path / "cache", CloudCredentials.from_metadata({"azure": {"cont": wrong}}))


def _make_container(endpoint: str) -> None:
    """obstore makes no containers."""
    import hmac
    from email.utils import formatdate

    date = formatdate(usegmt=True)
    text = (
        "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:2021-08-06\n/{ACCOUNT}/{ACCOUNT}/cont\nrestype:container"
    )
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers = (f"x-ms-date: {date}", "x-ms-version: 2021-08-06", f"Authorization: SharedKey {ACCOUNT}:{signature}")
    named = [word for header in (*headers, "Content-Length: 0") for word in ("-H", header)]
    url = f"{endpoint}/cont?restype=container"
    subprocess.run(["curl", "-sf", "-X", "PUT", *named, url], check=True, capture_output=True)
