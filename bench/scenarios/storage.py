# SPDX-License-Identifier: Apache-2.0
"""Measure a download of one large object beside boto3, in turns, from the same local server.

    .venv/bin/python bench/scenarios/storage.py                     # 2 GB from the fake, less from moto
    .venv/bin/python bench/scenarios/storage.py --server fake --bytes 512000000 --runs 5

boto3 and moto go into an environment of their own, build/storage_measure, which is made here. Servers:

- `moto` is the S3 server of the project moto, into which boto3 uploads the object as it does by default, in parts. For every
  range that is asked for it reads the whole object, so it is moto that bounds both rates; 256 MB are measured at most.
- `fake` is no S3 server: it is a small program of this script that answers HEAD and ranged GET of one file, signed or not,
  by sendfile, so that it is not the server that bounds the rate.

Each download is a process of its own; the disk is synced before each. Times are of the whole call: `bring` (listing,
download, checks, rename) and `download_file`. Ends with 1 if ours is not 3 times as fast from a server (by the medians), or
takes 200 MB of memory or more.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = ROOT / "build" / "storage_measure"
PYTHON = ENVIRONMENT / "bin" / "python"
BUCKET, KEY = "bkt", "obj.bin"
TIMES, MOST_BYTES = 3.0, 200_000_000
MOTO_BYTES = 256_000_000


def main() -> int:
    """Measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description="Ours beside boto3: one large object from a local server.")
    parser.add_argument("--bytes", type=int, default=2_000_000_000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--server", choices=("moto", "fake", "both"), default="both")
    parser.add_argument("--folder", type=Path, default=ROOT / "build")
    parser.add_argument("--be", nargs=3, metavar=("ROLE", "PORT", "PATH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.be:
        role, port, path = options.be
        {"fake": _be_fake, "boto3": _be_boto3, "upload": _be_upload, "headrace": _be_headrace}[role](int(port), path)
        return 0
    _make_environment()
    good = True
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        for server in ("moto", "fake") if options.server == "both" else (options.server,):
            source = Path(folder) / KEY
            _write_random(source, min(options.bytes, MOTO_BYTES) if server == "moto" else options.bytes)
            good = _measure(server, source, Path(folder), options.runs) and good
    return 0 if good else 1


def _measure(server: str, source: Path, folder: Path, runs: int) -> bool:
    with _running(server, source) as port:
        if server == "moto":
            _role(PYTHON, "upload", port, source)
        found: dict[str, list[dict[str, float]]] = {"boto3": [], "headrace": []}
        for _ in range(runs):
            for who, python in (("boto3", PYTHON), ("headrace", Path(sys.executable))):
                os.sync()
                target = folder / who
                found[who].append(_role(python, who, port, target))
                shutil.rmtree(target) if target.is_dir() else target.unlink()
    size = source.stat().st_size
    print(f"{size} bytes from {server}, {runs} runs in turns; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    rates = {}
    for who, each in found.items():
        rates[who] = statistics.median(size / run["seconds"] / 1e6 for run in each)
        listed = " ".join(f"{size / run['seconds'] / 1e6:.0f}" for run in each)
        most, cpu = max(run["memory"] for run in each), statistics.median(run["cpu"] for run in each)
        print(f"  {who:9} {rates[who]:6.0f} MB/s ({listed}), {most / 1e6:.0f} MB of memory, {cpu:.2f} s of CPU")
    times = rates["headrace"] / rates["boto3"]
    memory = max(run["memory"] for run in found["headrace"])
    print(
        f"  {times:.2f} x boto3 (wanted {TIMES:g}), memory {memory / 1e6:.0f} MB (wanted under {MOST_BYTES / 1e6:.0f})"
    )
    return times >= TIMES and memory < MOST_BYTES


def _role(python: Path, role: str, port: int, path: Path) -> dict[str, float]:
    done = subprocess.run(
        [python, __file__, "--be", role, str(port), str(path)], check=True, stdout=subprocess.PIPE, text=True
    )
    return dict(json.loads(done.stdout or "{}"))


@contextmanager
def _running(server: str, source: Path) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [sys.executable, __file__, "--be", "fake", str(port), str(source)]
    if server == "moto":
        command = [str(ENVIRONMENT / "bin" / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
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
        yield port
    finally:
        process.terminate()
        process.wait(20)


def _make_environment() -> None:
    if (ENVIRONMENT / "bin" / "moto_server").exists():
        return
    subprocess.run(["bash", ROOT / "scripts" / "make_venv.sh", sys.executable, ENVIRONMENT], check=True)
    subprocess.run([PYTHON, "-m", "pip", "install", "--quiet", "moto[server]", "boto3"], check=True)


def _write_random(path: Path, size: int) -> None:
    with path.open("wb") as file:
        for start in range(0, size, 1 << 24):
            file.write(os.urandom(min(1 << 24, size - start)))


def _told(began: float) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds, cpu = time.monotonic() - began, used.ru_utime + used.ru_stime
    print(json.dumps({"seconds": seconds, "memory": used.ru_maxrss * 1024, "cpu": cpu}))


# The processes


def _be_headrace(port: int, path: str) -> None:
    from headrace.models.storage.credentials import CloudCredentials
    from headrace.models.storage.fetch import fetch_location

    keys = {
        "access_key": "a",
        "secret_key": "b",
        "endpoint_url": f"http://127.0.0.1:{port}",
        "cloud_region": "us-east-1",
    }
    credentials = CloudCredentials.from_metadata({"aws": {BUCKET: keys}})
    began = time.monotonic()
    fetch_location(f"s3://{BUCKET}/{KEY}", Path(path), credentials)
    _told(began)


def _client(port: int) -> Any:
    import boto3  # type: ignore[import-not-found]  # in the other environment

    return boto3.client(
        "s3",
        endpoint_url=f"http://127.0.0.1:{port}",
        aws_access_key_id="a",
        aws_secret_access_key="b",
        region_name="us-east-1",
    )


def _be_boto3(port: int, path: str) -> None:
    client = _client(port)
    began = time.monotonic()
    client.download_file(BUCKET, KEY, path)
    _told(began)


def _be_upload(port: int, path: str) -> None:
    client = _client(port)
    client.create_bucket(Bucket=BUCKET)
    client.upload_file(path, BUCKET, KEY)


def _be_fake(port: int, path: str) -> None:
    size = Path(path).stat().st_size

    class Answers(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._head(0, size, 200)

        def do_GET(self) -> None:
            start, end, status = 0, size, 200
            if wanted := self.headers.get("Range"):
                first, _, last = wanted.removeprefix("bytes=").partition("-")
                start, end, status = int(first), min(size, int(last or size) + 1), 206
            self._head(start, end, status)
            self.wfile.flush()
            with open(path, "rb") as file:
                while start < end:
                    start += os.sendfile(self.connection.fileno(), file.fileno(), start, end - start)

        def _head(self, start: int, end: int, status: int) -> None:
            self.send_response(status)
            if status == 206:
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            for name, value in (
                ("Content-Length", str(end - start)),
                ("ETag", '"0123456789abcdef0123456789abcdef-250"'),  # as of an object that came in parts
                ("Last-Modified", "Sun, 15 Nov 2026 00:00:00 GMT"),
                ("Accept-Ranges", "bytes"),
            ):
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128

    Server(("127.0.0.1", port), Answers).serve_forever()


if __name__ == "__main__":
    sys.exit(main())
