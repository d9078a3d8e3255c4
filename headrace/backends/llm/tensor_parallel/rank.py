# SPDX-License-Identifier: Apache-2.0
"""The process of a rank other than the first: load a shard, then compute the steps that the first rank sends.

It ends when the connection to the first rank ends, whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import transformers

from headrace.backends.llm.lora import LoraAdapters, load_adapters
from headrace.backends.llm.model_runner.model_loader import check_folder, open_runner
from headrace.backends.llm.model_runner.runner import ModelRunner
from headrace.backends.llm.scheduler import Chunk
from headrace.backends.llm.settings import EngineSizes, LlmSettings
from headrace.backends.llm.tensor_parallel.communicator import (
    Peers,
    communicator_of,
    file_store,
    tcp_store,
)
from headrace.backends.llm.tensor_parallel.link import Kind, Link, LinkClosed, read_json
from headrace.backends.llm.tensor_parallel.loading import load_shard
from headrace.backends.llm.tensor_parallel.shard_reader import folder_fingerprint
from headrace.backends.llm.tensor_parallel.step_codec import StepDecoder
from headrace.backends.torch_import import gpu_count
from headrace.core.errors import INTERNAL_TEXT, Code, FailedPrecondition, HeadraceError
from headrace.version import __version__

log = logging.getLogger("headrace.backends.llm")

_POLL_SECONDS = 1.0


def versions() -> dict[str, str]:
    """Return what must be the same in all ranks."""
    python = ".".join(map(str, sys.version_info[:2]))
    return {
        "headrace": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": python,
    }


def settings_as_json(settings: LlmSettings, path_of: Callable[[Path], str] = str) -> dict[str, Any]:
    """Return the settings that a rank needs. `path_of` returns a path as the rank's node has it."""
    # Adapters on demand are refused with tensor_parallel.
    others = ("model_path", "adapters", "adapters_folder", "adapters_hub", "chat_template")
    names = [field.name for field in fields(LlmSettings) if field.name not in others]
    content = {name: getattr(settings, name) for name in names}
    adapters = {name: path_of(path) for name, path in settings.adapters.items()}
    return {**content, "model_path": path_of(settings.model_path), "adapters": adapters}


def settings_from_json(content: Mapping[str, Any]) -> LlmSettings:
    """Return the settings of a rank."""
    adapters = {name: Path(path) for name, path in content["adapters"].items()}
    return LlmSettings(**{**content, "model_path": Path(content["model_path"]), "adapters": adapters})


