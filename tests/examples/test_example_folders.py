# SPDX-License-Identifier: Apache-2.0
"""`examples/NN-name`: what each page tells the reader to type is typed, in a copy of the folder, and shows what it shows.

The pages use the default ports of a server. Here the environment gives `headrace serve` free ones, and the pages'
numbers are replaced by them. What needs an object store, Slurm or a cluster is marked `platform`.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import unquote

import pytest
from doc_blocks import anchors_of, links_of
from doc_session import Session

from headrace.platforms.node_resources import is_port_free
from support.ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("[0-9][0-9]-*"))
ON_PLATFORMS = {"06-vlm-s3", "09-slurm"}
CLUSTER = "\n## On a cluster\n"
"""Where the page of Kubernetes begins to need one."""


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    copy = tmp_path / "examples"
    copy.mkdir()
    for name in NAMES:
        shutil.copytree(EXAMPLES / name, copy / name, ignore=shutil.ignore_patterns("build", "__pycache__", "*.onnx"))
    reader = Reader(copy, monkeypatch)
    yield reader
    reader.close()


class Reader:
    """Somebody who has the examples, and reads one page."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder
        self._patch = monkeypatch
        self._sessions: list[Session] = []
        ports = {"8000": "PORT", "8001": "SERVER_GRPC_PORT", "8002": "SERVER_METRICS_PORT"}
        self._ports = {number: free_port() for number in ports} | run_of_ports("8080", "8081", "8082")
        for number, name in ports.items():
            monkeypatch.setenv(f"INFERENCE_{name}", str(self._ports[number]))
        monkeypatch.setenv("HEADRACE_STATE_DIR", str(folder / "state"))

    def set(self, name: str, value: object) -> None:
        """A variable of their shell."""
        self._patch.setenv(name, str(value))

    def follow(self, name: str, text: str = "") -> None:
        """All of the page, or this part of it."""
        session = Session(self._folder / name, self._ports)
        self._sessions.append(session)
        assert session.follow(text or page(name)) > 1

    def close(self) -> None:
        for session in self._sessions:
            session.close()


def run_of_ports(*numbers: str) -> dict[str, int]:
    """Free ports that follow each other: a fleet gives them to its services so, one after the other."""
    while True:
        first = free_port()
        results = [
            first + number for number in range(len(numbers))
        ]  # between two of `free_port` there is room for them
        if all(is_port_free("127.0.0.1", port) for port in results):
            return dict(zip(numbers, results, strict=True))


def page(name: str) -> str:
    return (EXAMPLES / name / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)  # one starts a dozen processes
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.worker(name)) for name in NAMES if name not in ON_PLATFORMS]
)
def test_an_example_works_as_its_page_describes(name: str, reader: Reader) -> None:
    missing = [tool for tool in ("curl", "jq", "pkill") if tool in page(name) and shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    reader.follow(name, page(name).partition(CLUSTER)[0])


@pytest.mark.platform
@pytest.mark.timeout(900)
def test_pictures_in_a_store_are_described(reader: Reader, tmp_path: Path) -> None:
    from s3_server import INSTALLED, program

    moto = program("HEADRACE_MOTO_SERVER", INSTALLED / "moto" / "bin" / "moto_server")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "moto_server").symlink_to(moto)  # that alone: its folder has another Python
    reader.set("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    reader.follow("06-vlm-s3")


@pytest.mark.platform
@pytest.mark.worker("containers")
@pytest.mark.timeout(900)
def test_a_service_runs_on_slurm(reader: Reader) -> None:
    from slurm_platform import cluster

    with cluster() as slurm:
        reader.set("SLURM_CONF", slurm.environ["SLURM_CONF"])
        reader.follow("09-slurm")
        reader.close()


@pytest.mark.platform
@pytest.mark.timeout(900)
def test_the_same_file_is_applied_to_a_cluster(reader: Reader, tmp_path: Path) -> None:
    from controller_site import Site
    from fleet.cluster.test_verbs_platform import pods_marked

    from support.kubernetes_server import KubernetesServer

    with KubernetesServer(tmp_path / "cluster") as server, closing(Site(server)) as site, pods_marked(site):
        reader.set("KUBECONFIG", server.kubeconfig)
        reader.set("PATH", f"{os.environ['PATH']}{os.pathsep}{server.folder / 'bin'}")
        reader.follow("10-kubernetes", page("10-kubernetes").partition(CLUSTER)[2])
        reader.close()


def test_there_are_twelve_and_each_is_in_the_list() -> None:
    listed = re.findall(r"\]\((\d\d-[\w-]+)/README\.md\)", (EXAMPLES / "README.md").read_text())
    assert listed == NAMES and len(NAMES) == 12


@pytest.mark.parametrize("name", NAMES)
def test_what_an_example_points_to_is_there(name: str) -> None:
    folder = EXAMPLES / name
    for link in links_of(page(name)):
        if "://" in link:
            continue
        path, _, anchor = unquote(link).partition("#")
        target = (folder / path).resolve()
        assert target.exists(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors_of(target.read_text()), f"{link}: no such heading"
