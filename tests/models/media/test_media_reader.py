# SPDX-License-Identifier: Apache-2.0
"""Media behind URLs, from real servers: what comes is pixels, what goes wrong is InvalidArgument, what stays is nothing."""

from __future__ import annotations

import asyncio
import base64
import os
import threading
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
from media_files import data_url, image, long_gif, png_header, video
from store_stub import StoreStub
from web_stub import Handler, WebStub, dripping, endless, mute, redirect, reply, serve

from headrace.core.errors import InvalidArgument, ResourceExhausted, Unavailable
from headrace.core.generation import PromptImage, PromptVideo
from headrace.models.media.decoding import decode_content, parse_data_url
from headrace.models.media.reader import MediaReader
from headrace.models.media.settings import MediaSettings
from headrace.models.storage.credentials import CloudCredentials
from support.waiting import eventually, eventually_async

A = TypeVar("A")
HOST = "127.0.0.1"


@pytest.fixture
def settings(tmp_path: Path) -> MediaSettings:
    (tmp_path / "temporary").mkdir()
    return MediaSettings(
        private_hosts=(HOST,),
        temporary_folder=tmp_path / "temporary",
        fetch_seconds=120,
        idle_seconds=120,
        image_bytes=1_000_000,
        video_bytes=2_000_000,
        image_pixels=1_000_000,
    )


@pytest.fixture
def web() -> Iterator[WebStub]:
    with WebStub() as stub:
        yield stub


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def run(work: Coroutine[Any, Any, A]) -> A:
    return asyncio.run(work)


async def read(settings: MediaSettings, url: str, way: str = "item", **more: Any) -> PromptImage | PromptVideo:
    reader = MediaReader(settings, more.pop("credentials", None))
    try:
        return await getattr(reader, way)(url, **more)
    finally:
        reader.close()


def refused(settings: MediaSettings, url: str, way: str = "item", **more: Any) -> str:
    with pytest.raises(InvalidArgument) as caught:
        run(read(settings, url, way, **more))
    expect_no_files(settings)
    return caught.value.message


def expect_no_files(settings: MediaSettings) -> None:
    """Nothing is left behind, once a thread whose caller went away has cleared up."""
    folder = settings.temporary_folder
    assert folder is not None
    eventually(lambda: not os.listdir(folder), message=f"an empty {folder}")


@pytest.mark.parametrize(
    ("mime", "content"),
    [
        ("image/png", image("PNG")),
        ("image/jpeg", image("JPEG")),
        ("image/jpg", image("JPEG")),
        ("IMAGE/WebP", image("WEBP")),
        ("image/gif", image("GIF")),
        ("image/bmp", image("BMP")),
        ("image/tiff", image("TIFF")),
        ("image/png;charset=utf-8", image("PNG")),
        ("image/png", image("JPEG")),  # the content counts
    ],
)
def test_images_in_data_urls(mime: str, content: bytes, settings: MediaSettings) -> None:
    result = run(read(settings, data_url(content, mime)))
    assert isinstance(result, PromptImage)
    assert result.pixels.shape == (6, 8, 3)


@pytest.mark.parametrize("mime", ["video/mp4", "video/quicktime", "video/mov"])
def test_videos_in_data_urls(mime: str, settings: MediaSettings) -> None:
    result = run(read(settings, data_url(video(), mime), "clip", fps=5, max_frames=4))
    assert isinstance(result, PromptVideo)
    assert result.frames.shape == (4, 16, 32, 3)