def rank_threads(settings: LlmSettings, ranks: int = 0) -> int:
    """Return how many threads a rank on a CPU computes with: its share of the cores, unless set.

    `ranks`: of this node, if the model is on several.
    """
    return settings.threads or max(1, len(os.sched_getaffinity(0)) // (ranks or settings.tensor_parallel))


def main(sock: socket.socket, parent: int) -> None:
    """Serve one group until the first rank closes the connection."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the first rank decides
    logging.basicConfig(format="%(asctime)s %(levelname)s rank: %(message)s", stream=sys.stderr, level=logging.WARNING)
    link = Link(sock)
    try:
        hello = {"versions": versions(), "process": os.getpid()}
        link.send_json(Kind.HELLO, hello)
        # Before the watcher starts: this may be a spare, that waits here for long.
        link.expect_socket()
        kind, payload = link.receive()
        if kind is Kind.ADOPT:  # the first rank is on another node
            link = link.take_link(payload)
            link.send_json(Kind.HELLO, hello)
            kind, payload = link.receive()
        threading.Thread(target=_exit_with_link, args=(link.fileno(), parent), daemon=True, name="first rank").start()
        if kind is Kind.SETUP:
            link.expect_no_socket()
            Rank(link, read_json(payload)).serve()
    except LinkClosed:
        pass
    # Without the clean-up of libraries, which may wait for other ranks.
    os._exit(0)


def _exit_with_link(descriptor: int, parent: int) -> None:
    """End this process when the first rank has ended or has closed the connection. In a thread."""
    poll = select.poll()
    poll.register(descriptor, select.POLLRDHUP | select.POLLHUP | select.POLLERR)
    while not poll.poll(_POLL_SECONDS * 1000):
        if parent and os.getppid() != parent:
            break
    os._exit(1)


class Rank:
    """A rank and its shard."""

    def __init__(self, link: Link, setup: Mapping[str, Any]) -> None:
        self._link = link
        self._rank = int(setup["rank"])
        self._settings = settings_from_json(setup["settings"])
        self._name = f"{setup['name']}, rank {self._rank}"
        self._step_seconds = float(setup["step_seconds"])
        self._device = torch.device(setup["device"])
        self._local_ranks = int(setup.get("local_ranks", 0))
        self._peers = Peers(self._rank, self._settings.tensor_parallel)
        self._runner: ModelRunner
        self._adapters: LoraAdapters | None = None

    def serve(self) -> None:
        """Load the shard and compute steps; tell the first rank of an error. Raises `LinkClosed` at the end."""
        try:
            self._open()
            self._run()
        except LinkClosed:
            raise
        except HeadraceError as error:
            self._link.send_json(Kind.ERROR, {"code": error.code.value, "message": error.message})
        except Exception:
            log.exception("%s failed.", self._name)
            self._link.send_json(Kind.ERROR, {"code": Code.INTERNAL.value, "message": INTERNAL_TEXT})

    def _open(self) -> None:
        """Load the shard, say what fits, and join the group."""
        settings = self._settings
        if self._device.type == "cpu":
            torch.set_num_threads(rank_threads(settings, self._local_ranks))
        else:
            present = gpu_count()
            if (self._device.index or 0) >= present:
                raise FailedPrecondition(
                    f"PyTorch sees {present} GPUs on its node, and it needs the one with number {self._device.index}: all "
                    "nodes need as many GPUs as node 0 uses"
                )
            torch.cuda.set_device(self._device)
        checked = check_folder(settings)
        model = load_shard(checked, settings, self._device, self._peers)
        if settings.adapters:
            self._adapters = load_adapters(model, settings.adapters)
        self._runner, _ = open_runner(model, settings, self._device, self._name, agree=self._agree)
        if self._adapters is not None:
            self._runner.before_forward = self._adapters.select_rows
        self._link.send_json(Kind.READY, {"runner": type(self._runner).__name__})

    def _agree(self, sizes: EngineSizes) -> EngineSizes:
        """Tell the first rank what fits here, and join the group with what fits everywhere."""
        fingerprint = folder_fingerprint(self._settings.model_path, self._settings.adapters)
        self._link.send_json(Kind.SIZED, {"sizes": sizes_as_json(sizes), "fingerprint": fingerprint})
        kind, payload = self._link.receive()
        if kind is not Kind.CONNECT:
            raise LinkClosed
        content = read_json(payload)
        degree = self._settings.tensor_parallel
        host = ""
        if "host" in content:  # several nodes
            host = content["host"] if self._link.is_local else self._link.local_host
            store = tcp_store(content["host"], int(content["port"]), timeout_seconds=self._step_seconds)
        else:
            store = file_store(Path(content["store"]), degree)
        communicator = communicator_of(
            store, self._rank, degree, self._device, timeout_seconds=self._step_seconds, host=host
        )
        self._peers.connect(communicator)
        return sizes_from_json(content["sizes"])

    def _run(self) -> None:
        """Compute steps. Raises `LinkClosed` at the end."""
        decoder = StepDecoder(tuple(self._settings.adapters))
        while True:
            kind, message = self._link.receive()
            if kind is not Kind.STEP:
                raise LinkClosed
            chunks, greedy, sampled = decoder.decode(message)
            self._runner.launch(chunks, greedy=greedy, sample=self._receive_tokens if sampled else None)

    def _receive_tokens(self, chunks: Sequence[Chunk], _logits: torch.Tensor) -> torch.Tensor:
        """Return the tokens that the first rank has sampled."""
        return self._peers.broadcast(torch.zeros(len(chunks), dtype=torch.int64, device=self._device))


def sizes_as_json(sizes: EngineSizes) -> dict[str, int]:
    """Return the sizes of an engine as a JSON object."""
    return {"max_running": sizes.max_running, "max_step_tokens": sizes.max_step_tokens, "pages": sizes.pages}


def sizes_from_json(content: Mapping[str, int]) -> EngineSizes:
    """Return the sizes of an engine."""
    return EngineSizes(int(content["max_running"]), int(content["max_step_tokens"]), int(content["pages"]))
