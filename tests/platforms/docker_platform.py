# SPDX-License-Identifier: Apache-2.0
"""A Docker engine for tests, with an image made of this machine's own Python: no registry is needed.

Tests that are marked `platform` have it by the fixture `engine`.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import re
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "platforms" / "docker.sh"
IMAGE = "headrace-test/python:1"
PROGRAMS = ("bash", "dash", "cat", "ls", "sleep", "rm", "mkdir", "id", "touch", "chmod", "ln")
PYTHON = "/usr/bin/python3"
_LEFT_OUT = re.compile(r"/(__pycache__|test|tests|idlelib|lib2to3|tkinter|turtledemo|pydoc_data|config-[^/]*)(/|$)")


@dataclass(frozen=True)
class DockerEngine:
    """Where it listens, and the docker program's way to it."""

    host: str

    def docker(self, *words: str, input: bytes = b"", seconds: float = 120) -> str:
        """What docker prints; an error where it fails."""
        argv = ["docker", "--host", self.host, *words]
        done = subprocess.run(argv, input=input, capture_output=True, timeout=seconds)
        if done.returncode:
            raise AssertionError(f"{argv}: {done.stdout.decode()} {done.stderr.decode()}")
        return done.stdout.decode().strip()

    def resources(self) -> set[str]:
        """All containers, networks and volumes, asked of the engine itself: tests look often, and docker takes its time."""
        return {
            *(f"container {container['Id']} {container['Names']}" for container in self._get("/containers/json?all=1")),
            *(f"network {network['Id']} {network['Name']}" for network in self._get("/networks")),
            *(f"volume {volume['Name']}" for volume in self._get("/volumes")["Volumes"] or ()),
        }

    def _get(self, path: str) -> Any:
        connection = http.client.HTTPConnection("docker", timeout=60)
        connection.sock = socket.socket(socket.AF_UNIX)
        with contextlib.closing(connection):
            connection.sock.connect(self.host.removeprefix("unix://"))
            connection.request("GET", path)
            return json.load(connection.getresponse())


@contextlib.contextmanager
def docker_engine() -> Iterator[DockerEngine]:
    """An engine of its own, with `IMAGE` in it; nothing of it is left afterwards."""
    if shutil.which("dockerd") is None:
        pytest.fail("there is no dockerd: bash scripts/platforms/docker.sh install")
    folder = Path(tempfile.mkdtemp(prefix="hr-docker-", dir="/tmp"))  # a socket's path must be short
    try:
        subprocess.run(["bash", SCRIPT, "start", folder], check=True, timeout=180)
        engine = DockerEngine(f"unix://{folder}/docker.sock")
        engine.docker("import", "--change", "ENV PATH=/usr/bin:/bin", "-", IMAGE, input=root_tar())
        yield engine
    finally:
        subprocess.run(["bash", SCRIPT, "stop", folder], check=True, timeout=180)
        shutil.rmtree(folder)


@functools.cache
def root_tar() -> bytes:
    """A root folder with Python, pip and a shell, copied from this machine."""
    request = "import os, sys, sysconfig; print(os.path.realpath(sys.executable), sysconfig.get_path('stdlib'))"
    executable, library = subprocess.check_output([PYTHON, "-I", "-c", request], text=True).split()
    files = {*_tree(Path(library)), *_tree(Path("/usr/lib/python3/dist-packages/pip"))}
    binaries = [Path(executable), *(Path(shutil.which(name) or f"/usr/bin/{name}") for name in PROGRAMS)]
    shared = [*binaries, *(path for path in files if path.suffix == ".so")]
    paths = {*map(str, files), *map(str, binaries), *_libraries(shared), "/etc/ssl/certs/ca-certificates.crt"}
    named = {"/usr" + path if path.startswith(("/lib", "/bin")) else path: path for path in paths}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", dereference=True) as tar:
        for name in ("bin", "lib", "lib64", "sbin"):
            _link(tar, name, f"usr/{name}")
        for name in ("python3", "python"):
            _link(tar, f"usr/bin/{name}", executable)
        _link(tar, "usr/bin/sh", "dash")
        for inside, path in sorted(named.items()):
            tar.add(path, inside, recursive=False)
        _text(tar, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        _text(tar, "etc/group", "root:x:0:\n")
        _text(tar, "etc/pip.conf", "[global]\ncert = /etc/ssl/certs/ca-certificates.crt\n")
        folder = tarfile.TarInfo("tmp")
        folder.type, folder.mode = tarfile.DIRTYPE, 0o1777
        tar.addfile(folder)
    return buffer.getvalue()


def _tree(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file() and not _LEFT_OUT.search(str(path)[len(str(root)) :])]


def _libraries(binaries: list[Path]) -> set[str]:
    stdout = subprocess.run(["ldd", *map(str, binaries)], capture_output=True, text=True).stdout
    results = set(re.findall(r"(/\S+) \(0x", stdout))
    # What wheels from PyPI expect of every system.
    cache = subprocess.check_output(["/sbin/ldconfig", "-p"], text=True)
    for name in ("libstdc++.so.6", "libgcc_s.so.1", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1"):
        results.update(re.findall(rf"{re.escape(name)} .*=> (/\S+)", cache)[:1])
    return results


def _link(tar: tarfile.TarFile, name: str, target: str) -> None:
    link = tarfile.TarInfo(name)
    link.type, link.linkname = tarfile.SYMTYPE, target
    tar.addfile(link)


def _text(tar: tarfile.TarFile, name: str, text: str) -> None:
    file = tarfile.TarInfo(name)
    file.size, file.mode = len(text.encode()), 0o644
    tar.addfile(file, io.BytesIO(text.encode()))
