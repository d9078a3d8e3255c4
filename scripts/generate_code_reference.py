# SPDX-License-Identifier: Apache-2.0
"""Write the reference pages of errors, metrics, routes and commands from the code; `--check` only compares.

Beside these, `tests/cli/options_page.py` writes the options of `serve`, `tests/programs/configuration/configuration_page.py`
the keys of its file, and `generate_reference.py` the kinds of a fleet.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from generated_files import write_or_check

from headrace.api.admin import admin_table
from headrace.api.metrics.collector import _PINNED
from headrace.api.metrics.hardware import COLLECTIONS, CPU, GPU, PROCESS
from headrace.api.metrics.http import MetricsSettings
from headrace.api.metrics.model_metrics import COLUMNS, LOAD_SECONDS, PENDING
from headrace.api.openai.errors import _KINDS
from headrace.api.openai.settings import OpenAiSettings
from headrace.api.openapi.document import base_document
from headrace.api.openapi.openai_routes import batch_table, openai_table
from headrace.api.openapi.predict_routes import predict_table
from headrace.api.predict.settings import PredictSettings
from headrace.cli.commands import SECTIONS
from headrace.cli.root import load_command
from headrace.core import errors
from headrace.core.errors import HeadraceError
from headrace.core.telemetry.tracing import NO_TRACING
from headrace.engine.engine import EngineSettings, open_engine
from headrace.jobs.api.openapi import jobs_table
from headrace.net.grpc.services import Services
from headrace.net.grpc.status import GRPC_STATUS
from headrace.net.http.heads import HTTP_STATUS
from headrace.net.http.routes import Routes
from headrace.net.sockets import Address
from headrace.net.websocket.contract import CLOSE_CODE
from headrace.programs.console.http import console_table
from headrace.programs.serve.protocols import build_protocols
from headrace.programs.serve.settings import ServerSettings

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "reference"
_MADE = "<!-- Made by scripts/generate_code_reference.py; do not edit. -->\n"
_METHODS = ("counter", "gauge", "histogram", "summary")
_GROUPS = {
    "programs/gateway": "The gateway",
    "jobs/api": "The gateway",
    "fleet/router": "The router",
    "fleet": "The operator and the model agent",
    "backends/llm": "Language models",
}
"""By where the code is; everything else is a server's own."""


def main() -> int:
    """Write, or compare."""
    return write_or_check({FOLDER / name: make() for name, make in PAGES.items()})


def errors_page() -> str:
    """Every error a caller can get, and what each protocol calls it."""
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, HeadraceError) and kind is not HeadraceError
    ]
    rows = []
    for kind in kinds:
        http = HTTP_STATUS[kind.code]
        status, word, more = _KINDS.get(kind.code, (http, "invalid_request_error", None))
        openai = f"{status} `{word}`" + (f", `{more}`" if more else "")
        # What follows a semicolon is for who raises it.
        when = (kind.__doc__ or "").removeprefix("Raise ").removeprefix("when ").partition(";")[0].rstrip(".")
        rows.append(
            [
                f"`{kind.__name__}`",
                when,
                str(http),
                f"`{GRPC_STATUS[kind.code].name}`",
                openai,
                str(CLOSE_CODE[kind.code]),
            ]
        )
    table = _table(("error", "when", "HTTP", "gRPC", "OpenAI's routes", "WebSocket closes with"), rows)
    return f"""{_MADE}# Errors

One table for all protocols. Over HTTP the body is
`{{"error": "..."}}`, on OpenAI's routes as OpenAI has it; over gRPC it is the status message. The text says what to do next.
Any other error is the server's fault: the caller gets `Internal` with an id, and the log has the details under that id. The
Python client raises the same classes (`headrace/core/errors.py`).

{table}
499 appears only in logs: the client has gone. The answer has `Retry-After` where the server knows when to try again.
"""


def metrics_page() -> str:
    """Every metric with its help, as a scrape has it."""
    groups: dict[str, dict[str, tuple[str, str, str]]] = {"A server": {}}
    of_versions = "model, version"
    for column in (*COLUMNS, PENDING, LOAD_SECONDS):
        labels = of_versions + (f", {column.labels.partition('=')[0]}" if column.labels else "")
        groups["A server"][column.name] = (column.kind, labels, column.help)
    for kind, name, words in GPU:
        groups["A server"][name] = (kind, "gpu_uuid", words)
    for name, words, _ in CPU:
        groups["A server"][name] = ("gauge", "", words)
    for kind, name, words, _ in PROCESS:
        groups["A server"][name] = (kind, "", words)
    for name, words in _PINNED:
        groups["A server"][name] = ("gauge", "", words)
    groups["A server"][COLLECTIONS[0]] = ("counter", "generation", COLLECTIONS[1])
    for place, kind, name, words, labels in _registered():
        group = next((title for folder, title in _GROUPS.items() if place.startswith(folder)), "A server")
        groups.setdefault(group, {})[name] = (kind, labels, words)
    sections = []
    for title, metrics in groups.items():
        rows = [[f"`{name}`", kind, labels or "-", words] for name, (kind, labels, words) in sorted(metrics.items())]
        sections.append(f"## {title}\n\n{_table(('name', 'kind', 'labels', 'what it is'), rows)}")
    return f"""{_MADE}# Metrics

Every metric that `/metrics` can have. Which ones a server exports depends on its models and options.
[The guide](../guides/metrics.md) says how to read them and what to put on a dashboard. A model may add its own.

{chr(10).join(sections)}"""


