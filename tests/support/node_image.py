# SPDX-License-Identifier: Apache-2.0
"""Images for a node's containerd, made of this machine's Python without a registry or a Docker engine.

`headrace_archive` has this repository's code and what requirements/image.lock names, laid out as the Dockerfile does; the
Dockerfile itself is tested with Docker. `pause_archive` holds what a pod's namespaces live by.
"""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

from support.model_cache import made_once

ROOT = Path(__file__).parents[2]
IMAGE = "docker.io/headrace-test/headrace:1"
PAUSE_IMAGE = "docker.io/headrace-test/pause:1"
USER = 10001
HOME = "opt/headrace"
SITE_PACKAGES = f"{HOME}/lib/python3.11/site-packages"
PAUSE = """
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
static void end(int signal) { _exit(0); }
static void reap(int signal) { while (waitpid(-1, 0, WNOHANG) > 0) {} }
int main(void) {
  signal(SIGINT, end); signal(SIGTERM, end); signal(SIGCHLD, reap);
  for (;;) pause();
}
"""


def headrace_archive(path: Path) -> None:
    """Write the image `IMAGE` as `docker save` would."""
    layers = made_once(
        write_layers,
        sources=(ROOT / "requirements" / "image.lock", ROOT / "tests" / "platforms" / "docker_platform.py"),
    )
    code = path.with_suffix(".layer")
    _write_code(code)
    _write_archive(
        path,
        IMAGE,
        [layers / "base.tar", layers / "dependencies.tar", code],
        {
            "User": f"{USER}:{USER}",
            "WorkingDir": "/tmp",
            "Entrypoint": ["headrace"],
            "Cmd": ["serve", "/models", "--host", "0.0.0.0"],
            "Env": [
                f"PATH=/{HOME}/bin:/usr/local/bin:/usr/bin:/bin",
                *("HOME=/tmp", "USER=headrace", "LOGNAME=headrace"),
                *("HF_HOME=/tmp/huggingface", "XDG_CACHE_HOME=/tmp/cache"),
                *("PYTHONDONTWRITEBYTECODE=1", "PYTHONUNBUFFERED=1"),
            ],
        },
    )
    code.unlink()


def pause_archive(path: Path) -> None:
    """Write the image `PAUSE_IMAGE`: one static program that waits for its end."""
    made = made_once(write_pause)
    _write_archive(path, PAUSE_IMAGE, [made / "layer.tar"], {"Entrypoint": ["/pause"]})


def write_layers(folder: Path) -> None:
    """What rarely changes: a root folder with Python, and the packages of the lock, compiled."""
    from docker_platform import root_tar

    (folder / "base.tar").write_bytes(root_tar())
    packages = folder / "packages"
    lock = ROOT / "requirements" / "image.lock"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary", ":all:"]
        + ["--disable-pip-version-check", "--target", packages, "-r", lock],
        check=True,
    )
    with tarfile.open(folder / "dependencies.tar", "w") as tar:
        tar.add(packages, SITE_PACKAGES)
        for name in ("python", "python3"):
            link = tarfile.TarInfo(f"{HOME}/bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "/usr/bin/python3"
            tar.addfile(link)
        _text(tar, f"{HOME}/pyvenv.cfg", "home = /usr/bin\ninclude-system-site-packages = false\n")
        _text(tar, "etc/passwd", f"root:x:0:0:root:/root:/bin/sh\nheadrace:x:{USER}:{USER}:headrace:/tmp:/bin/sh\n")
        _text(tar, "etc/group", f"root:x:0:\nheadrace:x:{USER}:\n")
    subprocess.run(["rm", "-r", packages], check=True)


def write_pause(folder: Path) -> None:
    """The program of every pod's first container."""
    subprocess.run(["gcc", "-Os", "-static", "-x", "c", "-", "-o", folder / "pause"], input=PAUSE.encode(), check=True)
    with tarfile.open(folder / "layer.tar", "w") as tar:
        tar.add(folder / "pause", "pause")


def _write_code(path: Path) -> None:
    """The layer that changes: this repository's package, with the metadata of the environment that runs the tests."""
    import importlib.metadata

    information = importlib.metadata.distribution("headrace")
    version = information.version
    with tarfile.open(path, "w") as tar:
        tar.add(ROOT / "headrace", f"{SITE_PACKAGES}/headrace", filter=_of_root)
        for name in ("METADATA", "entry_points.txt"):
            _text(tar, f"{SITE_PACKAGES}/headrace-{version}.dist-info/{name}", information.read_text(name) or "")
        script = f"#!/{HOME}/bin/python\nimport sys\nfrom headrace.cli import main\nsys.exit(main())\n"
        _text(tar, f"{HOME}/bin/headrace", _console_script(information) or script, mode=0o755)


def _console_script(information: Any) -> str:
    (entry,) = (each for each in information.entry_points if each.name == "headrace")
    return f"#!/{HOME}/bin/python\nimport sys\nfrom {entry.module} import {entry.attr}\nsys.exit({entry.attr}())\n"


def _of_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member


def _text(tar: tarfile.TarFile, name: str, text: str, mode: int = 0o644) -> None:
    file = tarfile.TarInfo(name)
    file.size, file.mode = len(text.encode()), mode
    tar.addfile(file, io.BytesIO(text.encode()))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_archive(path: Path, name: str, layers: list[Path], settings: dict[str, Any]) -> None:
    digests = [_digest(layer) for layer in layers]
    configuration = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "config": settings,
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        }
    )
    with tarfile.open(path, "w") as tar:
        for layer, digest in zip(layers, digests, strict=True):
            tar.add(layer, f"{digest}/layer.tar")
        _text(tar, "config.json", configuration)
        manifest = [{"Config": "config.json", "RepoTags": [name], "Layers": [f"{each}/layer.tar" for each in digests]}]
        _text(tar, "manifest.json", json.dumps(manifest))
