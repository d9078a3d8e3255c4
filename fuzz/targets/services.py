# SPDX-License-Identifier: Apache-2.0
"""Target `services`: InferenceServices in YAML, up to the objects of a cluster.

Problems with their places, or a plan; and what is written of a document reads as the same again.
"""

from __future__ import annotations

from functools import partial

from fuzz.target import Check, Target, require
from headrace.fleet.explain import explain, prepare, shipped_runtimes
from headrace.fleet.yaml_documents import ParsedFiles, parse, write


def _open() -> Check:
    asking = partial(prepare, around=ParsedFiles([], []), shipped=shipped_runtimes())

    def check(data: bytes) -> None:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return  # refused before it comes here
        read = parse(text, "isvc.yaml")
        documents = read.documents
        if documents:
            second = parse(write(documents))
            require(not second.problems, f"written, it is no YAML: {second.problems}")
            require(second.documents == documents, "written, it reads otherwise")
        generation = asking(read)
        for source in generation.services:
            explained = explain(source, generation)
            explained.as_json()
            require(not explained.errors or all(str(error) for error in explained.errors), "an error without a word")
            write(explained.objects)

    return check


TARGET = Target(
    "InferenceServices in YAML: problems with places or a plan, and written it reads as the same",
    _open,
    (
        b"apiVersion: ome.io/v1beta1\n",
        b"kind: InferenceService\n",
        b"metadata:\n  name: a\n",
        b"spec:\n",
        b"  engine:\n    minReplicas: 1\n",
        b"  decoder: {}\n",
        b"  router: {}\n",
        b"  model:\n    name: m\n",
        b"  runtime:\n    name: headrace-cpu\n",
        b"    runner:\n      image: i\n",
        b"      resources:\n        limits:\n          nvidia.com/gpu: 1\n",
        b"    leader: {}\n",
        b"    worker:\n      size: 1\n",
        b"  kedaConfig:\n    enableKeda: true\n",
        b"annotations:\n    ome.io/deploymentMode: RawDeployment\n",
        b"&a",
        b"*a",
        b"<<: *a",
        b"!!binary",
        b"---\n",
        b"0x10",
        b"1Gi",
        b"-1",
        b"null",
        b"|-\n",
        b"\xe2\x80\xa8",
    ),
)
