# SPDX-License-Identifier: Apache-2.0
"""The image of the repository's Dockerfile runs every program that the manifests start: no rights, a read-only root."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.platform, pytest.mark.worker("containers"), pytest.mark.timeout(900)]

HARD = ("--rm", "--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
OWN = "headrace-test/fleet:1"


@pytest.mark.timeout(900)
def test_the_image_runs_every_program(tmp_path: Path) -> None:
    from docker_platform import IMAGE, docker_engine

    for name in ("Dockerfile", ".dockerignore", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "headrace", tmp_path / "headrace", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "requirements").mkdir()
    for name in ("image.lock", "build.lock"):
        shutil.copy(ROOT / "requirements" / name, tmp_path / "requirements")
    locked = {
        package.lower() for package in re.findall(r"^([\w.-]+)==", (ROOT / "requirements/image.lock").read_text(), re.M)
    }
    with docker_engine() as engine:

        def run(*words: str, script: str = "") -> str:
            entry = ("--entrypoint", "/bin/bash") if script else ()
            return engine.docker("run", *HARD, *entry, OWN, *(("-c", script) if script else words))

        engine.docker("build", "--build-arg", f"BASE={IMAGE}", "--tag", OWN, str(tmp_path), seconds=500)
        # What is in it is what the lock names, by its hashes, and ourselves. Not setuptools, nor pip.
        names = "import importlib.metadata as m; print(*{each.name.lower() for each in m.distributions()})"
        results = set(run(script=f"python -c '{names}'").replace("_", "-").split())
        assert results - {requirement.replace("_", "-") for requirement in locked} == {"headrace"}
        assert "kind: DaemonSet" in run("operator", "manifests", "--without", "crds")
        run(script="python -c 'import headrace.fleet.cluster.webhooks.certificates, obstore, huggingface_hub'")
        # Each gets as far as to look for its cluster, with all that it needs imported, and says what is missing.
        for words in ("operator run --webhook-listen 0.0.0.0:9443", "model-agent --node one --models-root /tmp/models"):
            result = run(script=f"headrace {words} --kubeconfig /tmp/none 2>&1; echo code $?; id --user")
            assert "code 2" in result and "/tmp/none" in result and "Traceback" not in result, result
            assert result.splitlines()[-1] == "10001"
        router = "headrace router --help >/dev/null && headrace serve --help >/dev/null && headrace bench --help"
        assert "Usage: headrace bench" in run(script=router)