def test_names_and_types_of_http_do_not_matter(web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a.mp4"] = serve(image("JPEG"), content_type="application/octet-stream")
    web.routes["/b"] = serve(video("webm", "libvpx"), content_type="image/png")
    assert isinstance(run(read(settings, web.url("/a.mp4?x=.avi#y"))), PromptImage)
    assert isinstance(run(read(settings, web.url("/b"))), PromptVideo)
    expect_no_files(settings)


def test_many_concurrent_reads(web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a"] = serve(image("PNG"))

    async def read_all() -> list[PromptImage]:
        reader = MediaReader(replace(settings, threads=4))
        try:
            return await asyncio.gather(*(reader.picture(web.url("/a")) for _ in range(40)))
        finally:
            reader.close()

    assert len(run(read_all())) == 40
    expect_no_files(settings)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (png_header(10**9, 10**9), "more than 1000000"),
        (image("JPEG", (64, 64))[:400], "damaged or cut off"),
        (b"PK\x03\x04" + b"\0" * 100, "none of PNG"),
        (b"<html>not found</html>", "none of PNG"),
        (b"", "none of PNG"),
        (b"#EXTM3U\nhttp://169.254.169.254/\n", "none of PNG"),
        (b"\0" * 1_000_001, "larger than 1000000"),
        (video(), "is a video, where an image is expected"),
    ],
)
def test_invalid_images_are_reported(content: bytes, said: str, web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a.png"] = serve(content, content_type="image/png")
    message = refused(settings, web.url("/a.png?sig=s3cr3t"), "picture")
    assert said in message
    assert "s3cr3t" not in message


def test_an_image_where_a_video_is_expected(web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a"] = serve(image())
    assert "is an image, where a video is expected" in refused(settings, web.url("/a"), "clip")
    assert "where a video is expected" in refused(settings, data_url(image(), "image/png"), "clip")
    assert "where an image is expected" in refused(settings, data_url(video(), "video/mp4"), "picture")


def test_an_image_may_not_be_as_large_as_a_video(web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a"] = serve(image("PNG") + b"\0" * 1_000_000)
    assert "1000000 are the most for an image" in refused(settings, web.url("/a"))


def test_a_gif_of_very_many_frames(web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a.gif"] = serve(long_gif(1_000_000))
    result = run(read(replace(settings, image_bytes=50_000_000), web.url("/a.gif"), "picture"))
    assert isinstance(result, PromptImage)
    assert result.pixels.shape == (2, 2, 3)


def test_an_endless_video_is_cut_off(web: WebStub, settings: MediaSettings) -> None:
    web.routes["/live.mp4"] = endless(head=video()[:64])
    assert "larger than 2000000 bytes" in refused(settings, web.url("/live.mp4"), "clip")


def test_a_slow_loris_and_a_mute_server(web: WebStub, stop: threading.Event, settings: MediaSettings) -> None:
    web.routes["/drip"], web.routes["/mute"] = dripping(stop), mute(stop)
    quick = replace(settings, fetch_seconds=0.5, idle_seconds=60)
    assert "longer than 0.5 seconds" in refused(quick, web.url("/drip"))
    assert "too slow" in refused(replace(settings, fetch_seconds=60, idle_seconds=0.3), web.url("/mute"))


@pytest.mark.parametrize(
    "target",
    ["http://127.0.0.1:{port}/secret.png", "http://169.254.169.254/latest", "file:///etc/passwd", "s3://bkt/secret"],
)
def test_redirects_to_forbidden_addresses(target: str, web: WebStub, settings: MediaSettings) -> None:
    web.routes["/secret.png"] = serve(image())
    web.routes["/a.png"] = redirect(target.format(port=web.port))
    # The name is listed, the address that it has is not.
    message = refused(replace(settings, private_hosts=("localhost",)), web.url("/a.png", "localhost"))
    assert "redirects to" in message
    assert "passwd" not in message and "169.254" not in message and "secret" not in message
    assert [path for path, _ in web.seen] == ["/a.png"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "2130706433"])
def test_private_addresses_without_a_list(host: str, web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a.png"] = serve(image())
    refused(replace(settings, private_hosts=()), web.url("/a.png", host))
    assert web.seen == []


def test_only_listed_hosts(web: WebStub, settings: MediaSettings) -> None:
    web.routes["/a.png"] = serve(image())
    assert "may not fetch from" in refused(replace(settings, allow_hosts=("*.example.com",)), web.url("/a.png"))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("data:application/pdf;base64,AAAA", "'application/pdf' are not read"),
        ("data:image/svg+xml;base64,AAAA", "are not read"),
        ("data:image/png,AAAA", "data:<MIME type>;base64"),
        ("data:;base64,AAAA", "are not read"),
        ("data:image/png;base64", "data:<MIME type>;base64"),
        ("data:image/png;base64,", "no content"),
        ("data:image/png;base64,****", "not base64"),
        ("data:image/png;base64,AAA", "not base64"),
        ("data:image/png;base64,AAAA", "none of PNG"),
        ("hf_model://org/name", "are not read here"),
        ("gopher://x/y", "are not read here"),
        ("/etc/passwd", "own disk"),
        ("file:///etc/passwd", "own disk"),
        ("", "empty"),
        ("cat.png", "own disk"),
    ],
)
def test_urls_that_are_not_read(url: str, said: str, settings: MediaSettings) -> None:
    assert said in refused(settings, url)


def test_a_data_url_is_measured_before_it_is_decoded(settings: MediaSettings) -> None:
    url = "data:image/png;base64," + "A" * 4_000_000
    assert "3000000 bytes; 1000000 are the most" in refused(settings, url)
    assert len(url) > 1_000_000 > len(refused(settings, url))


def test_data_urls_may_be_written_in_several_ways() -> None:
    plain = base64.b64encode(bytes(range(250))).decode()
    for payload in (
        plain,
        plain.replace("+", "%2B").replace("/", "%2F").replace("=", "%3D"),
        plain[:76] + "\n" + plain[76:],
    ):
        assert decode_content(parse_data_url(f"data:image/png;base64,{payload}"), 250) == bytes(range(250))
    with pytest.raises(InvalidArgument, match="are the most"):
        decode_content(parse_data_url(f"data:image/png;base64,{plain}"), 240)


@pytest.mark.parametrize("scheme", ["s3", "aws", "gs", "az", "azure", "cs", "seaweedfs"])
def test_object_stores_are_refused_without_credentials(scheme: str, settings: MediaSettings) -> None:
    message = refused(settings, f"{scheme}://bkt/a.png")
    assert message.startswith(f"Cloud-storage URIs are not supported by the inference service: {scheme}://bkt/a.png")


def test_object_stores_with_a_workspaces_credentials(settings: MediaSettings) -> None:
    with StoreStub(
        {"bkt": {"in/a.png": image(), "in/b.mp4": video(), "big": b"\0" * 2_000_001}, "theirs": {"a": image()}}
    ) as store:
        credentials = CloudCredentials.from_metadata(store.metadata("bkt"))
        more = {"credentials": credentials}
        assert isinstance(run(read(settings, "s3://bkt/in/a.png", "picture", **more)), PromptImage)
        assert isinstance(run(read(settings, "aws://bkt/in/b.mp4", **more)), PromptVideo)
        assert "no credentials for the aws bucket theirs" in refused(settings, "s3://theirs/a", **more)
        assert "there is nothing at s3://bkt/none" in refused(settings, "s3://bkt/none", **more)
        assert "is a folder of a bucket" in refused(settings, "s3://bkt/in", **more)
        assert "more than 2000000 bytes" in refused(settings, "s3://bkt/big", **more)
        assert "not supported" in refused(settings, "cs://bkt/in/a.png", **more)
        assert not any("theirs" in path for path, _ in store.seen)


def test_files_of_folders_that_are_opened(settings: MediaSettings, tmp_path: Path) -> None:
    inside = tmp_path / "in"
    inside.mkdir()
    (inside / "a.png").write_bytes(image())
    (tmp_path / "secret.png").write_bytes(image())
    (inside / "link.png").symlink_to(tmp_path / "secret.png")
    (inside / "big").write_bytes(b"\0" * 2_000_001)
    os.mkfifo(inside / "pipe")
    opened = replace(settings, folders=(inside,))
    for url in (f"{inside}/a.png", f"file://{inside}/a.png", f"{inside}/../in/a.png"):
        assert isinstance(run(read(opened, url)), PromptImage)
    outside = [f"{tmp_path}/secret.png", f"{inside}/../secret.png", f"{inside}/link.png", f"{inside}/none", str(inside)]
    for url in (*outside, f"{inside}/pipe", f"{tmp_path}/in2/a.png"):
        assert "is not a file in a folder" in refused(opened, url)
    assert "2000000 are the most" in refused(opened, f"{inside}/big")


def test_cancelling_leaves_no_file_and_no_thread_at_work(web: WebStub, settings: MediaSettings) -> None:
    started, let_go = threading.Event(), threading.Event()

    def half(handler: Handler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        handler.wfile.write(b"x" * 10)
        started.set()
        let_go.wait(240)

    web.routes["/a"] = half

    async def give_up() -> None:
        reader = MediaReader(replace(settings, threads=1))
        task = asyncio.create_task(reader.picture(web.url("/a")))
        await asyncio.to_thread(started.wait, 120)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # The only thread is free again, long before the server would have been given up on.
        async with asyncio.timeout(30):
            assert (await reader.picture(data_url(image(), "image/png"))).pixels.shape == (6, 8, 3)
        reader.close()

    run(give_up())
    let_go.set()
    expect_no_files(settings)


def test_no_more_than_may_wait(web: WebStub, stop: threading.Event, settings: MediaSettings) -> None:
    web.routes["/a"] = lambda handler: (stop.wait(240), reply(handler, image()))[1]

    async def crowd() -> None:
        reader = MediaReader(replace(settings, threads=1, waiting=1))
        tasks = [asyncio.create_task(reader.picture(web.url("/a"))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ResourceExhausted):
            await reader.picture(web.url("/a"))
        stop.set()
        assert len(await asyncio.gather(*tasks)) == 2
        reader.close()
        with pytest.raises(Unavailable, match="stopping"):
            await reader.picture(web.url("/a"))

    run(crowd())


def test_closing_ends_what_is_read_and_what_waits(web: WebStub, stop: threading.Event, settings: MediaSettings) -> None:
    web.routes["/a"] = mute(stop)

    async def stop_serving() -> None:
        reader = MediaReader(replace(settings, threads=1))
        tasks = [asyncio.create_task(reader.picture(web.url("/a"))) for _ in range(3)]
        await eventually_async(lambda: web.seen)
        reader.close()
        async with asyncio.timeout(30):
            results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable] * 3

    run(stop_serving())
    expect_no_files(settings)


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), 1e9])
def test_rates_that_cannot_be(fps: float, settings: MediaSettings) -> None:
    assert "fps" in refused(settings, data_url(video(), "video/mp4"), "clip", fps=fps)


def test_no_frames_cannot_be(settings: MediaSettings) -> None:
    assert "max_frames" in refused(settings, data_url(video(), "video/mp4"), "clip", max_frames=0)
