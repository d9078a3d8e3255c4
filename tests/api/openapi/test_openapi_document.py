# SPDX-License-Identifier: Apache-2.0
"""The document: of every route and of no other, valid, true for each model, made again only when models change."""

from __future__ import annotations

import asyncio
import gzip
import json
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
from described_server import make_models
from raw_requests import ask, routes_of

from headrace.api.admin import admin_table
from headrace.api.metrics.settings import MetricsSettings
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openapi.document import base_document, described_routes, undescribed_routes
from headrace.api.openapi.http import OpenApi, OpenApiSettings
from headrace.api.openapi.openai_routes import batch_table, openai_table
from headrace.api.openapi.operations import strip_names
from headrace.api.openapi.predict_routes import predict_table
from headrace.api.predict.settings import PredictSettings
from headrace.api.v2.http import V2Http
from headrace.core.dtypes import DTYPES
from headrace.core.kv_transfer import KvTransferSettings
from headrace.core.telemetry.tracing import NO_TRACING
from headrace.engine.dataplane import DataPlane
from headrace.engine.engine import EngineSettings, open_engine
from headrace.models.config.types import ControlInput, InputSpec, OutputSpec, SequenceBatching
from headrace.net.http.routes import Routes
from headrace.net.site import Site
from headrace.net.sockets import Address
from headrace.programs.console.http import console_table
from headrace.programs.serve.protocols import build_protocols
from headrace.programs.serve.server import ServerSettings
from support.engines import config_of, plane_of
from support.serving import Serving, serving

ADDRESS = Address.parse("127.0.0.1:0")


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    @wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


async def whole_server() -> Routes:
    """The routes of a server that has everything."""
    settings = ServerSettings(
        http=ADDRESS,
        grpc=ADDRESS,
        metrics_settings=MetricsSettings(),
        predict=PredictSettings(),
        openai=OpenAiSettings(batch_folder=Path("/nowhere")),
        engine=EngineSettings(kv_transfer=KvTransferSettings("prefill")),
    )
    engine = open_engine(EngineSettings())
    protocols = build_protocols(engine, settings, NO_TRACING, None)
    routes = protocols.site.routes
    if ("GET", "/openapi.json") not in routes.listed():
        OpenApi(protocols.plane, routes).add_to(routes)
    return routes


@in_loop
async def test_every_route_is_described_and_every_description_is_of_a_route() -> None:
    routes, tables = (
        await whole_server(),
        [predict_table(), admin_table(), openai_table(), batch_table(), console_table()],
    )
    assert undescribed_routes(routes, tables) == []
    document = base_document(routes, tables)
    assert {(method, strip_names(path)) for method, path in routes_of(document)} == set(routes.listed())
    assert set(described_routes(tables)) == set(routes.listed())


def test_an_undescribed_route_is_noticed_and_listed() -> None:
    routes = Routes()
    routes.add("PUT", "/other/{thing}/x.y", lambda exchange: None)
    assert undescribed_routes(routes) == [("PUT", "/other/{}/x.y")]
    operation = base_document(routes)["paths"]["/other/{p1}/x.y"]["put"]
    assert operation["tags"] == ["Other"] and [parameter["name"] for parameter in operation["parameters"]] == ["p1"]
    # A room describes it with plain data, in its own words for the placeholder.
    table = {
        ("PUT", "/other/{region}/x.y"): {"tags": ["Mine"], "summary": "Put", "responses": {"200": {"description": ""}}}
    }
    document = base_document(routes, [table])
    assert undescribed_routes(routes, [table]) == []
    assert document["paths"]["/other/{region}/x.y"]["put"]["summary"] == "Put"
    assert {"name": "Mine"} in document["tags"]


@in_loop
async def test_the_document_is_valid() -> None:
    document = json.loads(json.dumps(base_document(await whole_server())))
    check_document(document)


def check_document(document: dict[str, Any]) -> None:
    """What OpenAPI 3.1 asks for, as far as it concerns us."""
    assert document["openapi"].startswith("3.1.")
    ids = []
    tags = {tag["name"] for tag in document["tags"]}
    for path, item in document["paths"].items():
        for operation in item.values():
            ids.append(operation["operationId"])
            assert set(operation["tags"]) <= tags
            assert operation["responses"]
            named = [parameter["name"] for parameter in operation.get("parameters", ()) if parameter["in"] == "path"]
            assert sorted(named) == sorted(part[1:-1] for part in path.split("/") if part.startswith("{")), path
    assert len(ids) == len(set(ids))
    for schema in schemas_in(document):
        jsonschema_rs.meta.validate({"$schema": "https://json-schema.org/draft/2020-12/schema", **schema})
    for reference in references_in(document):
        place = document
        for key in reference.removeprefix("#/").split("/"):
            place = place[key]


