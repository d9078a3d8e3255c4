# SPDX-License-Identifier: Apache-2.0
"""Adapters on demand over HTTP: found by name, listed, loaded and unloaded by an operator, and brought from the Hub."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest
from hub_stub import HubStub
from language_model_server import Server, configure, served_by_process, served_in_thread

from headrace.engine.dataplane import BackgroundPlane, DataPlane
from headrace.engine.repository.directory import Directory
from headrace.models.adapters import AdapterPlaces
from headrace.programs.serve.worker import WorkersPlane
from support.adapters import save_adapters
from support.llm_models import tiny_llama
from support.waiting import eventually

KINDS = {
    "anna": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear"},
    "bert": {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]},
    "carl": {"r": 4, "lora_alpha": 8, "target_modules": ["down_proj"]},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's version folder, and adapters beside it."""
    folder = tmp_path_factory.mktemp("trained")
    tiny_llama(folder / "1")
    save_adapters(folder / "1", folder / "adapters", KINDS)
    return folder


def repository(folder: Path, trained: Path, **parameters: str) -> Path:
    shutil.copytree(trained, folder / "llama")
    configure(folder / "llama", **{"adapters_folder": "../adapters", "max_adapters": "1", **parameters})
    return folder


@pytest.fixture(scope="module")
def served(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = repository(tmp_path_factory.mktemp("served"), trained)
    shutil.copytree(trained / "adapters" / "anna", folder / "llama" / "adapters" / "more" / "deep")
    with served_in_thread(folder) as server:
        yield server


def ask(server: Server, name: str, expect: int = 200) -> Any:
    body = {"model": name, "prompt": [5, 9, 100, 33], "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == expect, answer
    return answer["choices"][0]["text"] if status == 200 else answer["error"]


def listed(server: Server) -> dict[str, Any]:
    status, answer = server.request("GET", "/v1/models")
    assert status == 200
    return {model["id"]: model for model in json.loads(answer)["data"]}


def control(server: Server, verb: str, **document: Any) -> tuple[int, str]:
    status, body = server.request("POST", f"/v1/{verb}_lora_adapter", json.dumps(document).encode())
    return status, body.decode()


def test_adapters_are_found_by_name_listed_and_share_slots(served: Server) -> None:
    names = ["llama", *KINDS]
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda name: ask(served, name), names * 4))
    assert texts[:4] * 4 == texts
    assert len(set(texts)) == 4
    models = listed(served)
    assert models.keys() == {"llama", *KINDS}
    assert (models["anna"]["parent"], models["anna"]["root"]) == ("llama", "llama")
    assert "parent" not in models["llama"]
    numbers = served.metrics("llama")
    assert numbers["headrace_llm_adapters_resident"] == 1
    assert numbers["headrace_llm_adapter_loads_total"] == 3
    assert numbers["headrace_llm_adapter_load_seconds_count"] == 3


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("ana", "did you mean 'anna'\\?"),
        ("Bert", "did you mean 'bert'\\?"),
        ("../adapters/anna", "GET /v1/models"),
        ("more/deep", "GET /v1/models"),
        ("org/model", "GET /v1/models"),
    ],
)
def test_an_unknown_name_is_not_found(served: Server, name: str, hint: str) -> None:
    error = ask(served, name, 404)
    assert error["code"] == "model_not_found"
    assert re.search(hint, error["message"])


def test_an_operator_loads_and_unloads_adapters(served: Server) -> None:
    text = ask(served, "anna")
    assert control(served, "load", lora_name="pirate", lora_path="more/deep") == (
        200,
        "Success: LoRA adapter 'pirate' added successfully.",
    )
    assert ask(served, "pirate") == text
    assert listed(served)["pirate"]["parent"] == "llama"
    status, body = control(served, "load", lora_name="pirate", lora_path="bert")
    assert status == 400 and "has been loaded already: set load_inplace to true" in body
    assert control(served, "load", lora_name="pirate", lora_path="bert", load_inplace=True)[0] == 200
    assert ask(served, "pirate") == ask(served, "bert")
    assert control(served, "unload", lora_name="pirate")[0] == 200
    ask(served, "pirate", 404)
    assert "pirate" not in listed(served)
    status, body = control(served, "unload", lora_name="anna")
    assert status == 200 and "The next request that names it loads it again." in body
    assert ask(served, "anna") == text


