# SPDX-License-Identifier: Apache-2.0
"""A loader of AOTInductor packages: programs compiled to a shared library for one kind of CPU or GPU.

A shared library runs code when it is loaded, before any check is possible; so the configuration has to allow it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from headrace.backends.pytorch.archive import Archive
from headrace.backends.pytorch.exported_program import UnsafeProgram, keys_of_tree
from headrace.backends.pytorch.model_function import Argument, Call, Outputs
from headrace.backends.pytorch.settings import Settings
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.models.config.types import ModelConfig

log = logging.getLogger("headrace.backends")


def check_allowed(config: ModelConfig, archive: Archive, settings: Settings) -> None:
    """Reject the package unless its configuration allows native code."""
    if not settings.native_code:
        raise FailedPrecondition(
            f"model '{config.name}': '{archive.file.name}' is a package of AOTInductor: a shared library, which can do "
            "whatever the server can. If you trust its author, set the parameter ALLOW_NATIVE_CODE to true in its "
            "configuration; or serve the program it was compiled from (torch.export.save)"
        )
    if settings.precision is not None:
        raise InvalidArgument(
            f"model '{config.name}': a compiled package has its own types: take the parameter precision away"
        )


def load_compiled(config: ModelConfig, archive: Archive, device: torch.device, settings: Settings) -> Call:
    """Load the library for a device. Each instance loads its own, since a library runs one call at a time."""
    check_allowed(config, archive, settings)
    try:
        runner = torch._inductor.aoti_load_package(
            str(archive.file), run_single_threaded=True, device_index=device.index if device.type == "cuda" else -1
        )
        loader = runner.loader
        made_for = loader.get_metadata().get("AOTI_DEVICE_KEY", device.type)
        takes, gives = (keys_of_tree(text) for text in loader.get_call_spec())
    except UnsafeProgram as error:
        raise InvalidArgument(
            f"model '{config.name}': '{archive.file.name}' has {error}: compile it with tensors in and out"
        ) from None
    except Exception:
        log.exception("model %s: %s could not be loaded", config.name, archive.file)
        raise InvalidArgument(
            f"model '{config.name}': PyTorch {torch.__version__} cannot load '{archive.file.name}'. It is damaged, or was "
            "compiled by another PyTorch or for another processor: compile it here; the server's log says which"
        ) from None
    if made_for != device.type:
        raise FailedPrecondition(
            f"model '{config.name}': '{archive.file.name}' was compiled for {made_for}, and its instance is on "
            f"{device.type}: correct the kind in instance_group, or compile it again"
        )
    names = tuple(gives) if isinstance(gives, dict) and all(leaf is None for leaf in gives.values()) else None
    return Call(
        function=lambda *tensors: loader.boxed_run(list(tensors)),
        arguments=tuple(Argument(name) for name in _argument_names(takes)),
        outputs=Outputs(len(_leaves(gives)), names),
        signature=None,
        # The library's state cannot be inspected, and it takes one call at a time.
        writes_itself=True,
    )


def _argument_names(tree: Any) -> list[str]:
    """Return the arguments of ((positional, ...), {keyword: ...}); the positional ones have no names."""
    positional, keywords = tree
    return [""] * len(_leaves(positional)) + [name for name, inside in keywords.items() for _ in _leaves(inside)]


def _leaves(tree: Any) -> list[None]:
    if tree is None:
        return [None]
    return [leaf for inside in (tree.values() if isinstance(tree, dict) else tree) for leaf in _leaves(inside)]