def schemas_in(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from document["components"]["schemas"].values()

    def walk(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                if key == "schema":
                    yield inner
                else:
                    yield from walk(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from walk(inner)

    yield from walk(document["paths"])


def references_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref":
                yield inner
            else:
                yield from references_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from references_in(inner)


# Models


def echo(inputs: Any) -> Any:
    return {name.replace("IN", "OUT"): value for name, value in inputs.items()}


def typed(name: str, dtype: str, dims: tuple[int, ...], **more: Any) -> tuple[Any, Any]:
    inputs, outputs = (InputSpec("IN", DTYPES[dtype], dims),), (OutputSpec("OUT", DTYPES[dtype], dims),)
    return config_of(name, **{"inputs": inputs, "outputs": outputs, **more}), echo


MODELS = [
    *(typed(f"of_{dtype.lower()}", dtype, (2, 3)) for dtype in DTYPES),
    *(typed(f"large_{dtype.lower()}", dtype, (40, 40)) for dtype in DTYPES),
    typed("unbatched", "INT64", (-1, 2), max_batch_size=0, scheduling=None),
    typed("scalar", "FP32", (), max_batch_size=0, scheduling=None),
    typed("any", "FP32", (1,), inputs=(InputSpec("IN", None, None),), outputs=(OutputSpec("OUT", None, None),)),
    typed(
        "optional",
        "FP32",
        (4,),
        inputs=(InputSpec("IN", DTYPES["FP32"], (4,)), InputSpec("MORE_IN", DTYPES["FP32"], (4,), optional=True)),
    ),
    typed("all_optional", "FP32", (4,), inputs=(InputSpec("IN", DTYPES["FP32"], (4,), optional=True),)),
    typed(
        "sequence",
        "FP32",
        (1,),
        scheduling=SequenceBatching(controls=(ControlInput("START", "start", DTYPES["INT32"]),)),
    ),
    typed(
        "sequence_of_texts",
        "FP32",
        (1,),
        scheduling=SequenceBatching(controls=(ControlInput("ID", "corrid", DTYPES["BYTES"]),)),
    ),
    typed("na.me-of_1", "FP32", (1,)),
    typed(
        "markup",
        "FP32",
        (1,),
        inputs=(InputSpec("</script><b>'\"%s\\IN", DTYPES["FP32"], (1,)),),
        outputs=(OutputSpec("</script><b>'\"%s\\OUT", DTYPES["FP32"], (1,)),),
    ),
]


async def _models_site(models: Any = MODELS, settings: OpenApiSettings | None = None) -> Site:
    plane = await plane_of(models)
    routes = Routes()
    V2Http(plane).add_to(routes)
    OpenApi(plane, routes, settings).add_to(routes)
    return Site(routes)


@pytest.fixture(scope="module")
def models_server() -> Iterator[Serving]:
    with serving(_models_site) as running:
        yield running


def document_of(server: Serving, query: str = "") -> dict[str, Any]:
    answer = ask(server.port, "GET", f"/openapi.json{query}")
    assert answer.status == 200, answer
    assert answer.fields["content-type"] == "application/json"
    return json.loads(answer.body)  # type: ignore[no-any-return]


def test_every_model_has_an_operation_that_is_valid(models_server: Serving) -> None:
    document = document_of(models_server)
    check_document(document)
    assert document["x-headrace-models"] == {"shown": len(MODELS), "loaded": len(MODELS)}
    for config, _ in MODELS:
        operation = document["paths"][f"/v2/models/{config.name}/infer"]["post"]
        assert operation["x-headrace-model"]["name"] == config.name


def validator(document: dict[str, Any], schema: dict[str, Any]) -> Any:
    return jsonschema_rs.Draft202012Validator({**schema, "components": document["components"]})


@pytest.mark.parametrize("name", [config.name for config, _ in MODELS])
def test_the_example_of_a_model_works_as_it_is(models_server: Serving, name: str) -> None:
    document = document_of(models_server, f"?model={name}")
    operation = document["paths"][f"/v2/models/{name}/infer"]["post"]
    source = operation["x-codeSamples"][0]["source"]
    command = source.replace("http://localhost:8000", f"http://127.0.0.1:{models_server.port}")
    answer = json.loads(subprocess.run(["sh", "-c", command], capture_output=True, check=True, timeout=30).stdout)
    assert "error" not in answer and answer["model_name"] == name and answer["outputs"]
    good = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert validator(document, good).is_valid(answer), answer
    request = operation["requestBody"]["content"]["application/json"]
    assert validator(document, request["schema"]).is_valid(operation["x-headrace-example"]["body"])
    if name.startswith("large_"):
        assert len(source) < 1000
    else:
        assert request["example"] == operation["x-headrace-example"]["body"]


def test_the_schema_of_a_model_refuses_what_the_model_refuses(models_server: Serving) -> None:
    document = document_of(models_server)
    content = document["paths"]["/v2/models/of_int8/infer"]["post"]["requestBody"]["content"]["application/json"]
    schema = validator(document, content["schema"])
    right = {"name": "IN", "datatype": "INT8", "shape": [2, 2, 3], "data": [1] * 12}
    for change, valid in (
        ({}, True),
        ({"data": [[[1] * 3] * 2] * 2}, True),
        ({"name": "OTHER"}, False),
        ({"datatype": "FP32"}, False),
        ({"shape": [2, 3]}, False),
        ({"shape": [2, 2, 4]}, False),
        ({"shape": [65, 2, 3]}, False),
        ({"data": [1] * 5}, False),
        ({"data": [128] * 12}, False),
        ({"data": ["1"] * 12}, False),
    ):
        request = {"inputs": [right | change]}
        assert schema.is_valid(request) is valid, change
        answer = ask(models_server.port, "POST", "/v2/models/of_int8/infer", json.dumps(request).encode())
        assert (answer.status == 200) is valid, (change, answer)
    assert not schema.is_valid({"inputs": []})
    assert not schema.is_valid({"inputs": [right, right]})


@in_loop
async def test_models_of_files_work_too(tmp_path: Path) -> None:
    """An ONNX model, Python models, and one that answers many times."""
    engine = open_engine(EngineSettings(repositories=(make_models(tmp_path),), gpus=0))
    await engine.start()
    try:
        document = OpenApi(engine.plane, Routes())._current()
        paths = json.loads(document.text)["paths"]
    finally:
        await engine.close(1.0)
    assert "/v2/models/sums/infer" in paths
    repeat = paths["/v2/models/repeat/generate_stream"]["post"]
    assert repeat["x-headrace-example"]["body"] == {"IN": [0]}
    assert "text/event-stream" in repeat["responses"]["200"]["content"]


# Kept until models change, and bounded


def _api(plane: DataPlane, **settings: Any) -> OpenApi:
    routes = Routes()
    api = OpenApi(plane, routes, OpenApiSettings(**settings))
    api.add_to(routes)
    return api


@in_loop
async def test_the_document_is_made_again_only_when_models_change() -> None:
    plane = await plane_of([typed("one", "FP32", (1,)), typed("two", "FP32", (1,))])
    other = await plane_of([typed("two", "FP32", (2,))])
    api = _api(plane)
    first = api._current()
    assert api._current() is first
    kept = api._cached_entries["one"]
    plane._models["two"] = other._models["two"]
    second = api._current()
    assert second is not first and second.tag != first.tag
    assert api._cached_entries["one"] is kept
    del plane._models["one"]
    assert "/v2/models/one/infer" not in json.loads(api._current().text)["paths"]
    assert list(api._cached_entries) == ["two"]


def test_many_models_are_bounded_and_any_can_be_requested() -> None:
    models = [typed(f"m{number:03}", "FP32", (1,)) for number in range(300)]
    with serving(partial(_models_site, models, OpenApiSettings(models=50))) as server:
        document = document_of(server)
        assert document["x-headrace-models"] == {"shown": 50, "loaded": 300}
        assert "/v2/models/m299/infer" not in document["paths"]
        assert "/v2/models/m299/infer" in document_of(server, "?model=m299")["paths"]


@in_loop
async def test_the_descriptions_are_bounded_in_bytes() -> None:
    api = _api(await plane_of([typed(f"m{number}", "FP32", (1,)) for number in range(20)]), model_bytes=10_000)
    shown = json.loads(api._current().text)["x-headrace-models"]["shown"]
    assert 1 <= shown < 20


@in_loop
async def test_models_can_be_kept_to_oneself() -> None:
    plane = await plane_of([typed("secret", "FP32", (1,))])
    api = _api(plane, show_models=False)
    assert b"secret" not in api._current().text
    assert b"secret" not in api._of_model("secret").text and api._of_model("nothing").text == api._current().text


def test_an_etag_saves_the_body(models_server: Serving) -> None:
    first = ask(models_server.port, "GET", "/openapi.json")
    field = b"if-none-match: " + first.fields["etag"].encode()
    second = ask(models_server.port, "GET", "/openapi.json", fields=(field,))
    assert (second.status, second.body) == (304, b"")
    assert ask(models_server.port, "GET", "/openapi.json", fields=(b'if-none-match: "x"',)).status == 200


def test_it_may_be_compressed(models_server: Serving) -> None:
    plain = ask(models_server.port, "GET", "/openapi.json").body
    for _ in range(2):
        answer = ask(models_server.port, "GET", "/openapi.json", fields=(b"accept-encoding: gzip",))
        assert answer.fields["content-encoding"] == "gzip" and len(answer.body) < len(plain) / 4
        assert gzip.decompress(answer.body) == plain


@pytest.mark.parametrize(
    ("query", "status"),
    [("?model=nothing", 404), ("?model=..", 400), ("?model=", 400), ("?model=%ff", 400), ("?x=%ff", 400)],
)
def test_queries_that_cannot_be_answered(models_server: Serving, query: str, status: int) -> None:
    answer = ask(models_server.port, "GET", f"/openapi.json{query}")
    assert answer.status == status and answer.error


def test_other_queries_do_not_matter(models_server: Serving) -> None:
    assert ask(models_server.port, "GET", "/openapi.json?x=1&y").status == 200