@pytest.mark.parametrize(
    ("verb", "document", "status", "text"),
    [
        ("load", {"lora_path": "anna"}, 400, "lora_name: is missing"),
        ("load", {"lora_name": "x"}, 400, "lora_path: is missing"),
        ("load", {"lora_name": "x", "lora_path": "../1"}, 400, "is neither a folder below '"),
        ("load", {"lora_name": "x", "lora_path": "/etc"}, 400, "is neither a folder below '"),
        ("load", {"lora_name": "x", "lora_path": "org/name"}, 400, "nor a repository.*which are: none"),
        ("load", {"lora_name": "../x", "lora_path": "anna"}, 400, "adapter name '../x' is not allowed"),
        ("load", {"lora_name": "llama", "lora_path": "anna"}, 400, "'llama' is the name of a model"),
        ("load", {"lora_name": "x", "lora_path": "more"}, 400, "adapter 'x' has no adapter_config.json"),
        ("load", {"lora_name": "x", "lora_path": "a", "base_model_name": "y"}, 400, "model 'y' loads no adapters on demand"),
        ("unload", {"lora_name": "anne"}, 404, "cannot be found: did you mean 'anna'"),
        ("unload", {}, 400, "lora_name: is missing"),
    ],
)  # fmt: skip
def test_wrong_requests_of_an_operator(served: Server, verb: str, document: Any, status: int, text: str) -> None:
    found, body = control(served, verb, **document)
    assert found == status, body
    assert re.search(text, body.replace('\\"', '"')), body
    assert "x" not in listed(served)


def test_the_methods_of_the_paths(served: Server) -> None:
    assert served.request("GET", "/v1/load_lora_adapter")[0] == 405


def test_an_adapter_whose_model_is_not_loaded_loads_both(trained: Path, tmp_path: Path) -> None:
    folder = repository(tmp_path, trained)
    with served_in_thread(folder, "--model-control-mode", "on-demand") as server:
        assert listed(server).keys() == {"llama", *KINDS}
        assert listed(server)["bert"]["parent"] == "llama"
        first = ask(server, "bert")
        assert control(server, "load", lora_name="pirate", lora_path="anna")[0] == 200
        assert server.request("POST", "/v2/repository/models/llama/unload")[0] == 200
        assert ask(server, "pirate") == ask(server, "anna"), "what an operator registered stays"
        assert ask(server, "bert") == first


def test_adapters_of_the_hub_that_the_configuration_allows(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    files = {path.name: path.read_bytes() for path in (trained / "adapters" / "anna").iterdir() if path.is_file()}
    folder = repository(tmp_path / "models", trained, adapters_hub="org/name,org/bro*")
    with HubStub({**files, "code.py": b"", "model.bin": b"pickle"}) as hub, served_in_thread(folder) as server:
        monkeypatch.setenv("HF_ENDPOINT", hub.url(""))
        assert "org/name" in listed(server)
        assert not hub.seen, "nothing is fetched before a request names it"
        assert ask(server, "org/name") == ask(server, "anna")
        fetched = {path.partition("?")[0].rpartition("/")[2] for path, _ in hub.seen if "/resolve/" in path}
        assert fetched == {"adapter_config.json", "adapter_model.safetensors"}
        seen = len(hub.seen)
        for name in ("org/gated", "other/name", "org/name@v1", "org/../name"):
            ask(server, name, 404)
        assert len(hub.seen) == seen, "a name that is not allowed was asked for"
        error = ask(server, "org/broken", 503)
        assert "answered 500 for" in error["message"]
        assert control(server, "load", lora_name="pinned", lora_path="org/name")[0] == 200
        assert ask(server, "pinned") == ask(server, "anna")


def test_planes_over_the_same_models_have_the_same_adapters() -> None:
    own = DataPlane(Directory())
    adapters = own._adapters.open("llama", AdapterPlaces())
    planes = [WorkersPlane(own, cast("Any", None), cast("Any", None)), BackgroundPlane(own)]
    assert all(plane._adapters.of("llama") is adapters for plane in planes)


@pytest.mark.slow
def test_an_operator_reaches_all_workers(trained: Path, tmp_path: Path) -> None:
    folder = repository(tmp_path / "models", trained)
    with served_by_process(tmp_path / "log", folder, "--workers", "2") as server:
        # Every request is a connection of its own, which the kernel gives to either worker; one may still load its model.
        eventually(lambda: all(server.request("GET", "/v2/health/ready")[0] == 200 for _ in range(30)))
        text = ask(server, "anna")
        assert control(server, "load", lora_name="pirate", lora_path="anna")[0] == 200
        assert {ask(server, "pirate") for _ in range(12)} == {text}
        assert control(server, "unload", lora_name="pirate")[0] == 200
        for _ in range(12):
            ask(server, "pirate", 404)
