# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from schema_values import sample

from headrace.fleet import yaml_documents
from headrace.fleet.schema.crds import PRESERVE_UNKNOWN, crd, crds
from headrace.fleet.schema.fields import Kind
from headrace.fleet.schema.kinds import KINDS
from support.programs import Finished, run_script

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "crds"

kinds = pytest.mark.parametrize("kind", KINDS, ids=[each.name for each in KINDS])


def test_the_files_are_up_to_date_with_the_tables() -> None:
    told = run_script(ROOT / "scripts" / "generate_crds.py", "--check")
    assert told.returncode == 0, told.stdout + told.stderr
    assert yaml_documents.read(sorted(FOLDER.glob("*.yaml"))).documents == [crds()[name] for name in sorted(crds())]


def test_a_file_that_was_edited_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    for name in ("generate_crds.py", "generated_files.py"):
        shutil.copy(ROOT / "scripts" / name, tmp_path / "scripts")

    def run(*words: str) -> Finished:
        return run_script(tmp_path / "scripts" / "generate_crds.py", *words)

    shutil.copytree(FOLDER, tmp_path / "deploy" / "crds")
    edited = tmp_path / "deploy" / "crds" / "ome.io_basemodels.yaml"
    edited.write_text(edited.read_text().replace("Ready", "Steady"))
    (edited.parent / "ome.io_gone.yaml").write_text("kind: Gone\n")
    told = run("--check")
    assert told.returncode == 1
    assert "ome.io_basemodels.yaml" in told.stdout and "ome.io_gone.yaml" in told.stdout
    assert run().returncode == 0
    assert "Steady" not in edited.read_text() and not (edited.parent / "ome.io_gone.yaml").exists()


def test_files_are_small_enough_for_kubectl_apply() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.glob("*.yaml")}
    assert len(sizes) == len(KINDS)
    assert max(sizes.values()) < 200_000


def test_names_scopes_and_columns() -> None:
    made = {each["spec"]["names"]["kind"]: each["spec"] for each in crds().values()}
    assert made["InferenceService"]["names"]["shortNames"] == ["isvc"]
    cluster = {kind for kind, spec in made.items() if spec["scope"] == "Cluster"}
    assert cluster == {"ClusterBaseModel", "ClusterServingRuntime", "FineTunedWeight", "AcceleratorClass"}
    with_status = {kind for kind, spec in made.items() if "status" in spec["versions"][0].get("subresources", {})}
    assert with_status == set(made) - {"ServingRuntime", "ClusterServingRuntime"}
    columns = {
        each["name"]: each["jsonPath"] for each in made["InferenceService"]["versions"][0]["additionalPrinterColumns"]
    }
    assert columns["Ready"] == ".status.conditions[?(@.type=='Ready')].status"
    assert (columns["Model"], columns["Runtime"]) == (".status.model.name", ".status.runtime.name")
    with pytest.raises(KeyError):
        crd("Pod")


@kinds
def test_schemas_are_structural(kind: Kind) -> None:
    (version,) = crd(kind.name)["spec"]["versions"]
    for path, node in _nodes(version["schema"]["openAPIV3Schema"], ""):
        assert "$ref" not in node, path
        assert not ("properties" in node and "additionalProperties" in node), path
        if PRESERVE_UNKNOWN not in node and "x-kubernetes-int-or-string" not in node:
            assert node.get("type"), path
        if node.get("type") == "object" and path.startswith((".spec", ".status")):
            assert node.get(PRESERVE_UNKNOWN) or "additionalProperties" in node, (
                f"{path} would lose fields that are unknown"
            )
        assert set(node.get("required", ())) <= set(node.get("properties", {})), path


def _nodes(node: dict[str, Any], path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, node
    for name, each in node.get("properties", {}).items():
        yield from _nodes(each, f"{path}.{name}")
    for word in ("items", "additionalProperties"):
        if isinstance(node.get(word), dict):
            yield from _nodes(node[word], f"{path}[]")


@kinds
def test_a_sample_with_every_field_is_json(kind: Kind) -> None:
    assert json.loads(json.dumps(sample(kind.spec, full=True))) == sample(kind.spec, full=True)
