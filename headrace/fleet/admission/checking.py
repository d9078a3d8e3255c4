# SPDX-License-Identifier: Apache-2.0
"""All that is wrong with a document: against its table, within itself, and beside what is in the cluster.

Called by the validating webhook, by `planning` and by `headrace explain`. Whether a runtime can serve the model is asked of
`selection`; which mode needs what of the cluster, of `planning`.
"""

from __future__ import annotations

from collections.abc import Callable

from headrace.fleet import schema
from headrace.fleet.admission.defaulting import defaulted
from headrace.fleet.admission.others import benchmark_problems, storage_problems
from headrace.fleet.admission.runtimes import runtime_problems
from headrace.fleet.admission.services import service_problems
from headrace.fleet.words import ClusterFacts, Document, Problem, kind_of

_RULES: dict[str, Callable[[Document, ClusterFacts], list[Problem]]] = {
    "InferenceService": service_problems,
    "ServingRuntime": runtime_problems,
    "ClusterServingRuntime": runtime_problems,
    "BaseModel": storage_problems,
    "ClusterBaseModel": storage_problems,
    "FineTunedWeight": storage_problems,
    "BenchmarkJob": benchmark_problems,
}


def problems(document: Document, facts: ClusterFacts) -> list[Problem]:
    """Everything to put right, in the order of the table and then of the rules; none twice."""
    found = schema.check(document)
    rules = _RULES.get(kind_of(document))
    if rules is not None:
        told = {each.field for each in found}
        # What has the wrong type is told already; what a rule would say of it is noise.
        found += [each for each in rules(defaulted(document, facts), facts) if each.field not in told]
    return list(dict.fromkeys(found))
