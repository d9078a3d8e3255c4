# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.fleet import yaml_documents
from headrace.fleet.documents import Problem
from headrace.fleet.yaml_documents import MAX_DEPTH

TWO = """\
# a comment
apiVersion: ome.io/v1beta1
kind: InferenceService
metadata:
  name: one
spec:
  engine:
    nodeSelector:
      nvidia.com/gpu.product: H100
    containers:
      - name: a
        image: i
---
---
kind: BaseModel
metadata: {name: two}
"""


def test_every_document_has_its_file_and_lines(tmp_path: Path) -> None:
    (tmp_path / "isvc.yaml").write_text(TWO)
    read = yaml_documents.read([tmp_path / "isvc.yaml"])
    assert not read.problems
    assert [document["metadata"]["name"] for document in read.documents] == ["one", "two"]
    one, two = read.sources
    assert one.line_of("spec.engine.containers[0].image") == 12
    assert one.line_of("spec.engine.nodeSelector[nvidia.com/gpu.product]") == 9
    assert one.line_of("metadata.name") == 5
    assert two.line == 15
    assert one.place(Problem("metadata.name", "", "")) == f"{tmp_path / 'isvc.yaml'}:5"


def test_a_field_that_is_absent_has_the_line_of_what_is_around_it() -> None:
    (one, _) = yaml_documents.parse(TWO).sources
    assert one.line_of("spec.engine.minReplicas") == 7
    assert one.line_of("spec.engine.containers[3].name") == 10
    assert one.line_of("status") == one.line_of("") == 2


def test_folders_are_read_in_the_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("b.yaml", "a.yml", "sub/c.json", "notes.txt"):
        (tmp_path / name).write_text(f"kind: {name}\n")
    assert [document["kind"] for document in yaml_documents.read([tmp_path]).documents] == [
        "a.yml",
        "b.yaml",
        "sub/c.json",
    ]


def test_the_items_of_a_list_are_documents() -> None:
    read = yaml_documents.parse("kind: List\nitems:\n- kind: A\n  spec: {a: 1}\n- kind: B\n")
    assert [document["kind"] for document in read.documents] == ["A", "B"]
    assert read.sources[0].line_of("spec.a") == 4
    assert read.sources[1].line == 5


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("2024-01-15T10:30:00Z", "2024-01-15T10:30:00Z"),
        ("1e3", 1000.0),
        ("1:30", "1:30"),
        ("0644", 420),
        ("0o17", 15),
        ("0x1f", 31),
        ("-5", -5),
        ("1_000", 1000),
        ("'5'", "5"),
        ("!!str 5", "5"),
        ("yes", True),
        ("off", False),
        ("y", "y"),
        ("~", None),
        ("", None),
        ("089", 89.0),
        (".5", 0.5),
        ("1.2.3", "1.2.3"),
        ("|-\n  a\n  b", "a\nb"),
        ("9" * 5000, "9" * 5000),
    ],
)
def test_scalars_are_read_as_kubectl_reads_them(written: str, value: Any) -> None:
    read = yaml_documents.parse(f"value: {written}\n")
    assert read.documents == [{"value": value}]
    assert type(read.documents[0]["value"]) is type(value)


def test_names_are_texts() -> None:
    assert yaml_documents.parse("1: a\ntrue: b\nnull: c\n").documents == [{"1": "a", "true": "b", "null": "c"}]


def test_aliases_and_merges_are_accepted() -> None:
    read = yaml_documents.parse("base: &b {a: 1, c: 2}\nx:\n  <<: *b\n  a: 3\ny: *b\n")
    assert read.documents == [{"base": {"a": 1, "c": 2}, "x": {"a": 3, "c": 2}, "y": {"a": 1, "c": 2}}]


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("a: 1\nb: [1, 2\n", 3, "YAML"),
        ("a: 1\na: 2\n", 2, "duplicate"),
        ("a: !!python/object:os.system x\n", 1, "tag"),
        ("a: .inf\n", 1, "JSON"),
        ("- a\n", 1, "mapping"),
        ("a: *b\n", 1, ""),
        ("a: &a [*a]\n", 1, "a"),
        ("a: " + "[" * (MAX_DEPTH + 5) + "]" * (MAX_DEPTH + 5), 1, "levels"),
        ("? [a]\n: b\n", 1, "name"),
        ("a:\n\tb: 1\n", 2, "YAML"),
        ("<<: 3\n", 1, "<<"),
        ("a: {{ .Name }}\n", 1, ""),
        ("a: \x01\n", 1, ""),
    ],
)
def test_mistakes_are_reported_with_file_and_line(text: str, line: int, word: str) -> None:
    (problem,) = yaml_documents.parse(text, "x.yaml").problems
    assert problem.field == f"x.yaml:{line}"
    assert word in problem.message
    assert problem.fix


def test_aliases_that_expand_too_much_are_refused() -> None:
    text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    text += "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12))
    (problem,) = yaml_documents.parse(text).problems
    assert "values" in problem.message


def test_files_that_cannot_be_read_are_problems(tmp_path: Path) -> None:
    (tmp_path / "bytes.yaml").write_bytes(b"a: \xff\xfe")
    (tmp_path / "large.yaml").write_bytes(b"#" * (yaml_documents.MAX_FILE_BYTES + 1))
    read = yaml_documents.read([tmp_path / "none.yaml", tmp_path])
    assert [problem.field.rpartition("/")[2] for problem in read.problems] == ["none.yaml", "bytes.yaml", "large.yaml"]
    assert not read.sources


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=12)
    | st.sampled_from(
        ["1e3", "0x1f", "y", "no", "1_0", "2024-01-01", "<<", "=", "a: b", "- x", "|", "\n", " a", "#", "0o7", ".5"]
    ),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(
    st.lists(
        st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=5), JSON, min_size=1, max_size=3), max_size=3
    )
)
def test_what_is_written_reads_the_same(written: list[dict[str, Any]]) -> None:
    written = [document for document in written if document.get("kind") != "List"]
    assert yaml_documents.parse(yaml_documents.write(written)).documents == written


@given(st.text(max_size=60))
def test_no_text_raises(text: str) -> None:
    read = yaml_documents.parse(text)
    assert all(isinstance(document, dict) for document in read.documents)
