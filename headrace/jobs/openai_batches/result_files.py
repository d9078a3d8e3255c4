# SPDX-License-Identifier: Apache-2.0
"""The result files of a batch, made from its ledger: the output, and the errors of the other lines.

If the process is killed meanwhile, they are written again under the same ids.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from headrace.api.openai.file_store import BATCH_OUTPUT, FileStore, NewFile
from headrace.api.openai.records import Record
from headrace.jobs.openai_batches.input_lines import InputLines


class UnfinishedLines(NamedTuple):
    """Reason why lines have no result: OpenAI's error code, and a text."""

    code: str
    message: str


@dataclass(slots=True)
class Usage:
    """The tokens of all responses."""

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, usage: object) -> None:
        """Add the `usage` of a response, of any endpoint."""
        if not isinstance(usage, Mapping):
            return
        self.input += _number(usage, "prompt_tokens", "input_tokens")
        self.output += _number(usage, "completion_tokens", "output_tokens")
        self.cached += _number(_details(usage, "prompt_tokens_details", "input_tokens_details"), "cached_tokens")
        details = _details(usage, "completion_tokens_details", "output_tokens_details")
        self.reasoning += _number(details, "reasoning_tokens")

    def to_json(self) -> Record:
        """Return OpenAI's object."""
        return {
            "input_tokens": self.input,
            "input_tokens_details": {"cached_tokens": self.cached},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.input + self.output,
        }


@dataclass(slots=True)
class ResultFiles:
    """The result files of a batch, and the usage of its responses."""

    output_id: str | None = None
    error_id: str | None = None
    usage: Usage = field(default_factory=Usage)


def write_result_files(
    files: FileStore, record: Record, ledger: Path, lines: InputLines, unfinished_error: UnfinishedLines | None
) -> ResultFiles:
    """Write the files, except those without lines. `unfinished_error`: the error of lines that are not in the ledger."""
    results = ResultFiles()
    output, errors = files.begin(), files.begin()
    try:
        done = _copy_results(ledger, output, errors, results.usage)
        if unfinished_error is not None:
            for index, line in lines.entries():
                if index not in done:
                    _write(errors, secrets.token_hex(16), lines.id_of(line), None, unfinished_error._asdict())
        results.output_id = _keep(files, output, record, "output")
        results.error_id = _keep(files, errors, record, "error")
    finally:
        output.discard()
        errors.discard()
    return results


def _copy_results(ledger: Path, output: NewFile, errors: NewFile, usage: Usage) -> set[int]:
    done: set[int] = set()
    with ledger.open("rb") as file:
        for line in file:
            result = orjson.loads(line)
            done.add(result["index"])
            failed = "error" in result
            response = result["error" if failed else "output"]
            if not failed:
                usage.add(response["body"].get("usage"))
            _write(errors if failed else output, response["request_id"], result["id"], response, None)
    return done


def _write(file: NewFile, request_id: str, custom_id: str | None, response: Any, error: Any) -> None:
    document = {"id": f"batch_req_{request_id}", "custom_id": custom_id, "response": response, "error": error}
    file.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE))


def _keep(files: FileStore, new: NewFile, record: Record, kind: str) -> str | None:
    if not new.size:
        return None
    name = f"{record['id']}_{kind}.jsonl"
    file_id, seconds = record[f"{kind}_id"], record["output_seconds"]
    files.keep(new, record["owner"], name, BATCH_OUTPUT, keep_seconds=seconds, id=file_id)
    return str(file_id)


def _details(usage: Mapping[str, Any], *names: str) -> Mapping[str, Any]:
    return next((usage[name] for name in names if isinstance(usage.get(name), Mapping)), {})


def _number(members: Mapping[str, Any], *names: str) -> int:
    return next((members[name] for name in names if type(members.get(name)) is int), 0)
