# SPDX-License-Identifier: Apache-2.0
"""Who gets the CPU when there is not enough: those that answer, before one that starts to take their place.

Called by `process_driver`, and by `controller` between its steps. The new replica of a rolling update loads libraries and a
model for seconds, which requests would feel on a machine with little to spare. Until it is ready it gets what the others
leave. One that is in a group for the CPU does so by that group (`cgroups`), which is what the kernel compares then. This is
for all others, and only where one can be their equal afterwards: most users may give priority away, and not take it back. It
is the better way: a group that comes last among its neighbours is, to all outside, a part of the usual one around them. So
who is limited by no group for the CPU, and would only weigh something there, joins it when it is ready.

A policy, not a number (`nice`): whoever has something to answer takes the core from an idle one at once, not at the end of
its slice.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from functools import lru_cache

from headrace.platforms.identity import session_members

_PASSES = 5


def step_back(pid: int) -> bool:
    """Have a process that does nothing yet come after others. Whether it does."""
    with contextlib.suppress(OSError):
        if os.sched_getscheduler(pid) == os.SCHED_OTHER and may_return():
            _set(pid, os.SCHED_IDLE)
            return True
    return False


def step_up(session: int) -> None:
    """All of a session is as good as others again."""
    for _ in range(_PASSES):
        late = [thread for thread in _threads(session) if _is_late(thread)]
        if not late:
            return
        for thread in late:  # what it starts meanwhile is as late as it is, and found by the next pass
            with contextlib.suppress(OSError):
                _set(thread, os.SCHED_OTHER)


def give_way() -> None:
    """Between two steps of the daemon's work: whoever has something to answer is not kept until the next tick."""
    os.sched_yield()


def _set(thread: int, policy: int) -> None:
    os.sched_setscheduler(thread, policy, os.sched_param(0))


def _is_late(thread: int) -> bool:
    with contextlib.suppress(OSError):
        return os.sched_getscheduler(thread) == os.SCHED_IDLE
    return False


def _threads(session: int) -> Iterator[int]:
    for member in session_members(session):
        with contextlib.suppress(OSError):
            yield from map(int, os.listdir(f"/proc/{member.pid}/task"))


@lru_cache(maxsize=1)
def may_return() -> bool:
    """Tried by a thread that ends after it: what the capabilities say is not the whole truth in a container."""
    done = []

    def there_and_back() -> None:
        with contextlib.suppress(OSError):
            for policy in (os.SCHED_IDLE, os.SCHED_OTHER):
                _set(threading.get_native_id(), policy)
            done.append(True)

    trying = threading.Thread(target=there_and_back, name="headrace-priority")
    trying.start()
    trying.join()
    return bool(done)
