# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.formats.make FORMAT FOLDER`: write a format's large and small model into a folder."""

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from bench.formats import FORESTS, FORMATS, RESNET50, SMALL, Format
from bench.formats.files import ANSWER
from bench.formats.forest import LARGE_BYTES, asked
from bench.resnet50 import CLASSES, SMALL_WIDTH, resnet50, small


def main(name: str, folder: str) -> None:
    writer = importlib.import_module(f"bench.formats.{name}_file")
    if name in FORESTS:
        _write_forests(writer, FORESTS[name], Path(folder))
        return
    kind = FORMATS[name]
    plans = ((RESNET50, resnet50, kind.image, CLASSES), (SMALL, small, (SMALL_WIDTH,), SMALL_WIDTH))
    for called, plan, input_shape, outputs in plans:
        parent = Path(folder, called)
        parent.mkdir(parents=True)
        writer.write(parent / kind.file, plan, called, input_shape, outputs)


def _write_forests(writer: Any, kind: Format, folder: Path) -> None:
    for called, size in ((kind.large, LARGE_BYTES), (SMALL, 0)):
        parent = folder / called
        parent.mkdir(parents=True)
        answer = writer.write(parent / kind.file, size, asked())
        (parent / ANSWER).write_text(json.dumps(float(answer)))


if __name__ == "__main__":
    main(*sys.argv[1:])
