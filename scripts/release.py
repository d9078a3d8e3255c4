# SPDX-License-Identifier: Apache-2.0
"""Build the files of a release from a commit: `python scripts/release.py dist` (docs/releasing.md).

sdist and wheel are built twice from what git has, in two folders, and must be the same bytes: who has the commit can make
them again and compare. Beside them the SBOMs, SHA256SUMS of all, and with `--key` a signature of that by OpenSSH.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from lock import LOCKS
from make_sbom import text_of
from tool_venvs import ROOT

SUMS = "SHA256SUMS"
NAMESPACE = "headrace-release"
"""What a signature is for: one made for another purpose with the same key does not verify."""
_BUILD = """
import sys
from setuptools import build_meta
folder = sys.argv[1]  # which setuptools replaces
build_meta.build_sdist(folder)
build_meta.build_wheel(folder)
"""


class NotReproducible(Exception):
    """Two builds of one commit differ."""


def main() -> int:
    """Build, compare, sum up, sign. 0: all is there; 1: the builds differ, or signing failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files go; made if it is not there")
    parser.add_argument("--commit", default="HEAD", help="what is released (HEAD)")
    parser.add_argument("--key", type=Path, help="an OpenSSH private key, to sign SHA256SUMS with")
    arguments = parser.parse_args()
    try:
        for path in released(arguments.folder, arguments.commit, arguments.key):
            print(path)
    except NotReproducible as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(
            f"release: {error.cmd[0]} failed: {(error.stderr or b'').decode(errors='replace')[-2000:]}", file=sys.stderr
        )
        return 1
    return 0


def released(folder: Path, commit: str, key: Path | None) -> list[Path]:
    """All files of a release."""
    first, second = built(commit), built(commit)
    if first != second:
        differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
        raise NotReproducible(f"two builds of {commit} differ in {', '.join(differ)}")
    files = first | {
        f"headrace-{name}.cdx.json": text_of(name).encode() for name in LOCKS if name not in ("test", "build")
    }
    sums = "".join(f"{hashlib.sha256(files[name]).hexdigest()}  {name}\n" for name in sorted(files))
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in (*files.items(), (SUMS, sums.encode())):
        (folder / name).write_bytes(content)
    paths = [folder / name for name in (*sorted(files), SUMS)]
    if key is not None:
        (folder / f"{SUMS}.sig").unlink(missing_ok=True)
        _run("ssh-keygen", "-Y", "sign", "-q", "-n", NAMESPACE, "-f", str(key), str(folder / SUMS))
        paths.append(folder / f"{SUMS}.sig")
    return paths


def built(commit: str) -> dict[str, bytes]:
    """Name and content of sdist and wheel of a commit, made in a folder of their own."""
    epoch = _run("git", "-C", str(ROOT), "show", "-s", "--format=%ct", commit).decode().strip()
    with tempfile.TemporaryDirectory(prefix="headrace-release-") as temporary:
        source, target = Path(temporary) / "source", Path(temporary) / "dist"
        source.mkdir()
        archive = _run("git", "-C", str(ROOT), "archive", "--format=tar", commit)
        _run("tar", "--extract", "--directory", str(source), stdin=archive)
        # umask and time zone of whoever builds must not show.
        environment = os.environ | {"SOURCE_DATE_EPOCH": epoch, "TZ": "UTC", "PYTHONHASHSEED": "0"}
        command = ["sh", "-c", 'umask 022; exec "$@"', "sh", sys.executable, "-c", _BUILD, str(target)]
        subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
        return {
            path.name: _plain_sdist(path.read_bytes(), int(epoch)) if path.suffix == ".gz" else path.read_bytes()
            for path in sorted(target.iterdir())
        }


def _plain_sdist(content: bytes, epoch: int) -> bytes:
    """An sdist without what differs from one build to the next: times, owners, order. setuptools cares for wheels only."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(content)) as old, tarfile.open(fileobj=packed, mode="w") as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return gzip.compress(packed.getvalue(), mtime=epoch)


def _run(*command: str, stdin: bytes | None = None) -> bytes:
    return subprocess.run(command, input=stdin, check=True, capture_output=True).stdout


if __name__ == "__main__":
    sys.exit(main())
