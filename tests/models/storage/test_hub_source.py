# SPDX-License-Identifier: Apache-2.0
"""Models of the Hub, through the real library, against a fake of the Hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from hub_stub import COMMIT, HubStub

from headrace.core.errors import Cancelled, HeadraceError, InvalidArgument, NotFound, PermissionDenied, Unavailable
from headrace.core.telemetry.progress import ProgressEvent
from headrace.models.storage.fetch import fetch_location
from headrace.models.storage.hugging_face import HubSource
from headrace.models.storage.locations import HubLocation

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"w" * 200_000,
    "tokenizer.json": b"[]",
    "merges.txt": b"a b",
    "1_Pooling/config.json": b"{}",
    "pytorch_model.bin": b"pickle",
    "modeling.py": b"code",
    "consolidated.safetensors": b"twice",
    "original/model.safetensors": b"twice",
}
WANTED = {"config.json", "model.safetensors", "tokenizer.json", "merges.txt", "1_Pooling/config.json"}


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever other tests have set before the library was imported."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubStub]:
    with HubStub(dict(FILES)) as stub:
        monkeypatch.setenv("HF_ENDPOINT", stub.url(""))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield stub


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_weights_configurations_and_tokenizers_are_downloaded_and_nothing_else(hub: HubStub, tmp_path: Path) -> None:
    events: list[ProgressEvent] = []
    path = fetch_location("hf_model://org/name", tmp_path, progress=events.append)
    assert files_in(path) == WANTED
    assert (path / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    total = sum(len(FILES[name]) for name in WANTED)
    assert (events[-1].state, events[-1].done, events[-1].total) == ("finished", total, total)
    # Every file is of the commit that the branch pointed to when we looked.
    assert all(COMMIT in seen for seen, _ in hub.seen if "/resolve/" in seen)


def test_what_is_there_is_not_downloaded_again(hub: HubStub, tmp_path: Path) -> None:
    first = fetch_location("hf_model://org/name@v1", tmp_path)
    hub.seen.clear()
    assert fetch_location("hf_model://org/name@v1", tmp_path) == first
    # The main branch is at the same commit.
    assert fetch_location("hf_model://org/name", tmp_path) == first
    assert not any("/resolve/" in path for path, _ in hub.seen)


def test_a_token_is_sent(hub: HubStub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.token = "hf_right"
    with pytest.raises(NotFound, match="HF_TOKEN"):
        HubSource(HubLocation("org/name"), "hf_wr0ng").read_listing()
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert HubSource(HubLocation("org/name")).read_listing().commit == COMMIT


@pytest.mark.parametrize(
    ("place", "kind", "said"),
    [
        (HubLocation("org/gated"), PermissionDenied, "gated: ask for access"),
        (HubLocation("org/missing"), NotFound, "does not exist, or is private"),
        (HubLocation("org/name", "v9"), NotFound, "no revision v9"),
        (HubLocation("org/broken"), Unavailable, "answered 500"),
    ],
)
def test_problems_are_reported_with_their_cause(
    place: HubLocation, kind: type[HeadraceError], said: str, hub: HubStub
) -> None:
    with pytest.raises(kind, match=said) as caught:
        HubSource(place).read_listing()
    assert "secret reasons" not in caught.value.message


def test_an_unreachable_hub_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match="could not be reached.*HF_ENDPOINT"):
        HubSource(HubLocation("org/name")).read_listing()


def test_pickled_weights_alone_are_refused(hub: HubStub) -> None:
    hub.files = {"config.json": b"{}", "pytorch_model.bin": b"pickle"}
    with pytest.raises(InvalidArgument, match="no weights in .safetensors"):
        HubSource(HubLocation("org/name")).read_listing()


def test_names_that_lead_out_are_refused(hub: HubStub) -> None:
    hub.files = {"model.safetensors": b"w", "../../evil.json": b"{}"}
    with pytest.raises(InvalidArgument, match="leads out"):
        HubSource(HubLocation("org/name")).read_listing()


def test_size_has_a_limit(hub: HubStub) -> None:
    with pytest.raises(InvalidArgument, match="are the most"):
        HubSource(HubLocation("org/name"), max_bytes=1000).read_listing()


def test_a_cancelled_download_is_not_an_entry_and_is_resumed(hub: HubStub, tmp_path: Path) -> None:
    started: list[ProgressEvent] = []
    with pytest.raises(Cancelled):
        fetch_location("hf://org/name", tmp_path, progress=started.append, cancelled=lambda: len(started) > 1)
    assert started[-1].state == "failed"
    assert all(path.name.startswith(".") for path in tmp_path.iterdir())
    assert files_in(fetch_location("hf://org/name", tmp_path)) == WANTED


def test_downloaded_files_match_the_hubs_listing(hub: HubStub, tmp_path: Path) -> None:
    right = hashlib.sha256(FILES["model.safetensors"]).hexdigest()
    hub.hashes = {"model.safetensors": "0" * 64}
    with pytest.raises(Unavailable, match="another SHA-256"):
        fetch_location("hf_model://org/name", tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.name != ".locks"]
    hub.hashes = {"model.safetensors": right}
    assert files_in(fetch_location("hf_model://org/name", tmp_path)) == WANTED


@pytest.mark.parametrize(("cuts", "comes"), [(2, True), (99, False)])
def test_a_connection_that_is_cut_is_tried_again_and_not_for_ever(
    hub: HubStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuts: int, comes: bool
) -> None:
    real, left = huggingface_hub.hf_hub_download, {"merges.txt": cuts}

    def cut(repository: str, name: str, **arguments: Any) -> str:
        if left.get(name, 0) > 0:
            left[name] -= 1
            raise httpx2.RemoteProtocolError("Server disconnected without sending a response.")
        return real(repository, name, **arguments)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", cut)
    if comes:
        assert files_in(fetch_location("hf_model://org/name", tmp_path)) == WANTED
    else:
        with pytest.raises(Unavailable, match="could not be reached"):
            fetch_location("hf_model://org/name", tmp_path)
        assert left["merges.txt"] == cuts - 3