def _registered() -> Iterator[tuple[str, str, str, str, str]]:
    """Where, kind, name, help and labels of every metric that the code registers under a name that stands there."""
    for file in sorted((ROOT / "headrace").rglob("*.py")):
        text = file.read_text()
        if not any(f".{method}(" in text for method in (*_METHODS, "callback")):
            continue
        tree = ast.parse(text)
        known = {
            node.targets[0].id: node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            kind, args = node.func.attr, node.args
            keywords = {keyword.arg: keyword.value for keyword in node.keywords}
            if kind == "callback":
                named = keywords.get("kind")
                kind = str(named.value) if isinstance(named, ast.Constant) else "gauge"
                args = [*args[:2], *args[3:]]  # without the function that reads the value
                args += [keywords["labels"]] if "labels" in keywords else []
            words = [arg.value for arg in args[:2] if isinstance(arg, ast.Constant)]
            if kind in _METHODS and len(words) == 2 and all(isinstance(word, str) for word in words):
                labels = ", ".join(_words(args[2], known)) if len(args) > 2 else ""
                yield str(file.relative_to(ROOT / "headrace")), kind, str(words[0]), str(words[1]), labels


def _words(node: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """The texts of a tuple or list, also of one that has a name in the module."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.Name):
        return _words(known[node.id], known) if node.id in known else []
    if isinstance(node, ast.Starred):
        return _words(node.value, known)
    if isinstance(node, ast.Tuple | ast.List):
        return [word for element in node.elts for word in _words(element, known)]
    return []


def routes_page() -> str:
    """Every route of a server and of the gateway, and every gRPC method, with the scope that each needs."""
    tables = [predict_table(), admin_table(), openai_table(), batch_table(), console_table()]
    routes, services = asyncio.run(_server())
    rows = []
    for path, item in sorted(base_document(routes, tables)["paths"].items()):
        for method, operation in item.items():
            scope = routes.find(method.upper().encode(), path.encode())[0].policy.scope or "none"
            rows.append([f"`{method.upper()} {path}`", scope, operation["summary"], ", ".join(operation["tags"])])
    calls = [[f"`{name}`", policy.scope or "none"] for name, policy in sorted(services.policies.items())]
    jobs = [[f"`{method} {path}`", operation["summary"]] for (method, path), operation in sorted(jobs_table().items())]
    return f"""{_MADE}# Routes and methods

The routes of a server. Each of its ports speaks HTTP/1.1, HTTP/2 and gRPC. The scope is what an
[API key](../guides/limits-and-keys.md) needs, where there are keys. A running server describes itself with all fields:
`/openapi.json`, and as a page `/docs`; gRPC by reflection.

## Server, HTTP

{_table(("route", "scope", "what it does", "part"), rows)}
## Server, gRPC

{_table(("method", "scope"), calls)}
## Gateway

[The job API](../guides/job-api.md). There, roles decide who may do what.

{_table(("route", "what it does"), jobs)}"""


async def _server() -> tuple[Routes, Services]:
    settings = ServerSettings(
        http=Address("127.0.0.1"),
        grpc=Address("127.0.0.1"),
        openai=OpenAiSettings(batch_folder=Path("batches")),
        predict=PredictSettings(),
        metrics_settings=MetricsSettings(),
    )
    engine = open_engine(EngineSettings())
    protocols = build_protocols(engine, settings, NO_TRACING, None)
    try:
        services = protocols.site.services
        assert isinstance(services, Services)
        return protocols.site.routes, services
    finally:
        await protocols.close()
        await engine.close(0)


def commands_page() -> str:
    """Every verb with its options."""
    parts = []
    for section, verbs in SECTIONS.items():
        parts.append(f"## {section}\n")
        for verb in verbs:
            parts += _command(f"headrace {verb.name}", load_command(verb))
    text = "\n".join(parts)
    return f"""{_MADE}# Commands

Every verb with its options. `headrace VERB --help` prints examples as well. The options of `headrace serve` have
[a page of their own](../guides/serve-options.md).

{text}"""


def _command(name: str, command: Any) -> list[str]:
    inner = getattr(command, "commands", None) or {}
    about = inspect.cleandoc(command.help or "").partition("\n\n")[0].replace("\n", " ").strip()
    lines = [f"### {name}\n", f"{about}\n"]
    rows = [
        [
            ", ".join(f"`{each}`" for each in (*option.opts, *option.secondary_opts)),
            " ".join((option.help or "").split()),
        ]
        for option in command.params
        if option.param_type_name == "option" and not option.hidden and "--help" not in option.opts
    ]
    if name == "headrace serve":
        rows = []
    if rows:
        lines.append(_table(("option", "what it does"), rows))
    for word, each in sorted(inner.items()):
        if not each.hidden:
            lines += _command(f"{name} {word}", each)
    return lines


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    return "\n".join([line(head), line(["---"] * len(head)), *(line(row) for row in rows)]) + "\n"


PAGES: dict[str, Callable[[], str]] = {
    "errors.md": errors_page,
    "metrics.md": metrics_page,
    "routes.md": routes_page,
    "commands.md": commands_page,
}

if __name__ == "__main__":
    sys.exit(main())
