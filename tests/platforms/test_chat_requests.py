# SPDX-License-Identifier: Apache-2.0
"""Chat requests: what was said goes out as it was said, and files go with it."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import HeadraceError, InvalidArgument, NotFound, TooLarge
from headrace.platforms.catalogue import load
from headrace.platforms.chat_requests import (
    build_messages,
    check_no_secret,
    field_type,
    fields_to_ask,
    media_url,
    mismatches,
    parse_value,
    prepare,
)

CATALOGUE = load()
COSMOS_RL, PREDICT, DATA = (CATALOGUE[name] for name in ("cosmos-rl", "cosmos-predict2.5", "tao-dataservices"))
TEXT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
PNG = b"\x89PNG\r\n\x1a\n"


def _picture(url: str) -> dict[str, Any]:
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "what is it?"}]
    return {"messages": [{"role": "user", "content": content}]}


def test_skipped_fields_get_their_defaults() -> None:
    assert prepare(TEXT, DATA).body == {**TEXT, "max_tokens": 1024, "top_p": 0.8, "temperature": 0.7}
    assert prepare(TEXT, DATA, {"top_p": None}).body["top_p"] == 0.8
    assert prepare(TEXT, PREDICT).body == {**TEXT, "max_tokens": 77, "guidance": 7, "num_steps": 35, "seed": 0}


def test_the_conversation_is_sent_unchanged() -> None:
    body = {**TEXT, "temperature": 99, "max_tokens": "many", "top_k": 5, "model": "x", "stream": True}
    made = prepare(body, DATA, {"top_p": 3.5}).body
    assert made == {**body, "top_p": 3.5}
    assert prepare(body, DATA, {"temperature": 0}).body["temperature"] == 0
    assert "top_p" not in body


def test_a_field_may_have_another_name() -> None:
    assert "max_tokens" not in prepare({**TEXT, "num_output_frames": 33}, PREDICT).body
    body = prepare({**TEXT, "max_new_tokens": 5}, DATA, {"max_tokens": 6}).body
    assert body["max_tokens"] == 6
    assert "max_new_tokens" not in body
    assert [field.name for field in fields_to_ask({"max_new_tokens": 5, "top_p": 1}, DATA)] == ["temperature"]


def test_unsupported_fields_are_omitted_and_reported() -> None:
    prepared = prepare({**TEXT, "top_p": 0.5}, PREDICT, {"temperature": 0.1})
    assert not {"top_p", "temperature"} & set(prepared.body)
    assert len(prepared.remarks) == 2
    assert not {"top_p", "temperature"} & {field.name for field in fields_to_ask(TEXT, PREDICT)}


def test_ignored_messages_are_reported() -> None:
    messages = [{"role": role, "content": "x"} for role in ("system", "user", "assistant", "user")]
    remarks = " ".join(prepare({"messages": messages}, DATA).remarks)
    assert "only the first message" in remarks
    assert "assistant" in remarks


@pytest.mark.parametrize(
    "body", [{}, {"messages": "x"}, {"messages": ["x"]}, {"messages": []}, {"messages": [{"role": "system"}]}]
)
def test_a_request_without_a_user_message_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match="message"):
        prepare(body, DATA)


def test_a_request_for_another_architecture_is_noticed() -> None:
    assert mismatches(TEXT, DATA, CATALOGUE) == []
    assert mismatches({**TEXT, "guidance": 3, "seed": 1}, PREDICT, CATALOGUE) == []
    (told,) = mismatches({**TEXT, "guidance": 3, "seed": 1}, DATA, CATALOGUE)
    assert told == "guidance, seed: fields of cosmos-predict2.5, and this service runs tao-dataservices"
    for name in ("guidance", "num_steps", "seed", "negative_prompt"):
        assert mismatches({**_picture("http://x/a.png"), name: 1}, COSMOS_RL, CATALOGUE)


def test_cosmos_rl_wants_a_picture_or_a_video() -> None:
    assert mismatches(_picture("http://x/a.png"), COSMOS_RL, CATALOGUE) == []
    second = {"messages": [*TEXT["messages"], *_picture("http://x/a.png")["messages"]]}
    for body in (TEXT, second, {}, {"messages": 3}):
        (told,) = mismatches(body, COSMOS_RL, CATALOGUE)
        assert "only requests with an image or a video" in told


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("temperature", "0.25", 0.25), ("temperature", "2", 2), ("max_tokens", " 12 ", 12), ("top_p", "1e-1", 0.1)],
)
def test_typed_values_are_read(name: str, text: str, value: float) -> None:
    (field,) = (field for field in DATA.fields if field.name == name)
    assert parse_value(field, text) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "2.1"),
        ("temperature", "-1"),
        ("temperature", "nan"),
        ("temperature", "warm"),
        ("temperature", "1_0"),
        ("max_tokens", "1.5"),
        ("max_tokens", "0"),
        ("max_tokens", ""),
        ("max_tokens", "inf"),
        ("max_tokens", "9" * 5000),
    ],
)
def test_values_that_do_not_fit_are_refused_and_not_clamped(name: str, text: str) -> None:
    (field,) = (field for field in DATA.fields if field.name == name)
    with pytest.raises(InvalidArgument, match=f"{name} is a"):
        parse_value(field, text)


def test_fields_are_described_by_type_and_range() -> None:
    kinds = {field.name: field_type(field) for field in (*DATA.fields, *PREDICT.fields)}
    assert kinds["temperature"] == "number from 0 to 2"
    assert kinds["guidance"] == "whole number from 0 to 7"
    assert kinds["num_steps"] == "whole number, at least 1"
    assert kinds["negative_prompt"] == "text"
    negative = PREDICT.fields[-1]
    assert parse_value(negative, " as is ") == " as is "


def test_messages_are_made_of_a_prompt_and_media(tmp_path: Path) -> None:
    assert build_messages("hi", DATA) == [{"role": "user", "content": "hi"}]
    picture = tmp_path / "a.PNG"
    picture.write_bytes(PNG)
    system, user = build_messages("hi", DATA, system="be kind", images=[str(picture)], videos=["https://x/v.mp4"])
    assert system == {"role": "system", "content": "be kind"}
    assert user["content"] == [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + base64.b64encode(PNG).decode()}},
        {"type": "video_url", "video_url": {"url": "https://x/v.mp4"}},
        {"type": "text", "text": "hi"},
    ]


def test_files_in_a_body_are_sent_along(tmp_path: Path) -> None:
    (tmp_path / "a b.jpeg").write_bytes(b"x")
    body = _picture(f"file://{tmp_path}/a%20b.jpeg")
    item = prepare(body, COSMOS_RL).body["messages"][0]["content"][0]
    assert item["image_url"]["url"] == "data:image/jpeg;base64,eA=="
    assert body == _picture(f"file://{tmp_path}/a%20b.jpeg")
    short = {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": str(tmp_path / "v.mkv")}]}]}
    (tmp_path / "v.mkv").write_bytes(b"x")
    item = prepare(short, COSMOS_RL).body["messages"][0]["content"][0]
    assert item["video_url"] == {"url": "data:video/x-matroska;base64,eA=="}


def test_data_uris_are_accepted_by_all_architectures() -> None:
    for arch in (COSMOS_RL, PREDICT, DATA):
        assert media_url("data:image/png;base64,eA==", "image", arch) == "data:image/png;base64,eA=="


@pytest.mark.parametrize(
    ("place", "told"),
    [
        ("s3://b/a.png", "s3:// URLs are not supported"),
        ("ftp://b/a.png", "ftp:// URLs are not supported"),
        ("data:image/gif;base64,eA==", "takes no image of the type 'image/gif'"),
        ("data:video/mp4;base64,eA==", "takes no image of the type 'video/mp4'"),
        ("data:image/png,eA==", "data:<MIME type>;base64"),
        ("data:image/png;base64", "data:<MIME type>;base64"),
        ("a.gif", "takes no image with the extension 'gif'"),
        ("a.mp4", "it takes png, jpg, jpeg, webp"),
        ("/etc/passwd", "takes no image with the extension ''"),
        ("none.png", "cannot be read: No such file"),
        ("a\0.png", "it is not a path"),
    ],
)
def test_media_that_cannot_be_sent_are_reported(place: str, told: str) -> None:
    with pytest.raises(HeadraceError) as caught:
        media_url(place, "image", PREDICT)
    assert told in caught.value.message


def test_only_files_of_some_size_are_read(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(b"123456")
    assert media_url(str(path), "image", DATA, 6).endswith(base64.b64encode(b"123456").decode())
    with pytest.raises(TooLarge, match="more than 5 bytes"):
        media_url(str(path), "image", DATA, 5)
    with pytest.raises(TooLarge, match="more than 5 bytes"):
        media_url("data:image/png;base64," + "A" * 16, "image", DATA, 5)
    path.write_bytes(b"")
    with pytest.raises(InvalidArgument, match="is empty"):
        media_url(str(path), "image", DATA)
    path.unlink()
    path.mkdir()
    with pytest.raises(InvalidArgument, match="is not a file"):
        media_url(str(path), "image", DATA)
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(InvalidArgument, match="is not a file"):
        media_url(str(path), "image", DATA)
    with pytest.raises(NotFound):
        media_url(str(tmp_path / "none.png"), "image", DATA)
    with path.with_name("big.png").open("wb") as file:
        file.truncate(512 * 1024 * 1024 + 1)
    with pytest.raises(TooLarge, match="more than 536870912 bytes"):
        media_url(str(tmp_path / "big.png"), "image", DATA)


def test_an_item_without_a_url_is_refused() -> None:
    for item in ({"type": "image_url"}, {"type": "image_url", "image_url": {"url": 3}}):
        with pytest.raises(InvalidArgument, match="has no URL"):
            prepare({"messages": [{"role": "user", "content": [item]}]}, DATA)


def test_a_secret_is_not_sent() -> None:
    environ = {"HF_TOKEN": 'hf_canary"é', "TAO_API_KEY": "short", "PATH": "hello everybody"}
    check_no_secret({"messages": [{"role": "user", "content": "short hello everybody"}]}, environ)
    with pytest.raises(InvalidArgument, match="the value of HF_TOKEN") as caught:
        check_no_secret({"messages": [{"role": "user", "content": 'my hf_canary"é'}]}, environ)
    assert "canary" not in caught.value.message
