# SPDX-License-Identifier: Apache-2.0
"""Settings of every test run: which tests share a worker, how often properties are tried, what is restored after a test."""

from __future__ import annotations

import ast
import functools
import gc
import logging
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# `from support.serving import serving` works from every test, and so does a helper module of any test folder: their names
# are unique.
_TESTS = Path(__file__).parent
sys.path.insert(0, str(_TESTS))
sys.path += sorted(
    {
        str(file.parent)
        for file in _TESTS.rglob("*.py")
        if not file.name.startswith(("test_", "conftest")) and not (file.parent / "__init__.py").exists()
    }
)

from headrace.core.python_source import collection_paused  # noqa: E402
from support.properties import register_profiles  # noqa: E402
from support.servers import session_server  # noqa: E402

__all__ = ["session_server"]

# Compiled files are kept, for this process and the programs that tests start: without them, each start takes half a second
# more, and pytest rewrites every assertion of every file again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# One thread for each computation, here and in what tests start: more threads wait for each other, and tiny models take
# twice as long.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# pytest parses the source of a failed test, perhaps while a server's thread parses a model; see `core.python_source`.
_parse, _parsing = ast.parse, threading.RLock()


@functools.wraps(_parse)
def _parse_alone(*args: Any, **options: Any) -> Any:
    with _parsing, collection_paused():
        return _parse(*args, **options)


ast.parse = _parse_alone

register_profiles()


_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# A shell starts a program in the background with SIGINT ignored, and nohup with SIGHUP; what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--costs FILE`: see `support.costs`."""
    parser.addoption("--costs", metavar="FILE", help="write what each test costs, as JSON lines, to FILE.WORKER")


def pytest_configure(config: pytest.Config) -> None:
    """Turn on what the options ask for."""
    file = config.getoption("--costs")
    if file:
        from support.costs import Costs

        worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
        config.pluginmanager.register(Costs(Path(f"{file}.{worker}").absolute()))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of a file in one worker process, so that its servers and models are made once.

    `pytest.mark.worker("tensorflow")` keeps several files together, so that an expensive import happens in one worker only;
    "containers" are the tests with the machine's one Docker engine or its one Slurm controller.
    """
    if not hasattr(config, "workerinput"):
        return
    for item in items:
        mark = item.get_closest_marker("worker")
        group = mark.args[0] if mark else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
        if config.getvalue("loadgroup") and hasattr(item, "_id"):
            # xdist 3.8 appends the group to `_nodeid`, which pytest 9.2 does not read any more, and would scatter all tests.
            item._id = type(item._id).parse(f"{item.nodeid}@{group}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files whose tests are all slow where slow tests are not run: their frameworks take seconds."""
    if "not slow" not in config.option.markexpr or collection_path.suffix != ".py":
        return None
    is_slow = re.search(r"^pytestmark = (?:\[[^\]]*?)?pytest\.mark\.slow\b", collection_path.read_text(), re.MULTILINE)
    return True if is_slow else None


def pytest_collection_finish() -> None:
    """Spare the garbage collector the objects of thousands of tests, which live until the end."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Clear the constants that `torch.export` remembers: at the interpreter's end torch could not free them quietly."""
    fakes = sys.modules.get("torch._subclasses.fake_tensor")
    if fakes is not None:
        for get_manifest in gc.get_objects():
            if type(get_manifest) is fakes.FakeTensorConverter:
                get_manifest.constant_storage_mapping.clear()


@pytest.fixture(autouse=True)
def _no_signal_handler_is_left() -> Iterator[None]:
    """A handler that a test leaves behind would take the signals of a later test."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    left = {number for number in _SIGNALS if signal.getsignal(number) is not before[number]}
    for number in left:
        signal.signal(number, before[number])
    assert not left, f"this test left handlers of {sorted(number.name for number in left)}"


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    """Undo what a command that a test ran in this process did to levels and handlers."""
    root = logging.getLogger()
    ours = logging.getLogger("headrace")
    level, own_level, handlers = root.level, ours.level, list(root.handlers)
    yield
    root.setLevel(level)
    ours.setLevel(own_level)
    for handler in set(root.handlers).difference(handlers):
        root.removeHandler(handler)
