# SPDX-License-Identifier: Apache-2.0
"""Stored responses: continued, fetched, deleted, cancelled; by OpenAI's own client and over plain HTTP."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import OpenAI
from openai_server import OpenAiServer, openai_server_with_models

from headrace.api.access.api_keys import create_key
from headrace.api.access.settings import AccessSettings
from headrace.api.openai.response_store import ResponseStore, StoredResponse
from headrace.core.clock import ManualClock, SystemClock
from headrace.core.errors import HeadraceError, TooLarge
from headrace.core.files import FileLock
from headrace.core.telemetry.metrics import Registry
from headrace.net.http.routes import Routes
from headrace.programs.serve.access_guard import Middleware, open_guard
from support.waiting import eventually

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
}
CALL = '<tool_call>{"name": "weather", "arguments": {"town": "Delft"}}</tool_call>'
MANY_BYTES, A_DAY = 1 << 26, 86_400.0


@contextmanager
def storing(folder: Path, **more: Any) -> Iterator[OpenAiServer]:
    with (
        closing(ResponseStore(folder, MANY_BYTES, A_DAY)) as store,
        openai_server_with_models(responses=store, **more) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAiServer]:
    with storing(tmp_path_factory.mktemp("state") / "openai") as server:
        yield server


@pytest.fixture
def storing_client(stored: OpenAiServer) -> Iterator[OpenAI]:
    with client_of(stored) as made:
        yield made


def client_of(server: OpenAiServer, key: str = "none") -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0, timeout=60)


def test_a_response_is_there_as_it_was_answered(storing_client: OpenAI) -> None:
    answer: Any = storing_client.responses.create(model="repeater", input="Hello there", metadata={"a": "b"})
    assert answer.store is True
    assert storing_client.responses.retrieve(answer.id) == answer
    with storing_client.responses.stream(model="repeater", input="one two") as stream:
        final = stream.get_final_response()
    assert storing_client.responses.retrieve(final.id).output_text == "one two"
    cut: Any = storing_client.responses.create(model="repeater", input="one two three", max_output_tokens=1)
    assert storing_client.responses.retrieve(cut.id).status == "incomplete"


def test_a_conversation_goes_on_from_its_last_response(storing_client: OpenAI, stored: OpenAiServer) -> None:
    first: Any = storing_client.responses.create(
        model="repeater", input=CALL, tools=[WEATHER], instructions="Be brief."
    )
    (call,) = first.output
    result: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    result.append({"role": "user", "content": "So it rains"})
    second = storing_client.responses.create(
        model="repeater", input=result, tools=[WEATHER], previous_response_id=first.id, instructions="Be kind."
    )
    assert (second.output_text, second.previous_response_id) == ("So it rains", first.id)
    third = storing_client.responses.create(model="repeater", input="Thanks", previous_response_id=second.id)
    assert third.output_text == "Thanks"
    with_instructions, without = stored.repeater.received[-2:]
    assert with_instructions.messages[0] == {"role": "system", "content": "Be kind."}
    assert [message["role"] for message in without.messages] == [
        "user",
        "assistant",
        "tool",
        "user",
        "assistant",
        "user",
    ]
    assert without.messages[1]["tool_calls"][0]["function"] == {"name": "weather", "arguments": {"town": "Delft"}}
    assert without.messages[2] == {"role": "tool", "content": "rain", "tool_call_id": call.call_id}
    # Two conversations may begin with the same turns.
    other = storing_client.responses.create(
        model="repeater", input="Otherwise", previous_response_id=second.id, stream=True
    )
    assert [event.type for event in other][-1] == "response.completed"
    assert len(stored.repeater.received[-1].messages) == 6


def test_input_tokens_are_counted_with_the_conversation(storing_client: OpenAI) -> None:
    assert storing_client.responses.input_tokens.count(model="repeater", input="one two").input_tokens == 2
    first = storing_client.responses.create(model="repeater", input="one two")
    counted = storing_client.responses.input_tokens.count(
        model="repeater", input="three", previous_response_id=first.id
    )
    assert counted.input_tokens == 5
    with pytest.raises(openai.BadRequestError) as refused:
        storing_client.responses.input_tokens.count(
            model="repeater",
            input=[{"role": "user", "content": [{"type": "input_image", "image_url": "data:4x2", "detail": "auto"}]}],
        )
    assert refused.value.param == "input"


def test_input_items_come_in_pages(storing_client: OpenAI) -> None:
    given: Any = [{"role": "user", "content": f"number {number}"} for number in range(5)]
    given.append(
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "the last"}], "id": "msg_1"}
    )
    answer: Any = storing_client.responses.create(model="repeater", input=given)
    items: Any = list(storing_client.responses.input_items.list(answer.id, limit=4))
    texts = [item.content[0].text for item in items]
    assert texts == ["the last", "number 4", "number 3", "number 2", "number 1", "number 0"]
    assert items[0].id == "msg_1" and len({item.id for item in items}) == 6
    page = storing_client.responses.input_items.list(answer.id, limit=2, order="asc", after=items[-1].id)
    listed: Any = page.data
    assert [item.content[0].text for item in listed] == ["number 1", "number 2"]
    assert page.has_more
    with pytest.raises(openai.BadRequestError) as refused:
        storing_client.responses.input_items.list(answer.id, after="msg_unknown")
    assert refused.value.param == "after"
    for query in ({"limit": 0}, {"limit": 101}, {"order": "up"}):
        with pytest.raises(openai.BadRequestError) as refused:
            storing_client.responses.input_items.list(answer.id, extra_query=query)
        assert refused.value.param in query


def test_a_deleted_response_is_gone(storing_client: OpenAI, stored: OpenAiServer) -> None:
    first = storing_client.responses.create(model="repeater", input="one")
    second = storing_client.responses.create(model="repeater", input="two", previous_response_id=first.id)
    status, answer, _ = stored.ask(f"/v1/responses/{first.id}", None, "DELETE", {"authorization": "Bearer none"})
    assert (status, answer) == (200, {"id": first.id, "object": "response", "deleted": True})
    for gone in (storing_client.responses.retrieve, storing_client.responses.delete, storing_client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="not found"):
            gone(first.id)
    with pytest.raises(openai.NotFoundError):
        list(storing_client.responses.input_items.list(first.id))
    assert storing_client.responses.retrieve(second.id).output_text == "two"
    with pytest.raises(openai.BadRequestError) as refused:  # its beginning is missing
        storing_client.responses.create(model="repeater", input="three", previous_response_id=second.id)
    assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_what_is_not_stored_leaves_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "state" / "openai"
    with storing(folder) as server, client_of(server) as client:
        answer: Any = client.responses.create(model="repeater", input="a secret", store=False)
        assert answer.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
        assert not folder.exists()
        client.responses.create(model="repeater", input="no secret")
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(answer.id)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert [path.name for path in folder.iterdir() if stat.S_IMODE(path.stat().st_mode) != 0o600] == []
        assert all(b"a secret" not in path.read_bytes() for path in folder.iterdir())


def test_another_key_sees_none_of_it(tmp_path: Path) -> None:
    keys = {name: create_key(tmp_path / "keys", name, ["infer"], created=0) for name in ("alice", "bob")}
    guard = open_guard(AccessSettings(keys_file=tmp_path / "keys"), Registry(SystemClock()))
    assert guard is not None
    with storing(tmp_path / "state", make_routes=lambda: Routes(Middleware(guard).http)) as stored:
        check_owners(stored, keys["alice"], keys["bob"])


def check_owners(stored: OpenAiServer, alice_key: str, bob_key: str) -> None:
    with client_of(stored, alice_key) as alice, client_of(stored, bob_key) as bob:
        answer = alice.responses.create(model="repeater", input="mine")
        queued = alice.responses.create(model="repeater", input="FOREVER", background=True)
        for name in (answer.id, queued.id):
            for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
                with pytest.raises(openai.NotFoundError):
                    call(name)
            with pytest.raises(openai.NotFoundError):
                list(bob.responses.input_items.list(name))
        with pytest.raises(openai.BadRequestError):
            bob.responses.create(model="repeater", input="x", previous_response_id=answer.id)
        assert alice.responses.retrieve(answer.id).output_text == "mine"
        header = {"x-api-key": alice_key}
        assert stored.ask(f"/v1/responses/{answer.id}", None, "GET", header)[0] == 200
        assert alice.responses.cancel(queued.id).status == "cancelled"


def test_a_response_in_the_background(storing_client: OpenAI, stored: OpenAiServer) -> None:
    queued = storing_client.responses.create(
        model="repeater", input="one two", background=True, instructions="Be brief."
    )
    assert (queued.status, queued.background, queued.output) == ("queued", True, [])
    done = eventually(lambda: finished(storing_client, queued.id))
    assert (done.status, done.output_text, done.id) == ("completed", "one two", queued.id)
    assert done.usage is not None and done.usage.output_tokens == 2
    assert storing_client.responses.cancel(queued.id) == done
    failed = storing_client.responses.create(model="repeater", input="one BREAK", background=True)
    broken = eventually(lambda: finished(storing_client, failed.id))
    assert broken.status == "failed" and broken.error is not None and broken.error.message == "the model broke"
    image: Any = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:nonsense"}]}]
    unread = storing_client.responses.create(model="repeater", input=image, background=True)
    assert eventually(lambda: finished(storing_client, unread.id)).status == "failed"


def finished(client: OpenAI, id: str) -> Any:
    response = client.responses.retrieve(id)
    return response if response.status not in ("queued", "in_progress") else None


def test_a_background_response_is_cancelled(storing_client: OpenAI, stored: OpenAiServer) -> None:
    queued = storing_client.responses.create(model="repeater", input="FOREVER", background=True)
    assert eventually(lambda: storing_client.responses.retrieve(queued.id).status == "in_progress")
    with pytest.raises(openai.BadRequestError, match="not complete yet"):
        storing_client.responses.create(model="repeater", input="x", previous_response_id=queued.id)
    before = stored.repeater.cancelled
    assert storing_client.responses.cancel(queued.id).status == "cancelled"
    eventually(lambda: stored.repeater.cancelled == before + 1)
    assert (
        storing_client.responses.cancel(queued.id).status
        == storing_client.responses.retrieve(queued.id).status
        == "cancelled"
    )
    answer: Any = storing_client.responses.create(model="repeater", input="at once")
    with pytest.raises(openai.BadRequestError, match="background"):
        storing_client.responses.cancel(answer.id)
    deleted = storing_client.responses.create(model="repeater", input="FOREVER", background=True)
    storing_client.responses.delete(deleted.id)
    eventually(lambda: stored.repeater.cancelled == before + 2)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"background": True, "stream": True}, "background"),
        ({"background": True, "store": False}, "background"),
        ({"background": True, "max_output_tokens": -1}, "max_output_tokens"),
        ({"previous_response_id": "resp_unknown"}, "previous_response_id"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"store": "yes"}, "store"),
    ],
)
def test_what_is_wrong_is_named(storing_client: OpenAI, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        storing_client.responses.create(**{"model": "repeater", "input": "x", **more})
    assert refused.value.param == param


def test_events_are_not_replayed(storing_client: OpenAI) -> None:
    answer: Any = storing_client.responses.create(model="repeater", input="x")
    with pytest.raises(openai.BadRequestError, match="not kept"):
        storing_client.responses.retrieve(answer.id, stream=True, starting_after=3)


def test_methods_of_the_paths(stored: OpenAiServer) -> None:
    for path, method, allowed in (
        ("/v1/responses/resp_1", "POST", "GET, DELETE"),
        ("/v1/responses/resp_1/cancel", "GET", "POST"),
        ("/v1/responses/resp_1/input_items", "DELETE", "GET"),
    ):
        status, answer, headers = stored.ask(path, {}, method)
        assert (status, headers["allow"]) == (405, allowed) and answer["error"]["message"]
    assert stored.ask("/v1/responses/resp_1/other", None, "GET")[0] == 404


def test_a_server_without_a_store_says_so(client: OpenAI) -> None:
    answer: Any = client.responses.create(model="repeater", input="x", store=True)
    assert answer.store is False
    with pytest.raises(openai.NotFoundError, match="keeps none"):
        client.responses.retrieve(answer.id)


def test_a_folder_that_cannot_be_written_costs_only_the_record(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with storing(tmp_path / "file" / "openai") as server, client_of(server) as client:
        answer: Any = client.responses.create(model="repeater", input="x")
        assert answer.store is False
        events: Any = list(client.responses.create(model="repeater", input="x", stream=True))
        assert events[-1].type == "response.completed" and events[-1].response.store is False
        with pytest.raises(openai.InternalServerError, match="cannot be read or written"):
            client.responses.create(model="repeater", input="x", background=True)


def test_a_damaged_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "responses.sqlite3").write_bytes(b"this is no database, as anyone can see" * 100)
    with storing(tmp_path) as server, client_of(server) as client:
        with pytest.raises(openai.InternalServerError, match="cannot be read or written"):
            client.responses.retrieve("resp_1")
        answer: Any = client.responses.create(model="repeater", input="x")
        assert answer.store is False


# The store itself.


def a_response(id: str, text: str = "x", previous: str | None = None, status: str = "completed") -> StoredResponse:
    document: Any = {"id": id, "status": status, "previous_response_id": previous, "output": [], "background": False}
    return StoredResponse(document, [{"type": "message", "text": text}])


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(work())


def test_a_store_is_bounded_in_age(tmp_path: Path) -> None:
    clock = ManualClock()

    async def work() -> None:
        with closing(ResponseStore(tmp_path, MANY_BYTES, A_DAY, clock)) as store:
            await store.add("", a_response("first"))
            await store.add("", a_response("alone"))
            clock.advance(A_DAY - 1)
            await store.add("", a_response("second", previous="first"))
            assert len(await store.conversation("", "second")) == 2
            clock.advance(2)
            assert await store.find("", "alone") is None
            assert await store.find("", "first") is not None  # its conversation went on
            await store.add("", a_response("third"))
        rows = sqlite3.connect(tmp_path / "responses.sqlite3")
        with closing(rows):
            assert {name for (name,) in rows.execute("SELECT id FROM responses")} == {"first", "second", "third"}

    run(work)


def test_a_store_is_bounded_in_size_and_keeps_what_is_used(tmp_path: Path) -> None:
    clock = ManualClock()
    most = 1 << 20

    async def work() -> None:
        with closing(ResponseStore(tmp_path, most, A_DAY, clock)) as store:
            await store.add("", a_response("used"))
            for number in range(300):
                clock.advance(1)
                await store.add("", a_response(f"{number}", "x" * 20_000))
                assert await store.conversation("", "used")
            assert await store.find("", "0") is None
            assert await store.find("", "299") is not None
            with pytest.raises(TooLarge):
                await store.add("", a_response("huge", "x" * most))
        assert (tmp_path / "responses.sqlite3").stat().st_size < 1.5 * most

    run(work)


def test_what_a_killed_process_computed_has_failed(tmp_path: Path) -> None:
    """Closing the file of a lock is what a kill does to it."""

    async def work() -> None:
        running = ResponseStore(tmp_path, MANY_BYTES, A_DAY)
        await running.add("", a_response("one", status="queued"), runs_here=True)
        with closing(ResponseStore(tmp_path, MANY_BYTES, A_DAY)) as other:
            found = await other.find("", "one")
            assert found is not None and found.is_unfinished
            lock: Any = running._runner
            assert isinstance(lock, FileLock)
            lock.release()
            found = await other.find("", "one")
            assert found is not None
            assert (found.document["status"], found.document["error"]["code"]) == ("failed", "server_error")
            assert not await other.update({**found.document, "status": "completed"})
            assert not lock.path.exists()
        running.close()

    run(work)


def test_two_processes_may_share_a_folder(tmp_path: Path) -> None:
    async def work() -> None:
        stores = [ResponseStore(tmp_path, MANY_BYTES, A_DAY) for _ in range(2)]
        await asyncio.gather(*(stores[number % 2].add("", a_response(f"{number}")) for number in range(60)))
        for store in stores:
            assert all([await store.find("", f"{number}") is not None for number in range(60)])
            store.close()

    run(work)


def test_a_file_of_a_newer_version_is_left_alone(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "responses.sqlite3")) as newer:
        newer.execute("PRAGMA user_version = 99")

    async def work() -> None:
        with closing(ResponseStore(tmp_path, MANY_BYTES, A_DAY)) as store:
            with pytest.raises(HeadraceError, match="newer version"):
                await store.add("", a_response("one"))

    run(work)
