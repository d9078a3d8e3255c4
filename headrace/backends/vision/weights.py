# SPDX-License-Identifier: Apache-2.0
"""Loads a folder's weights into a model of transformers: from safetensors, from the disk, all of them or none.

Called by `backend`. No code of the folder runs, and nothing is fetched.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch

from headrace.backends.one_at_a_time import TRANSFORMERS
from headrace.backends.vision.folder import VisionFolder
from headrace.core.errors import FailedPrecondition, InvalidArgument, ResourceExhausted

log = logging.getLogger("headrace.backends")

_COUNTER = "num_batches_tracked"
"""What batch normalisation counts while it is trained. Old files have none, and nobody computes with it."""


def load_weights(name: str, folder: VisionFolder, dtype: Any, device: Any) -> Any:
    """The model, ready to compute on the device."""
    config = folder.config
    if hasattr(config, "use_pretrained_backbone"):
        # The backbone's weights are in the folder with the rest; else they would be fetched first.
        config.use_pretrained_backbone = False
    try:
        with TRANSFORMERS, warnings.catch_warnings(action="ignore"):  # about itself and about files of older versions
            model, told = folder.model_class.from_pretrained(
                folder.path,
                config=config,
                dtype=dtype,
                use_safetensors=True,
                local_files_only=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
    except ImportError as error:
        log.exception("model %s cannot be made", name)
        needs = (error.name or "").partition(".")[0] or "timm"
        raise FailedPrecondition(
            f"model '{name}' needs a package that is not installed: pip install {needs}. The server's log says more"
        ) from None
    except torch.OutOfMemoryError:
        raise ResourceExhausted(f"model '{name}' does not fit into the memory of {device}") from None
    except Exception:
        log.exception("model %s cannot be loaded", name)
        raise InvalidArgument(
            f"model '{name}': its weights ({_shown(folder)}) cannot be loaded: the files are damaged, incomplete, or of "
            "another model than config.json says: replace them. The server's log says more"
        ) from None
    # Transformers would fill what is not there with random numbers, and go on.
    missing = sorted(key for key in told["missing_keys"] if not key.endswith(_COUNTER))
    if missing or told.get("mismatched_keys"):
        log.error("model %s: weights that are missing: %s", name, missing[:100])
        raise InvalidArgument(
            f"model '{name}': {len(missing) or len(told['mismatched_keys'])} of its weights are not in its files, or have "
            f"another shape there ({_shown(folder)}): config.json is of another model, or a file is missing: correct the "
            "folder. The server's log names them"
        )
    model.requires_grad_(False)
    try:
        return model.eval().to(device)
    except torch.OutOfMemoryError:
        raise ResourceExhausted(f"model '{name}' does not fit into the memory of {device}") from None


def _shown(folder: VisionFolder) -> str:
    names = sorted(path.name for path in folder.path.glob("*.safetensors"))
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
