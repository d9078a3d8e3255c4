# SPDX-License-Identifier: Apache-2.0
"""Networks of `bench.mlp` as TorchScript files, created once and kept under .work/.

Run as `python -m bench.torchscript FOLDER` to make them, in a process of its own, so that bench itself has no torch.
"""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from bench import mlp
from bench.errors import BenchError
from bench.workloads import NETWORKS, PREDICT_MODEL, SLOW_MODEL

HERE = Path(__file__).parent
MADE = HERE / ".work/torchscript"
NAMES = (PREDICT_MODEL, SLOW_MODEL)


def torchscript_file(name: str) -> Path:
    """The file of this network, made now unless it is there."""
    stamp = MADE / "sources.sha256"
    sources = (Path(__file__), HERE / "mlp.py")
    fingerprint = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if not stamp.is_file() or stamp.read_text() != fingerprint:
        shutil.rmtree(MADE, ignore_errors=True)
        MADE.mkdir(parents=True)
        _make()
        # Last, so that a folder left half made by an interruption is never taken for a whole one.
        stamp.write_text(fingerprint)
    return MADE / f"{name}.pt"


def _make() -> None:
    command = [sys.executable, "-m", "bench.torchscript", str(MADE)]
    finished = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        raise BenchError(
            "the TorchScript models cannot be made (pip install 'headrace[pytorch]' brings torch): "
            f"{finished.stderr.strip()[-800:]}"
        )


def main(folder: str) -> None:
    import torch
    from torch import nn

    for name in NAMES:
        layers: list[nn.Module] = []
        for matrix, bias in mlp.weights(NETWORKS[name]):
            dense = nn.Linear(*matrix.shape)
            dense.load_state_dict({"weight": torch.from_numpy(matrix.T.copy()), "bias": torch.from_numpy(bias)})
            layers += [dense, nn.ReLU()]
        network = nn.Sequential(*layers[:-1]).eval()
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        torch.jit.script(network).save(str(Path(folder, f"{name}.pt")))


if __name__ == "__main__":
    main(sys.argv[1])
