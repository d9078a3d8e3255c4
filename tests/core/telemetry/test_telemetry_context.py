# SPDX-License-Identifier: Apache-2.0
"""The fields that follow the work."""

import asyncio
import contextvars
import threading

import pytest

from headrace.core.telemetry.logs import bind, bound, fields


@pytest.fixture(autouse=True)
def own_context():
    """Give each test the empty context, whatever ran before it."""
    assert fields() == {}


def test_nothing_is_bound_at_first():
    assert fields() == {}


def test_fields_are_bound_inside_and_put_back_after():
    with bound(request_id="r", model="m"):
        with bound(model="n", version="2"):
            assert fields() == {"request_id": "r", "model": "n", "version": "2"}
        assert fields() == {"request_id": "r", "model": "m"}
    assert fields() == {}


def test_fields_are_put_back_when_the_work_fails():
    with pytest.raises(ZeroDivisionError), bound(job="j"):
        raise ZeroDivisionError
    assert fields() == {}


def test_binding_lasts_as_long_as_its_context():
    def work():
        bind(job="j")
        bind(model="m")
        return fields()

    assert contextvars.copy_context().run(work) == {"job": "j", "model": "m"}
    assert fields() == {}


def test_tasks_do_not_see_each_other():
    async def work(name, begun, others_begun):
        with bound(request_id=name):
            begun.set()
            await others_begun.wait()
            return fields()

    async def both():
        one, two = asyncio.Event(), asyncio.Event()
        return await asyncio.gather(work("a", one, two), work("b", two, one))

    assert asyncio.run(both()) == [{"request_id": "a"}, {"request_id": "b"}]


def test_a_thread_starts_with_nothing():
    seen = []
    with bound(model="m"):
        thread = threading.Thread(target=lambda: seen.append(dict(fields())))
        thread.start()
        thread.join()
    assert seen == [{}]


def test_what_was_read_does_not_change_later():
    with bound(model="m"):
        before = fields()
        bind(version="3")
    assert before == {"model": "m"}
