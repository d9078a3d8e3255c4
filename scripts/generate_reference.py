# SPDX-License-Identifier: Apache-2.0
"""Write `docs/reference/kinds.md`, every field of our kinds, from their tables; `--check` fails if it is out of date.

What several kinds share, such as the fields of a pod, has a section of its own and is only named elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from generated_files import write_or_check

from headrace.fleet.names import API_VERSION
from headrace.fleet.schema.crds import Row, spec_rows, status_rows
from headrace.fleet.schema.fields import Field, Kind, record
from headrace.fleet.schema.kinds import KINDS
from headrace.fleet.schema.kinds.components import (
    ACCELERATOR_SELECTOR,
    CONTAINER,
    KEDA,
    LEADER,
    POD_FIELDS,
    RUNNER,
    SCALING_FIELDS,
    WORKER,
    model_component,
)
from headrace.fleet.schema.kinds.models import STORAGE

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "kinds.md"
POD_SPEC, SCALING, RUN = "Fields of a pod", "Fields of scaling", "Fields of a container"
INLINE = (POD_SPEC, SCALING, RUN)
"""Those that stand among other fields."""
PARTS: Sequence[tuple[str, str, tuple[Field, ...]]] = (
    ("Engine", "An engine or a decoder.", model_component("engine", "").fields),
    ("Leader", "The first node of a group.", LEADER.fields),
    ("Worker", "The other nodes of a group.", WORKER.fields),
    (RUN, "As in Kubernetes. Of a runner the name may be absent: it is the main container.", RUNNER.fields),
    ("KEDA", "Scaling by a query of Prometheus.", KEDA.fields),
    ("Accelerators", "Which accelerators to run on.", ACCELERATOR_SELECTOR.fields),
    ("Storage", "Where files are.", STORAGE.fields),
    (SCALING, "Of engines, decoders and routers.", SCALING_FIELDS),
    (POD_SPEC, "As in Kubernetes, which has more of them: they are passed on as they are.", POD_FIELDS),
)
HEAD = f"""<!-- Made by scripts/generate_reference.py; do not edit. -->
# Kinds

All fields of the kinds of `{API_VERSION}`. Other fields are refused, except Kubernetes' own
fields of pods and containers. `[]` stands for each item of a
list, `{{}}` for each value of a mapping whose names are yours. Start with [Inference
services](../guides/inference-services.md); [`headrace explain`](../guides/explain.md) shows what a service becomes.
"""


def main() -> int:
    """Write, or compare."""
    return write_or_check({PAGE: page()})


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *_kinds(), "## Shared parts\n", *_parts()]).rstrip("\n") + "\n"


def _kinds() -> Iterator[str]:
    pairs: list[tuple[Field, Field | None]] = []
    for kind in KINDS:
        if (kind.spec, kind.status) in pairs:
            continue
        pairs.append((kind.spec, kind.status))
        same = [each for each in KINDS if (each.spec, each.status) == (kind.spec, kind.status)]
        yield f"## {', '.join(kind_.name for kind_ in same)}\n"
        yield f"{kind.description} " + "; ".join(_called(each) for each in same) + ".\n"
        yield _table(spec_rows(kind)[1:], "spec.")
        if kind.status is not None:
            yield "The status, which the controller writes:\n"
            yield _table(status_rows(kind)[1:], "")


def _called(kind: Kind) -> str:
    short = f", `{'`, `'.join(kind.short)}`" if kind.short else ""
    return f"`{kind.plural}`{short} ({'of a namespace' if kind.namespaced else 'of the whole cluster'})"


def _parts() -> Iterator[str]:
    for title, says, fields in PARTS:
        yield f"### {title}\n\n{says}\n"
        kind = Kind(title, "", True, "", record("spec", "", *fields))
        rows = spec_rows(kind)
        yield _table(rows[1:], "spec.", fields if title not in INLINE else ())
        inside = [] if title in INLINE else _inline(fields)
        if inside:
            yield f"And {' and '.join(inside)}.\n"


def _table(rows: Sequence[Row], cut: str, whole: tuple[Field, ...] = ()) -> str:
    """Rows as a table, without those that have a section of their own."""
    lines = ["| field | takes | default | |", "| --- | --- | --- | --- |"]
    # Of the record that the table is of, too.
    skipped = [f"{cut}{name}" for name in _inline_names(whole)]
    for row in rows:
        if any(row.path == path or row.path.startswith((f"{path}.", f"{path}[", f"{path}{{")) for path in skipped):
            continue
        below = row.field.item or row.field
        says = [row.description] if row.description else []
        if below.fields and below.fields != whole:
            title = _title_of(below.fields)
            mark = {"list": "[]", "map": "{}"}.get(row.field.type, "")
            if title:
                says.append(f"See {_link(title)}." if title not in INLINE else f"Has the {_link(title)}.")
                skipped += [f"{row.path}{mark}.{field.name}" for field in below.fields]
            elif _inline(below.fields):
                says.append(f"Has {' and '.join(_inline(below.fields))} as well.")
                skipped += [f"{row.path}{mark}.{name}" for name in _inline_names(below.fields)]
        if row.path.endswith(("[]", "{}")) and not row.description and row.takes in ("a string", "a mapping"):
            continue
        takes = row.takes + (" (required)" if row.required else "")
        default = f"`{row.default}`" if row.default else ""
        cells = (f"`{row.path.removeprefix(cut)}`", takes, default, " ".join(says))
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _title_of(fields: tuple[Field, ...]) -> str:
    return RUN if fields == CONTAINER.fields else next((title for title, _, known in PARTS if known == fields), "")


def _inline(fields: tuple[Field, ...]) -> list[str]:
    """Links to the parts that stand among other fields."""
    return [f"the {_link(title)}" for title, part in _inlined(fields) if part]


def _inline_names(fields: tuple[Field, ...]) -> list[str]:
    return [field.name for _, part in _inlined(fields) for field in part]


def _inlined(fields: tuple[Field, ...]) -> Iterator[tuple[str, tuple[Field, ...]]]:
    for title, _, part in PARTS:
        if title in INLINE and fields != part:
            starts = range(len(fields) - len(part) + 1)
            if any(fields[start : start + len(part)] == part for start in starts):
                yield title, part


def _link(title: str) -> str:
    return f"[{title[0].lower() + title[1:] if title in INLINE else title}](#{title.lower().replace(' ', '-')})"


if __name__ == "__main__":
    sys.exit(main())
