# SPDX-License-Identifier: Apache-2.0
"""`headrace models init`: what was found and what was made of it, as tables and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace.cli.init import Made
from headrace.cli.tables import heading, line, open_console, table
from headrace.models.config.showing import to_json


def made_json(made: Made) -> dict[str, Any]:
    """All of it."""
    return {
        "name": made.config.name or made.folder.resolve().name,
        "version": made.version,
        "folder": str(made.folder),
        "is": made.detected.what,
        "backend": made.detected.backend,
        "files": [{"source": str(part.source), "name": part.name} for part in made.detected.parts],
        "wrote": [str(path) for path in made.wrote],
        "config": to_json(made.config),
        "notes": list(made.notes),
        "remarks": list(made.remarks),
    }


def show_made(made: Made) -> None:
    """Print it."""
    console = open_console()
    detected = made.detected
    what = [f"{detected.what}", *["belongs to it"] * (len(detected.parts) - 1)]
    rows = [
        [part.source.name, is_, detected.backend, _size(part.source, made)]
        for part, is_ in zip(detected.parts, what, strict=True)
    ]
    console.print(table(["FILE", "IS", "BACKEND", "SIZE"], rows, right=["SIZE"]))
    tensors = [
        [side, tensor.name, _type_name(tensor), list(tensor.dims)]
        for side in ("input", "output")
        for tensor in getattr(made.config, side)
    ]
    if tensors:
        batch = made.config.max_batch_size
        console.print("\n", heading(f"Tensors, in batches of up to {batch}" if batch else "Tensors"), sep="")
        console.print(table(["", "NAME", "TYPE", "DIMS"], tensors))
    console.print()
    for path in made.wrote:
        console.print(line(f"wrote {path}"), soft_wrap=True)
    for remark in made.remarks:
        console.print(line(f"note: {remark}"), soft_wrap=True)
    for note in made.notes:
        console.print(line(f"to do: {note}", "yellow"), soft_wrap=True)
    if not made.notes:
        console.print(line(f"next: headrace serve {made.folder.parent}"), soft_wrap=True)


def _type_name(tensor: Any) -> str:
    field = tensor.DESCRIPTOR.fields_by_name["data_type"]
    name: str = field.enum_type.values_by_number[tensor.data_type].name
    return name.removeprefix("TYPE_").replace("STRING", "BYTES")


def _size(source: Path, made: Made) -> str:
    # It may have been moved.
    part = next(part for part in made.detected.parts if part.source == source)
    path = source if source.exists() else made.folder / str(made.version) / part.name
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    total = float(sum(each.stat().st_size for each in files))
    for unit in ("B", "KB", "MB"):
        if total < 1000:
            return f"{total:.0f} {unit}" if unit == "B" else f"{total:.1f} {unit}"
        total /= 1000
    return f"{total:.1f} GB"
