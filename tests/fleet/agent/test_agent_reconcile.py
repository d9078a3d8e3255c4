# SPDX-License-Identifier: Apache-2.0
"""The agent as a whole, against an API server in memory and real downloads: order, limits, what it writes and what not."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import shutil
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_cluster import NODE, Cluster
from hub_stub import HubStub
from web_stub import WebStub, reply

from headrace.core.errors import FailedPrecondition
from headrace.fleet.agent.agent import Agent, AgentSettings
from headrace.fleet.metrics import AgentMetrics
from headrace.models.storage.fetch import FetchSettings
from headrace.programs.model_agent import work
from support.waiting import eventually_async

BODY = b"w" * 400_000


class Web(WebStub):
    """Every path is a file; those that start with /held wait until they may."""

    def __init__(self) -> None:
        super().__init__(default=self._answer)
        self.may = threading.Event()
        self.at_once = self.most = 0
        self.lock = threading.Lock()
        self.broken = False

    def _answer(self, handler: Any) -> None:
        if self.broken:
            reply(handler, b"", status=503)
            return
        with self.lock:
            self.at_once += 1
            self.most = max(self.most, self.at_once)
        try:
            if handler.path.startswith("/held"):
                handler.send_response(200)
                handler.send_header("Content-Length", "800000")
                handler.end_headers()
                handler.wfile.write(BODY)
                handler.wfile.flush()
                self.may.wait(120)
                handler.wfile.write(BODY)
            else:
                reply(handler, BODY)
        finally:
            with self.lock:
                self.at_once -= 1


@pytest.fixture
def web() -> Iterator[Web]:
    with Web() as stub:
        yield stub
        stub.may.set()


def settings(root: Path, **more: Any) -> AgentSettings:
    document = {"write_seconds": 0.01, "progress_seconds": 0.02, "poll_seconds": 0.05, "retry_seconds": 0.05, **more}
    bring = FetchSettings(private_hosts=("127.0.0.1",))
    return AgentSettings(NODE, root / "models", keep_free_bytes=0, fetch=bring, **document)


def play(tmp_path: Path, cluster: Cluster, scene: Callable[[Agent], Awaitable[None]], **more: Any) -> None:
    """Run an agent while the scene is on."""

    async def run() -> None:
        agent = Agent(cluster, settings(tmp_path, **more), AgentMetrics(cluster))
        working = asyncio.create_task(agent.run())
        async with asyncio.timeout(120):
            await scene(agent)
        assert not working.done() or working.exception() is None
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)

    asyncio.run(run())


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_a_model_deleted_during_its_download_is_cancelled_immediately(
    tmp_path: Path, cluster: Cluster, web: Web
) -> None:
    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/held/a"), str(tmp_path / "models" / "a"))
        await eventually_async(lambda: cluster.entries().get("a", {}).get("progress", {}).get("completedBytes"))
        assert cluster.label("a") == "Updating"
        cluster.remove("clusterbasemodels", "a")
        await eventually_async(lambda: not cluster.entries() and not cluster.labels() and agent.settled)
        assert not list((tmp_path / "models" / ".headrace" / "cache").iterdir())

    play(tmp_path, cluster, scene)


def test_concurrent_downloads_are_bounded_and_queued_ones_can_be_cancelled(
    tmp_path: Path, cluster: Cluster, web: Web
) -> None:
    async def scene(agent: Agent) -> None:
        for name in "abcde":
            cluster.model(name, web.url(f"/held/{name}"), str(tmp_path / "models" / name))
        await eventually_async(lambda: web.at_once == 2 and len(cluster.entries()) == 5)
        waiting = next(name for name in "abcde" if not any(path == f"/held/{name}" for path, _ in web.seen))
        cluster.remove("clusterbasemodels", waiting)
        await eventually_async(lambda: waiting not in cluster.entries())
        web.may.set()
        await eventually_async(lambda: agent.settled and set(cluster.labels().values()) == {"Ready"})
        assert len(cluster.labels()) == 4

    play(tmp_path, cluster, scene, downloads=2)
    assert web.most == 2


def test_files_are_deleted_after_the_label_and_not_before(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    folder = tmp_path / "models" / "a"

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/a"), str(folder))
        await eventually_async(lambda: cluster.label("a") == "Ready")
        cluster.down = True
        cluster.remove("clusterbasemodels", "a")
        await eventually_async(lambda: cluster.refused > 2)
        assert (folder / "a").exists(), "pods may still be sent here"
        cluster.down = False
        await eventually_async(lambda: not folder.exists() and not cluster.labels())

    play(tmp_path, cluster, scene)


def test_an_unreachable_api_server_does_not_stop_a_download(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    folder = tmp_path / "models" / "a"

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/held/a"), str(folder))
        await eventually_async(lambda: cluster.label("a") == "Updating" and web.at_once)
        cluster.down = True
        web.may.set()
        await eventually_async(lambda: folder.exists())
        assert cluster.label("a") == "Updating" and not agent.settled
        cluster.down = False
        await eventually_async(lambda: cluster.label("a") == "Ready" and agent.settled)

    play(tmp_path, cluster, scene)


def test_a_folder_changes_after_the_label_has(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    folder = tmp_path / "models" / "a"

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/a"), str(folder))
        await eventually_async(lambda: cluster.label("a") == "Ready")
        cluster.model("a", web.url("/held/b"), str(folder))
        await eventually_async(lambda: cluster.label("a") == "Updating" and web.at_once)
        assert [path.name for path in folder.iterdir()] == ["a"]
        web.may.set()
        await eventually_async(lambda: cluster.label("a") == "Ready")
        assert [path.name for path in folder.iterdir()] == ["b"]

    play(tmp_path, cluster, scene)


def test_repeated_identical_failures_are_reported_once(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    web.broken = True

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/a"), str(tmp_path / "models" / "a"))
        await eventually_async(lambda: cluster.label("a") == "Failed" and agent.settled)
        assert "503" in cluster.entries()["a"]["reason"]
        wrote, asked = len(cluster.wrote), len(web.seen)
        await eventually_async(lambda: len(web.seen) > asked + 3)
        assert len(cluster.wrote) == wrote
        web.broken = False
        await eventually_async(lambda: cluster.label("a") == "Ready")
        assert "reason" not in cluster.entries()["a"]

    play(tmp_path, cluster, scene)


def test_nothing_is_written_when_nothing_changes_nor_at_a_new_start(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    async def first(agent: Agent) -> None:
        for name in "abc":
            cluster.model(name, web.url(f"/{name}"), str(tmp_path / "models" / name))
        await eventually_async(lambda: agent.settled and len(cluster.labels()) == 3)

    async def second(agent: Agent) -> None:
        await eventually_async(lambda: agent.settled)
        # What the operator writes is no news.
        result = cluster.objects["clusterbasemodels", "", "a"]
        spec = {**result["spec"], "modelArchitecture": "X"}
        cluster.set("clusterbasemodels", {**result, "spec": spec, "status": {"state": "Ready"}})
        await asyncio.sleep(0.1)  # twice as long as it takes until the next look
        assert agent.settled

    play(tmp_path, cluster, first, progress_seconds=600)  # how far they are is told as often as a download takes long
    assert len(cluster.wrote) <= 14, "a few for each, however many events there were"
    asked, cluster.wrote = len(web.seen), []
    play(tmp_path, cluster, second)
    assert cluster.wrote == [] and len(web.seen) == asked


def test_a_wrong_status_is_corrected_at_the_start(tmp_path: Path, cluster: Cluster) -> None:
    labels = {"zone": "a", "models.ome.io/clusterbasemodel.old": "Ready", "models.ome.io/category": "SMALL"}
    cluster.set("nodes", {"metadata": {"name": NODE, "labels": labels}})
    metadata = {"name": NODE, "namespace": "headrace-system"}
    cluster.set("configmaps", {"metadata": metadata, "data": {"clusterbasemodel.old": '{"status": "Ready"}'}})

    async def scene(agent: Agent) -> None:
        await eventually_async(lambda: agent.settled and not cluster.entries())
        assert cluster.labels() == {"models.ome.io/category": "SMALL"}

    play(tmp_path, cluster, scene)


def test_freed_disk_space_is_used(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    """Two models for one folder: the second comes when the first has gone, and says until then why it does not."""
    folder = str(tmp_path / "models" / "one")

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/a"), folder)
        await eventually_async(lambda: cluster.label("a") == "Ready")
        cluster.model("b", web.url("/b"), folder)
        await eventually_async(lambda: "has the model a" in cluster.entries().get("b", {}).get("reason", ""))
        cluster.remove("clusterbasemodels", "a")
        await eventually_async(lambda: cluster.label("b") == "Ready")
        assert [path.name for path in Path(folder).iterdir()] == ["b"]

    play(tmp_path, cluster, scene, retry_seconds=600)


def test_models_that_others_put_there(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    here, folder = tmp_path / "here", tmp_path / "models" / "a"

    async def scene(agent: Agent) -> None:
        cluster.model("here", f"local://{here}", "")
        cluster.model("vendor", "vendor://x/y/z", "")
        cluster.model("claim", "pvc://claim/x", "")
        await eventually_async(lambda: cluster.label("here") == "Failed" and cluster.label("vendor") == "Ready")
        assert "is not on this node; put the model there" in cluster.entries()["here"]["reason"]
        here.mkdir()
        await eventually_async(lambda: cluster.label("here") == "Ready" and agent.settled)
        here.rmdir()
        await eventually_async(lambda: cluster.label("here") == "Failed")
        assert "claim" not in cluster.entries()
        # Brought, and then said to be there: it stays.
        cluster.model("a", web.url("/a"), str(folder))
        await eventually_async(lambda: cluster.label("a") == "Ready")
        cluster.model("a", f"local://{folder}", "")
        await eventually_async(
            lambda: agent.settled and not list((tmp_path / "models" / ".headrace" / "models").glob("*.json"))
        )
        assert (folder / "a").exists() and cluster.label("a") == "Ready"

    play(tmp_path, cluster, scene)


def test_an_error_is_reported_and_the_rest_continues(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    async def scene(agent: Agent) -> None:
        cluster.model("scheme", "github://a/b", str(tmp_path / "models" / "x"))
        cluster.model("path", web.url("/x"), "/etc")
        cluster.model("secret", web.url("/x"), str(tmp_path / "models" / "y"), key="absent")
        cluster.set("clusterbasemodels", {"metadata": {"name": "bare"}, "spec": "nonsense"})
        cluster.model("good", web.url("/good"), str(tmp_path / "models" / "good"))
        await eventually_async(
            lambda: agent.settled and len(cluster.entries()) == 5 and cluster.label("good") == "Ready"
        )
        reasons = {name: entry["reason"] for name, entry in cluster.entries().items() if name != "good"}
        assert "is not a scheme" in reasons["scheme"] and "is not below" in reasons["path"]
        assert "Secret absent of namespace headrace-system" in reasons["secret"]
        assert "storageUri is missing" in reasons["bare"]

    play(tmp_path, cluster, scene)


def test_signatures_of_urls_are_not_reported(
    tmp_path: Path, cluster: Cluster, web: Web, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")

    async def scene(agent: Agent) -> None:
        web.broken = True
        cluster.model("a", web.url("/a?signature=hidden"), str(tmp_path / "models" / "a"))
        await eventually_async(lambda: cluster.label("a") == "Failed")
        web.broken = False
        await eventually_async(lambda: cluster.label("a") == "Ready")

    play(tmp_path, cluster, scene)
    assert "downloading from" in caplog.text and "hidden" not in caplog.text
    assert "hidden" not in str(cluster.wrote)


def test_a_disk_that_fills_up_is_reported(
    tmp_path: Path, cluster: Cluster, web: Web, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_told: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("headrace.fleet.agent.model_store.link_or_copy", full)

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/a"), str(tmp_path / "models" / "a"))
        await eventually_async(lambda: "there is no room for" in cluster.entries().get("a", {}).get("reason", ""))
        monkeypatch.undo()
        await eventually_async(lambda: cluster.label("a") == "Ready")

    play(tmp_path, cluster, scene)


def test_missing_files_are_reported_once_while_the_source_is_unreachable(
    tmp_path: Path, cluster: Cluster, web: Web
) -> None:
    folder = tmp_path / "models" / "a"

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/a"), str(folder))
        await eventually_async(lambda: cluster.label("a") == "Ready")
        web.broken = True
        shutil.rmtree(tmp_path / "models" / ".headrace" / "cache")
        (folder / "a").unlink()
        await eventually_async(lambda: cluster.label("a") == "Failed" and agent.settled)
        wrote, asked = len(cluster.wrote), len(web.seen)
        await eventually_async(lambda: len(web.seen) > asked + 3)
        assert len(cluster.wrote) == wrote

    play(tmp_path, cluster, scene)


def test_files_of_another_agent_are_adopted_if_their_digests_match(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    files = {"config.json": b"{}", "model.safetensors": b"right" * 1000}
    folder = tmp_path / "models" / "a"
    folder.mkdir(parents=True)
    for name, body in files.items():
        (folder / name).write_bytes(body.replace(b"right", b"wrong"))

    async def scene(agent: Agent) -> None:
        def reason() -> str:
            output: str = cluster.entries().get("a", {}).get("reason", "")
            return output

        cluster.model("a", "hf://org/name", f"{folder}/")
        await eventually_async(lambda: "did not download; move them away" in reason())
        cluster.model("a", "hf://org/name", f"{folder}/", downloadPolicy="ReuseIfExists")
        await eventually_async(lambda: "1 of 2 differ from those of hf://org/name (model.safetensors)" in reason())
        (folder / "model.safetensors").write_bytes(files["model.safetensors"])
        await eventually_async(lambda: cluster.label("a") == "Ready")
        assert not any("/resolve/" in path for path, _ in hub.seen)
        assert cluster.entries()["a"]["config"]["artifact"]["sha"] == "a" * 40
        # From here on they are ours: missed when they are, and deleted with the model.
        (folder / "config.json").unlink()
        await eventually_async(lambda: (folder / "config.json").exists() and agent.settled)
        cluster.remove("clusterbasemodels", "a")
        await eventually_async(lambda: not folder.exists())

    with HubStub(files) as hub:
        hub.hashes = {"model.safetensors": hashlib.sha256(files["model.safetensors"]).hexdigest()}
        monkeypatch.setenv("HF_ENDPOINT", hub.url(""))
        play(tmp_path, cluster, scene)


def test_a_node_that_is_not_there_yet_is_waited_for(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    node = cluster.objects["nodes", "", NODE]
    cluster.remove("nodes", NODE)

    async def scene(agent: Agent) -> None:
        cluster.model("a", web.url("/a"), str(tmp_path / "models" / "a"))
        await asyncio.sleep(0.1)
        assert not cluster.wrote
        cluster.set("nodes", node)
        await eventually_async(lambda: cluster.label("a") == "Ready")

    play(tmp_path, cluster, scene)


def test_a_node_of_another_zone_is_noticed_in_any_order_of_events(tmp_path: Path, cluster: Cluster, web: Web) -> None:
    """The answer to a write of labels tells of it before the next look does."""

    async def scene(agent: Agent) -> None:
        await eventually_async(lambda: agent.settled)
        selector = {"nodeSelector": {"zone": "b"}}
        cluster.model("zoned", web.url("/zoned"), str(tmp_path / "models" / "zoned"), **selector)
        await eventually_async(
            lambda: agent._informers[1].get(("", "zoned")) is not None and not agent._tasks
        )  # seen, and not for us
        node = cluster.objects["nodes", "", NODE]
        labels = {**node["metadata"]["labels"], "zone": "b"}
        cluster.set("nodes", {**node, "metadata": {**node["metadata"], "labels": labels}})
        agent._status._set_node(cluster.objects["nodes", "", NODE])  # as `_write` does
        await eventually_async(lambda: cluster.label("zoned") == "Ready")

    play(tmp_path, cluster, scene)


def test_a_folder_that_cannot_be_used_ends_the_program(tmp_path: Path, cluster: Cluster) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(FailedPrecondition, match="--models-root"):
        asyncio.run(work(cluster, settings(tmp_path), asyncio.Event()))
