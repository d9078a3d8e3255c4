# SPDX-License-Identifier: Apache-2.0
"""Streams of results against a real server; and that leaving one, or cancelling a request, reaches the server."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from client_servers import HeldSite, RealServer

from headrace.client import AsyncClient, Client, Output
from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidArgument, NotFound, Unimplemented
from support.serving import Serving, serving


def story(count: int, text: Any = "so it goes") -> dict[str, Any]:
    return {"text": [text], "count": np.array([count], np.int32)}


def test_results_come_in_order_with_their_types(client: Any) -> None:
    results = list(client.infer_stream("story", story(3, "naïve"), request_id="r1"))
    assert [result["place"].tolist() for result in results] == [[0, 3], [1, 3], [2, 3]]
    for result in results:
        assert result["word"].tolist() == ["naïve".encode()]
        assert result["place"].dtype == np.int32
        assert result["place"].shape == (2,)
        assert (result.model_name, result.model_version, result.request_id) == ("story", "1", "r1")


def test_no_results_at_all(client: Any) -> None:
    assert list(client.infer_stream("story", story(0))) == []


def test_a_model_with_one_result_streams_that(client: Any) -> None:
    (result,) = client.infer_stream("echo", {"INPUT0": np.array([[1, 2, 3, 4], [5, 6, 7, 8]], np.float32)})
    assert result["OUTPUT0"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_only_the_outputs_that_are_wanted(client: Any) -> None:
    results = list(client.infer_stream("story", story(2), outputs=["place"]))
    assert [list(result) for result in results] == [["place"], ["place"]]


def test_an_error_in_the_middle_follows_the_earlier_results(real: RealServer) -> None:
    for url in (real.http, real.grpc):
        with Client(url) as client:
            seen = []
            with pytest.raises(HeadraceError, match="the story broke off"):
                for result in client.infer_stream("story", story(-2)):
                    seen.append(result["place"][0])
            assert seen == [0, 1]
            assert client.live()


def test_an_error_at_the_beginning_is_of_its_class(client: Any) -> None:
    with pytest.raises(NotFound, match="nope"):
        client.infer_stream("nope", story(1))
    with pytest.raises(InvalidArgument):
        client.infer_stream("story", {"text": ["a"]})


def test_bytes_that_are_not_text_need_grpc(real: RealServer) -> None:
    with Client(real.http) as client, pytest.raises(InvalidArgument, match="use grpc://"):
        client.infer_stream("story", story(1, b"\xff\xfe"))
    with Client(real.grpc) as client:
        (result,) = client.infer_stream("story", story(1, b"\xff\xfe"))
        assert result["word"].tolist() == [b"\xff\xfe"]


def test_classes_in_a_stream(real: RealServer) -> None:
    wanted = {"inputs": {"INPUT0": np.array([[1, 9, 2, 3]], np.float32)}, "outputs": [Output("OUTPUT0", classes=1)]}
    with Client(real.grpc) as client:
        (result,) = client.infer_stream("echo", **wanted)
        assert result.classes("OUTPUT0")[0][0].label == "dog"
    with Client(real.http) as client, pytest.raises(Unimplemented, match="use grpc://"):
        client.infer_stream("echo", **wanted)


def test_connections_are_used_again_after_a_stream(real: RealServer) -> None:
    with Client(real.http) as client:
        list(client.infer_stream("story", story(2)))
        (idle,) = client._requests._transport._connections._idle  # type: ignore[attr-defined]
        list(client.infer_stream("story", story(2)))
        assert client._requests._transport._connections._idle[0][0] is idle[0]  # type: ignore[attr-defined]


# Leaving.


@pytest.fixture
def held_site() -> Iterator[tuple[HeldSite, Serving]]:
    site = HeldSite()
    with serving(site.site) as server:
        yield site, server


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("how", ["close", "with", "let go"])
def test_leaving_a_stream_reaches_the_server(held_site: tuple[HeldSite, Serving], scheme: str, how: str) -> None:
    site, server = held_site
    with Client(f"{scheme}://127.0.0.1:{server.port}") as client:
        results = client.infer_stream("m", {})
        assert next(results)["y"].tolist() == [1]
        if how == "close":
            results.close()
            assert list(results) == []
        elif how == "with":
            with results:
                pass
        del results
        gc.collect()
        site.wait(site.gone)


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_leaving_an_async_stream_reaches_the_server(held_site: tuple[HeldSite, Serving], scheme: str) -> None:
    site, server = held_site

    async def main() -> None:
        async with AsyncClient(f"{scheme}://127.0.0.1:{server.port}") as client:
            stream = client.infer_stream("m", {})
            assert (await anext(stream))["y"].tolist() == [1]
            await stream.aclose()
            await asyncio.to_thread(site.wait, site.gone)

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["http", "grpc"])
@pytest.mark.parametrize("what", ["infer", "stream"])
def test_a_cancelled_task_takes_its_request_with_it(
    held_site: tuple[HeldSite, Serving], scheme: str, what: str
) -> None:
    site, server = held_site

    async def main() -> None:
        async with AsyncClient(f"{scheme}://127.0.0.1:{server.port}") as client:

            async def ask() -> None:
                if what == "infer":
                    await client.infer("m", {})
                async for _ in client.infer_stream("m", {}):
                    pass

            task = asyncio.create_task(ask())
            await asyncio.to_thread(site.wait, site.arrived)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(site.wait, site.gone)

    asyncio.run(main())


@pytest.mark.parametrize("scheme", ["http", "grpc"])
def test_a_timeout_takes_its_request_with_it(held_site: tuple[HeldSite, Serving], make: Any, scheme: str) -> None:
    site, server = held_site
    with make(f"{scheme}://127.0.0.1:{server.port}") as client:
        assert client.live()  # the time is not for the connection, but for the request to arrive in
        with pytest.raises(DeadlineExceeded, match=r"model 'm': no answer within the timeout of 1 s") as caught:
            client.infer("m", {}, timeout=1)
        assert caught.value.request_id
        site.wait(site.arrived)
        site.wait(site.gone)
