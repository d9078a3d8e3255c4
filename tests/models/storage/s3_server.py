# SPDX-License-Identifier: Apache-2.0
"""moto's S3 in a process of its own: objects that real clients put and get. `azure_server` is the other one.

with s3_server(tmp_path) as store:
    store.make("my-bucket", {"images/a.jpg": b"..."})
    details = store.details("my-bucket")
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from obstore.store import S3Store

from support.ports import free_port
from support.waiting import eventually

INSTALLED = Path(__file__).parents[3] / "build" / "object_stores"
"""By scripts/platforms/object_stores.sh install."""
ACCESS_KEY, SECRET_KEY = "AKIAWHISPERED", "s3-secret-that-nobody-may-see"


class S3Server:
    """One that runs."""

    cloud_type, scheme, secret = "aws", "s3", SECRET_KEY

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def make(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        """A bucket with objects in it."""
        subprocess.run(["curl", "-sf", "-X", "PUT", f"{self.endpoint}/{bucket}"], check=True, capture_output=True)
        self.put(bucket, objects)

    def put(self, bucket: str, objects: Mapping[str, bytes]) -> None:
        store = self.store(bucket)
        for key, body in objects.items():
            store.put(key, body)

    def store(self, bucket: str) -> S3Store:
        config = {
            "endpoint": self.endpoint,
            "access_key_id": ACCESS_KEY,
            "secret_access_key": SECRET_KEY,
            "region": "us-east-1",
            "virtual_hosted_style_request": False,
        }
        return S3Store(bucket, config=config, client_options={"allow_http": True})

    def details(self, bucket: str) -> dict[str, Any]:
        """A workspace's `cloud_specific_details`."""
        keys = {"access_key": ACCESS_KEY, "secret_key": SECRET_KEY, "cloud_region": "us-east-1"}
        return {**keys, "endpoint_url": self.endpoint, "cloud_bucket_name": bucket}


@contextmanager
def s3_server(folder: Path) -> Iterator[S3Server]:
    """`folder` is for its log."""
    port = free_port()
    path = program("HEADRACE_MOTO_SERVER", INSTALLED / "moto" / "bin" / "moto_server")
    with running([path, "-H", "127.0.0.1", "-p", str(port)], port, folder / "moto.log"):
        yield S3Server(f"http://127.0.0.1:{port}")


def program(variable: str, installed: Path) -> str:
    """Where a store's program is."""
    beside = shutil.which(installed.name, path=str(Path(sys.executable).parent))
    result = os.environ.get(variable) or (str(installed) if installed.exists() else beside)
    assert result, f"{installed.name} is not here: scripts/platforms/object_stores.sh install, or {variable} says where"
    return result


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


@contextmanager
def running(words: list[str], port: int, log: Path) -> Iterator[None]:
    """Until it listens, and to its end."""
    # Where Node.js is not installed, the script has put one there.
    path = os.pathsep.join([os.environ["PATH"], str(INSTALLED / "moto" / "bin")])
    with log.open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env=os.environ | {"PATH": path})
    try:
        eventually(lambda: _listens(port) or process.poll() is not None, within=180)
        assert process.poll() is None, log.read_text()
        yield
    finally:
        process.terminate()
        process.wait(120)
