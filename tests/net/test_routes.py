# SPDX-License-Identifier: Apache-2.0
"""Which handler a request gets: exact paths before patterns before mounts; and how much of what clients ask is kept."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from headrace.net.http import routes as module
from headrace.net.http.exchange import Body, Exchange
from headrace.net.http.heads import Fields, RequestHead, ResponseHead
from headrace.net.http.routes import KnownHead, Routes


class RecordedExchange(Exchange):
    """Keeps the answer that a route gives by itself."""

    def __init__(self) -> None:
        self.status = 0
        self.content = b""
        self.fields: dict[bytes, bytes] = {}

    @property
    def started(self) -> bool:
        return self.status != 0

    def respond(self, head: ResponseHead, body: Body = b"", extra: Fields = ()) -> None:
        self.status = head.status
        self.content = bytes(body) if isinstance(body, bytes | bytearray | memoryview) else b"".join(body)
        self.fields = dict((*head.fields, *extra))


def handler(name: str) -> Callable[[Exchange], None]:
    def handle(exchange: Exchange) -> None:
        raise AssertionError("not to be called")

    handle.__name__ = name
    return handle


def name_of(routes: Routes, method: str, path: str) -> str:
    return getattr(routes.find(method.encode(), path.encode())[0].handler, "__name__", "?")


def answer(routes: Routes, method: str, path: bytes) -> RecordedExchange:
    exchange = RecordedExchange()
    routes.find(method.encode(), path)[0].handler(exchange)
    return exchange


def error_of(routes: Routes, path: bytes = b"/nowhere") -> str:
    result = answer(routes, "GET", path)
    assert result.status == 404
    return str(json.loads(result.content)["error"])


@pytest.fixture
def routes() -> Routes:
    routes = Routes()
    routes.add("GET", "/exact", handler("exact"))
    routes.add("POST", "/exact", handler("posted"))
    routes.add("GET", "/models/{name}", handler("model"))
    routes.add("GET", "/models/{name}/versions/{version}", handler("version"))
    routes.add("POST", "/models/{name}/infer", handler("infer"), streams_body=True)
    routes.add("GET", "/models/special", handler("special"))
    routes.mount("/admin", handler("admin"))
    routes.mount("/admin/deep/", handler("deep"))
    return routes


class TestFind:
    def test_exact(self, routes: Routes) -> None:
        route, params = routes.find(b"GET", b"/exact")
        assert (route.handler.__name__, route.streams_body, params) == ("exact", False, ())

    @pytest.mark.parametrize(
        "path", ["/exact/", "//exact", "/EXACT", "/exact%20", "/", "", "*", "exact", "/models/", "/models"]
    )
    def test_nothing_else_is_the_same_path(self, routes: Routes, path: str) -> None:
        assert answer(routes, "GET", path.encode()).status in (404, 405)

    def test_parameters(self, routes: Routes) -> None:
        assert routes.find(b"GET", b"/models/a/versions/2")[1] == ("a", "2")

    def test_parameters_are_decoded(self, routes: Routes) -> None:
        assert routes.find(b"GET", b"/models/a%2Fb%20%C3%A9")[1] == ("a/b é",)

    def test_an_exact_path_takes_precedence_over_a_pattern(self, routes: Routes) -> None:
        assert name_of(routes, "GET", "/models/special") == "special"
        assert name_of(routes, "GET", "/models/other") == "model"

    def test_a_method_may_be_found_in_a_later_candidate(self) -> None:
        routes = Routes()
        routes.add("GET", "/a/b", handler("exact"))
        routes.add("POST", "/a/{x}", handler("pattern"))
        assert name_of(routes, "POST", "/a/b") == "pattern"

    def test_streams_body(self, routes: Routes) -> None:
        assert routes.find(b"POST", b"/models/a/infer")[0].streams_body
        assert routes.find(b"GET", b"/admin")[0].streams_body

    def test_a_placeholder_is_one_whole_segment(self) -> None:
        routes = Routes()
        routes.add("GET", "/f/{file}.txt", handler("text"))
        assert routes.find(b"GET", b"/f/a.txt")[1] == ("a",)
        assert answer(routes, "GET", b"/f/a/b.txt").status == 404
        assert answer(routes, "GET", b"/f/atxt").status == 404, "a point is a point"

    @pytest.mark.parametrize("path", ["/a/{Name}", "/a/{}", "/a/{b", "/a/b}{c}", "/a/{b-c}"])
    def test_a_placeholder_that_is_none_is_a_mistake(self, path: str) -> None:
        with pytest.raises(ValueError, match="placeholder"):
            Routes().add("GET", path, handler("x"))


class TestHead:
    def test_get_answers_head(self, routes: Routes) -> None:
        assert name_of(routes, "HEAD", "/exact") == "exact"
        assert name_of(routes, "HEAD", "/models/a") == "model"

    def test_post_does_not(self) -> None:
        routes = Routes()
        routes.add("POST", "/x", handler("x"))
        assert answer(routes, "HEAD", b"/x").status == 405

    @pytest.mark.parametrize("order", [("GET", "HEAD"), ("HEAD", "GET")])
    def test_an_own_handler_for_head_stays(self, order: tuple[str, str]) -> None:
        routes = Routes()
        for method in order:
            routes.add(method, "/x", handler(method))
        assert name_of(routes, "HEAD", "/x") == "HEAD"
        assert name_of(routes, "GET", "/x") == "GET"

    def test_replacing_get_replaces_its_head(self) -> None:
        routes = Routes()
        routes.add("GET", "/x", handler("old"))
        routes.add("GET", "/x", handler("new"))
        assert name_of(routes, "HEAD", "/x") == "new"


class TestMounts:
    @pytest.mark.parametrize(
        ("path", "name"),
        [
            ("/admin", "admin"),
            ("/admin/", "admin"),
            ("/admin/x/y", "admin"),
            ("/admin/deep", "deep"),
            ("/admin/deep/x", "deep"),
        ],
    )
    def test_everything_below(self, routes: Routes, path: str, name: str) -> None:
        for method in ("GET", "POST", "DELETE", "OPTIONS"):
            assert name_of(routes, method, path) == name

    @pytest.mark.parametrize("path", [b"/administrator", b"/admi", b"//admin", b"/Admin", b"/%61dmin"])
    def test_nothing_beside(self, routes: Routes, path: bytes) -> None:
        assert answer(routes, "GET", path).status == 404

    def test_a_route_takes_precedence_over_a_mount(self, routes: Routes) -> None:
        routes.add("GET", "/admin/own", handler("own"))
        assert name_of(routes, "GET", "/admin/own") == "own"
        assert name_of(routes, "POST", "/admin/own") == "admin", "a mount answers what no route answers"

    def test_at_the_root(self) -> None:
        routes = Routes()
        routes.mount("/", handler("root"))
        assert name_of(routes, "GET", "/anything") == "root"
        assert name_of(routes, "GET", "/") == "root"
        assert answer(routes, "GET", b"*").status == 405
        assert answer(routes, "GET", b"example.com:443").status == 404


class TestOwnAnswers:
    def test_404_names_the_paths_if_they_are_few(self) -> None:
        routes = Routes()
        assert error_of(routes) == "Not Found: this server does not have this path"
        routes.add("GET", "/metrics", handler("metrics"))
        assert error_of(routes) == "Not Found: this server has only GET /metrics"
        routes.add("POST", "/models/{name}", handler("one"))
        assert error_of(routes) == "Not Found: this server has only GET /metrics, POST /models/{}"
        for number in range(9):
            routes.add("GET", f"/page/{number}", handler("page"))
        assert error_of(routes) == "Not Found: this server does not have this path"

    def test_404_leads_to_the_description_of_the_api(self) -> None:
        routes = Routes()
        routes.add("GET", "/openapi.json", handler("api"))
        routes.add("GET", "/metrics", handler("metrics"))
        expected = "Not Found: this server does not have this path; GET /openapi.json lists those it has"
        assert error_of(routes) == expected
        assert error_of(routes, b'/<script>"') == expected, "what a client sends is not repeated"

    def test_405_names_every_method_of_the_path(self, routes: Routes) -> None:
        result = answer(routes, "DELETE", b"/exact")
        assert (result.status, result.fields[b"allow"]) == (405, b"GET, HEAD, POST")
        assert answer(routes, "PUT", b"/models/special").fields[b"allow"] == b"GET, HEAD"

    def test_options_of_the_server(self) -> None:
        assert answer(Routes(), "OPTIONS", b"*").status == 204
        assert answer(Routes(), "GET", b"*").fields[b"allow"] == b"OPTIONS"

    @pytest.mark.parametrize("path", [b"/models/%ff", b"/models/%C3%28", b"/models/%ED%A0%80"])
    def test_400_for_a_parameter_that_is_not_text(self, routes: Routes, path: bytes) -> None:
        result = answer(routes, "GET", path)
        assert result.status == 400
        assert "percent" in json.loads(result.content)["error"]
        assert answer(routes, "DELETE", path).status == 405

    @pytest.mark.parametrize(("path", "param"), [(b"/models/%zz", "%zz"), (b"/models/%", "%"), (b"/models/%4", "%4")])
    def test_a_percent_sign_that_codes_nothing_is_itself(self, routes: Routes, path: bytes, param: str) -> None:
        assert routes.find(b"GET", path)[1] == (param,)


class TestMemory:
    def test_a_path_is_looked_up_once(self, routes: Routes) -> None:
        assert routes.find(b"GET", b"/models/a") is routes.find(b"GET", b"/models/a")

    def test_methods_are_kept_apart(self, routes: Routes) -> None:
        assert name_of(routes, "GET", "/exact") == "exact"
        assert name_of(routes, "POST", "/exact") == "posted"
        assert name_of(routes, "GET", "/exact") == "exact"

    def test_the_number_of_paths_is_bounded(self, routes: Routes) -> None:
        for number in range(3 * module._REMEMBERED_PATHS):
            routes.find(b"GET", b"/models/%d" % number)
            routes.find(b"GET", b"/nowhere/%d" % number)
        assert len(routes._remembered) <= module._REMEMBERED_PATHS
        assert routes.find(b"GET", b"/models/7")[1] == ("7",)

    def test_their_bytes_are_bounded(self, routes: Routes) -> None:
        for number in range(100):
            long = b"/models/" + b"x" * 60_000 + b"%d" % number
            assert routes.find(b"GET", long)[1][0].endswith(str(number))
            routes.find(b"GET", b"/admin/" + long)
        assert sum(len(path) for _, path in routes._remembered) < 10_000

    def test_unknown_paths_are_not_kept(self, routes: Routes) -> None:
        for number in range(100):
            routes.find(b"GET", b"/nowhere/%d" % number)
            routes.find(b"DELETE", b"/exact")
        assert len(routes._remembered) == 0

    def test_a_new_route_is_used_immediately(self, routes: Routes) -> None:
        assert name_of(routes, "GET", "/models/late") == "model"
        routes.add("GET", "/models/late", handler("late"))
        assert name_of(routes, "GET", "/models/late") == "late"
        assert name_of(routes, "GET", "/x/y") != "mounted"
        routes.mount("/x", handler("mounted"))
        assert name_of(routes, "GET", "/x/y") == "mounted"

    def test_known_heads_are_bounded_and_forgotten_with_the_routes(self, routes: Routes) -> None:
        route, params = routes.find(b"GET", b"/exact")
        head = RequestHead(b"GET", b"/exact", [], version="1.1")
        heads = routes.known_heads(b"http")
        for number in range(3 * module._REMEMBERED_HEADS):
            routes.remember_head(b"http", KnownHead(b"%d" % number, 4, head, route, params, True))
        assert 0 < len(heads) <= module._REMEMBERED_HEADS
        assert routes.known_heads(b"https") == {}
        routes.add("GET", "/new", handler("new"))
        assert heads == {}, "the same table: connections hold on to it"
