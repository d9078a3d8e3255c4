# SPDX-License-Identifier: Apache-2.0
"""Run by models.py as `python -m bench.formats.make FORMAT FOLDER`: writes resnet50 and small of a format there."""

import importlib
import sys
from pathlib import Path

from bench.formats import FORMATS
from bench.formats.files import RESNET50, SMALL
from bench.resnet50 import CLASSES, SMALL_WIDTH, resnet50, small


def main(name: str, folder: str) -> None:
    kind = FORMATS[name]
    writer = importlib.import_module(f"bench.formats.{name}_file")
    plans = ((RESNET50, resnet50, kind.image, CLASSES), (SMALL, small, (SMALL_WIDTH,), SMALL_WIDTH))
    for called, plan, taken, given in plans:
        parent = Path(folder, called)
        parent.mkdir(parents=True)
        writer.write(parent / kind.file, plan, called, taken, given)


if __name__ == "__main__":
    main(*sys.argv[1:])
