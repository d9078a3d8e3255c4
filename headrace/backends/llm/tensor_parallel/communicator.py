# SPDX-License-Identifier: Apache-2.0
"""The collective operations of a group of ranks, by torch.distributed: gloo on CPUs, NCCL on GPUs.

The process groups are objects of their own and not torch's default group, of which a process has only one: a server may have
several groups. Their ranks find each other by a file in a folder that only this user can read or, on several nodes, by a
TCPStore in the server's process.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

_LOOPBACK = "127.0.0.1"
_NCCL_INTERFACE = "NCCL_SOCKET_IFNAME"
_NCCL_SETTINGS = {
    _NCCL_INTERFACE: "lo",
    # By default PyTorch ends the process, which is the server, when a rank has ended.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Communicator(Protocol):
    """The other ranks of this rank's group."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a tensor over all ranks, in place."""

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks joined along the last dimension: `[rows, columns * ranks]`.

        Where the first rank alone uses the result, others get a tensor of that shape with anything in it.
        """

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Replace a tensor by that of the first rank."""

    def close(self) -> None:
        """Leave the group. Operations that wait in other threads or on the device end with an error."""


class Peers:
    """The communicator of a rank, once there is one.

    Layers refer to this object. While it is alone, as when a model is probed, results have the right shapes only.
    """

    def __init__(self, rank: int, degree: int) -> None:
        self.rank = rank
        self.degree = degree
        self.number = id(self)
        """Unique in this process: operators of PyTorch take numbers and not objects."""
        self._communicator: Communicator | None = None

    def connect(self, communicator: Communicator) -> None:
        """Use a communicator from now on."""
        self._communicator = communicator

    def disconnect(self) -> None:
        """Close the communicator, if there is one. From any thread."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            communicator.close()

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return tensor if self._communicator is None else self._communicator.all_reduce(tensor)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        if self._communicator is None:
            return tensor.repeat(*([1] * (tensor.ndim - 1)), self.degree)
        return self._communicator.gather(tensor)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        return tensor if self._communicator is None else self._communicator.broadcast(tensor)


class GlooCommunicator:
    """Ranks on CPUs."""

    def __init__(self, store: Any, rank: int, degree: int, *, timeout_seconds: float, host: str = _LOOPBACK) -> None:
        """`host`: this rank's address, as the others see it."""
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._threads = 1
        self._rank, self._degree = rank, degree
        self._group: Any = dist.ProcessGroupGloo(store, rank, degree, options)
        self.all_reduce(torch.zeros(1))  # the first operation may connect the ranks

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        tensor = tensor.contiguous()
        self._group.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`. Only the first rank uses the result."""
        tensor = tensor.contiguous()
        if not tensor.numel():
            return tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] * self._degree)
        options = dist.GatherOptions()
        options.rootRank = 0
        if self._rank:
            self._group.gather([], [tensor], options).wait()
            return tensor.new_empty(1).expand(*tensor.shape[:-1], tensor.shape[-1] * self._degree)
        parts = [torch.empty_like(tensor) for _ in range(self._degree)]
        self._group.gather([parts], [tensor], options).wait()
        return torch.cat(parts, -1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        self._group.broadcast([tensor]).wait()
        return tensor

    def close(self) -> None:
        """See `Communicator`. An operation in progress ends when another rank has ended, or after the timeout."""
        self._group = None  # its connections are closed when no operation uses it


class NcclCommunicator:
    """Ranks on GPUs. Its operations may be captured in CUDA graphs; they wait for nothing on the host."""

    def __init__(self, store: Any, rank: int, degree: int, *, device: torch.device, timeout_seconds: float) -> None:
        self._degree = degree
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_seconds)
        self._group = dist.ProcessGroupNCCL(store, rank, degree, options)
        torch.cuda.set_device(device)
        # The first operation connects the ranks, which must not happen while a graph is captured.
        self.all_reduce(torch.zeros(1, device=device))
        torch.cuda.synchronize(device)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        tensor = tensor.contiguous()
        self._group.allreduce([tensor]).wait()
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`. All ranks have the result, so that all continue with the same tokens."""
        tensor = tensor.contiguous()
        if not tensor.numel():
            return tensor.new_empty(*tensor.shape[:-1], tensor.shape[-1] * self._degree)
        parts = tensor.new_empty(self._degree, *tensor.shape)
        self._group._allgather_base(parts, tensor).wait()
        return torch.cat(parts.unbind(), -1)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Communicator`."""
        self._group.broadcast([tensor]).wait()
        return tensor

    def close(self) -> None:
        """See `Communicator`: kernels that wait for a rank that has ended end too."""
        with suppress(RuntimeError):
            self._group.abort()


def file_store(path: Path, degree: int) -> Any:
    """Return the place where the ranks of a group meet."""
    return dist.FileStore(str(path), degree)


def serve_tcp_store(host: str, *, timeout_seconds: float) -> tuple[Any, int]:
    """Return a place where the ranks of several nodes meet, and its port. It listens at this address only."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        port = int(listener.getsockname()[1])
        store = dist.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_seconds),
            master_listen_fd=listener.detach(),
        )
    return store, port


def tcp_store(host: str, port: int, *, timeout_seconds: float) -> Any:
    """Return the place that `serve_tcp_store` has opened on node 0."""
    return dist.TCPStore(
        host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout_seconds)
    )


def communicator_of(
    store: Any, rank: int, degree: int, device: torch.device, *, timeout_seconds: float, host: str = ""
) -> Communicator:
    """Connect a rank to its group. Blocks until all ranks do the same.

    `host`: this rank's address on the network of the nodes; "" if all ranks are on this machine.
    """
    if device.type != "cuda":
        return GlooCommunicator(store, rank, degree, timeout_seconds=timeout_seconds, host=host or _LOOPBACK)
    for name, value in _NCCL_SETTINGS.items():
        if not (host and name == _NCCL_INTERFACE):  # NCCL chooses itself among the networks of a machine
            os.environ.setdefault(name, value)
    return NcclCommunicator(store, rank, degree, device=device, timeout_seconds=timeout_seconds)
