# SPDX-License-Identifier: Apache-2.0
"""Translate InferenceServices into settings for Ray Serve, and report every field that Ray does not support. Pure.

A service is planned as for any fleet: admission, choice of the runtime, merging. Of the plan Ray needs the engine's pod and
how it scales. A field of the service itself that Ray does not support is an error. Runtimes are written for Kubernetes too,
so only those fields of their pods are checked that decide what runs; the others are ignored, as by `headrace up`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from headrace.core.kv_transfer import KEY_VARIABLE
from headrace.fleet.documents import FleetSettings, Problem, namespace_of
from headrace.fleet.explain import ExplainInput, LocatedProblem, explain, prepare
from headrace.fleet.local.container_command import CommandContext, ContainerStartError, build_command
from headrace.fleet.names import (
    DEPLOYMENT_MODE,
    DEPRECATION_WARNING,
    ENGINE,
    MULTI_NODE,
    MULTI_NODE_RAY,
    OME_NATIVE,
    RAW,
    component_name,
    lws_name,
)
from headrace.fleet.planning import Plan, plan
from headrace.fleet.planning.autoscalers import COUNTS_REQUESTS, REQUEST_TARGETS
from headrace.fleet.planning.front_router import IDLE_SECONDS
from headrace.fleet.planning.pod_defaults import request_seconds
from headrace.fleet.planning.pod_templates import main_container
from headrace.fleet.ray_serve.replica_spec import GroupMember, ReplicaSpec, WorkerSpec
from headrace.fleet.selection.model_match import parse_quantity
from headrace.fleet.yaml_documents import ParsedFiles, Source
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)

_SETTINGS = FleetSettings(node_pinning="none", pre_stop_seconds=0, pod_security="unchanged")
_CAPABILITIES = frozenset({COUNTS_REQUESTS, "lws", "ray", "keda"})
"""More than Ray has: planning must not report what Ray lacks, because this module explains it in terms of Ray."""
_REMOVE = "remove it, or run the service by `headrace up` or on Kubernetes"
_DEFAULT_MAX_REQUESTS = 1000
"""Requests in flight per replica. Ray's default of 5 would starve a server that batches and queues by itself."""
_DEFAULT_HEALTH_SECONDS = 5
_GPUS = ("nvidia.com/gpu", "amd.com/gpu")
_RANKS = ("--tensor-parallel-size", "--tp-size", "--tp")

_SPEC_FIELDS = frozenset({"model", "runtime", "engine", "deploymentMode"})
_ENGINE_FIELDS = frozenset(
    {
        "minReplicas",
        "maxReplicas",
        "scaleMetric",
        "scaleTarget",
        "containerConcurrency",
        "timeoutSeconds",
        "autoscaler",
        "runner",
        "resources",
        "volumes",
        "terminationGracePeriodSeconds",
        "leader",
        "worker",
    }
)
_MEMBER_FIELDS = frozenset({"size", "runner", "volumes"})
"""Of a leader and of workers."""
_RUNNER_FIELDS = frozenset(
    {
        "name",
        "image",
        "command",
        "args",
        "env",
        "resources",
        "ports",
        "volumeMounts",
        "startupProbe",
        "readinessProbe",
        "livenessProbe",
    }
)
_FIXES = {
    "spec.decoder": "remove it: separate prefill and decode need the router, which does not run on Ray",
    "spec.router": "remove it: Ray Serve's own proxies choose the replica",
    "spec.model.fineTunedWeights": "name the adapters in the model's own configuration",
    "spec.engine.canaryTrafficPercent": "remove it: Ray Serve replaces the replicas one after the other",
    "spec.engine.deploymentStrategy": "remove it: Ray Serve replaces the replicas one after the other",
    "spec.engine.kedaConfig": "remove it: Ray Serve scales by requests in flight",
    "spec.kedaConfig": "remove it: Ray Serve scales by requests in flight",
    "spec.engine.initContainers": "prepare the files on the nodes of the cluster",
    "spec.engine.containers": "remove them: a replica runs one server",
}
"""Fixes for fields with a better one than `_REMOVE`."""
_OWN_ANNOTATIONS = ("ome.io/", "autoscaling.", "serving.knative.dev/", "kueue", "rdma.ome.io/")
"""Prefixes of annotations that change how a fleet runs a service."""
_FIX_NODES = "write worker: {size: 1} in the service's engine, with the runtime headrace-multi-node"
_FIX_RUNTIME = "choose the runtime headrace-multi-node, or run the service on Kubernetes"
_RAW_MODES = (RAW, OME_NATIVE)


@dataclass(frozen=True)
class RayServices:
    """The services of some files."""

    specs: list[ReplicaSpec]
    """Empty with errors."""
    errors: list[LocatedProblem]
    warnings: list[LocatedProblem]


def read_services(files: ParsedFiles) -> RayServices:
    """Translate the services of files; models and runtimes may be in the same files."""
    asked = prepare(files, ParsedFiles([], []), settings=_SETTINGS)
    asked = replace(asked, facts=replace(asked.facts, capabilities=_CAPABILITIES))
    specs: list[ReplicaSpec] = []
    errors, warnings = list(asked.errors), []
    for source in asked.services:
        translated, service_warnings, spec = _translate_source(source, asked)
        errors += translated
        warnings += service_warnings
        if spec is not None:
            specs.append(spec)
    names = [spec.name for spec in specs]
    for name in sorted({name for name in names if names.count(name) > 1}):
        message = f"two services have the name {name}, and Ray Serve knows no namespaces"
        errors.append(LocatedProblem(Problem("metadata.name", message, "rename one of them")))
    return RayServices([] if errors else specs, errors, warnings)


def _translate_source(
    source: Source, asked: ExplainInput
) -> tuple[list[LocatedProblem], list[LocatedProblem], ReplicaSpec | None]:
    explained = explain(source, asked)
    planned = plan(source.document, asked.facts)
    problems = list(unsupported(planned))
    errors = [*explained.errors, *(LocatedProblem(problem, source.place(problem)) for problem in problems)]
    return errors, list(explained.warnings), None if errors else replica_spec(planned)


def replica_spec(planned: Plan) -> ReplicaSpec:
    """Return the settings of a planned service that has no problem and nothing unsupported."""
    component = planned.components[ENGINE]
    extension, pod = component.extension, _engine_pod(planned)
    container = main_container(get_mapping(pod, "spec"))
    grace = get_int(pod, "spec", "terminationGracePeriodSeconds")
    fixed = bool(extension.autoscaler)  # only the class None is supported
    idle = annotations_of(planned.service).get(IDLE_SECONDS, "")
    return ReplicaSpec(
        name=name_of(planned.service),
        namespace=namespace_of(planned.service),
        pod=pod,
        model=planned.model,
        min_replicas=extension.min_replicas,
        max_replicas=extension.min_replicas if fixed else max(extension.min_replicas, extension.max_replicas),
        target_requests=extension.scale_target or extension.container_concurrency or REQUEST_TARGETS["concurrency"],
        max_requests=extension.container_concurrency or _DEFAULT_MAX_REQUESTS,
        idle_seconds=float(idle) if idle.isdecimal() else None,
        cpus=_amount(container, "cpu") or 1.0,
        gpus=_gpu_count(container),
        memory=int(_amount(container, "memory")),
        request_seconds=float(extension.timeout_seconds or 0),
        grace_seconds=float(request_seconds(component) if grace is None else grace),
        health_seconds=float(get_int(container, "readinessProbe", "periodSeconds") or _DEFAULT_HEALTH_SECONDS),
        worker=_worker_spec(planned),
    )


def _worker_spec(planned: Plan) -> WorkerSpec | None:
    """Return the workers of a group, which may be none; None for a service that is no group."""
    component = planned.components[ENGINE]
    if component.mode != MULTI_NODE:
        return None
    pod = _engine_pod(planned, "workerTemplate")
    container = main_container(get_mapping(pod, "spec"))
    return WorkerSpec(
        size=component.worker_size,
        pod=pod,
        cpus=_amount(container, "cpu") or 1.0,
        gpus=_gpu_count(container),
        memory=int(_amount(container, "memory")),
    )


def unsupported(planned: Plan) -> Iterator[Problem]:
    """Yield a problem for each field of a planned service that Ray does not support."""
    spec = get_mapping(planned.service, "spec")
    yield from _unknown_fields("spec", spec, _SPEC_FIELDS)
    yield from _unknown_fields("spec.engine", get_mapping(spec, ENGINE), _ENGINE_FIELDS)
    yield from _unknown_fields("spec.engine.runner", get_mapping(spec, ENGINE, "runner"), _RUNNER_FIELDS)
    for role in ("leader", "worker"):
        path, given = f"spec.engine.{role}", get_mapping(spec, ENGINE, role)
        yield from _unknown_fields(path, given, _MEMBER_FIELDS)
        yield from _unknown_fields(f"{path}.runner", get_mapping(given, "runner"), _RUNNER_FIELDS)
    if get_list(spec, "model", "fineTunedWeights"):
        yield _problem("spec.model.fineTunedWeights")
    yield from _credential_problems(planned.model)
    yield from _annotation_problems(planned.service)
    yield from _scaling_problems(get_mapping(spec, ENGINE))
    component = planned.components.get(ENGINE)
    if planned.problems or component is None:
        return
    if component.mode == MULTI_NODE_RAY:
        message = f"the runtime {_runtime_name(planned)} starts a Ray cluster of its own, which is not supported on Ray"
        yield Problem("spec.runtime.name", message, _FIX_RUNTIME)
    elif component.mode == RAW:
        yield from _pod_problems(planned, _engine_pod(planned), "spec.engine", 0)
    elif component.mode == MULTI_NODE:
        size = component.worker_size + 1
        yield from _pod_problems(planned, _engine_pod(planned), _member_path(planned, "leader"), size)
        if component.worker_size:
            yield from _pod_problems(planned, _engine_pod(planned, "workerTemplate"), "spec.engine.worker", size)


def _member_path(planned: Plan, role: str) -> str:
    """Return where a service describes its leader: there, or for the engine as a whole."""
    return f"spec.engine.{role}" if role in get_mapping(planned.service, "spec", ENGINE) else "spec.engine"


def _unknown_fields(path: str, section: Document, known: Collection[str]) -> Iterator[Problem]:
    for name, value in section.items():
        if name not in known and value is not None:
            yield _problem(f"{path}.{name}")


def _problem(field: str) -> Problem:
    return Problem(field, "is not supported on Ray", _FIXES.get(field, _REMOVE))


def _credential_problems(model: Document | None) -> Iterator[Problem]:
    storage = get_mapping(model, "spec", "storage")
    fix = "set the store's credentials in the environment of the nodes, and leave it out"
    if get_str(storage, "key"):
        yield Problem("spec.model.name", f"the model's storage.key {storage['key']} is a Secret, and Ray has none", fix)
    if get_str(storage, "parameters", "token"):
        message = "the model's storage.parameters.token would be readable in the state of the Ray cluster"
        yield Problem("spec.model.name", message, fix)


def _annotation_problems(service: Document) -> Iterator[Problem]:
    for name, value in annotations_of(service).items():
        if name in (DEPRECATION_WARNING, IDLE_SECONDS) or not name.startswith(_OWN_ANNOTATIONS):
            continue
        field = f"metadata.annotations[{name}]"
        if name != DEPLOYMENT_MODE:
            yield _problem(field)
        elif value not in (*_RAW_MODES, MULTI_NODE, MULTI_NODE_RAY):  # admission writes the last two for workers
            yield Problem(field, f"{value} is not supported on Ray", f"write {RAW}, or remove it")


def _scaling_problems(engine: Document) -> Iterator[Problem]:
    # Without a metric, a service that scales to zero counts requests everywhere.
    metric = get_str(engine, "scaleMetric") or ("concurrency" if get_int(engine, "minReplicas") == 0 else "")
    if metric not in ("", "concurrency"):
        message = f"{metric} is not supported on Ray, which scales replicas by requests in flight"
        yield Problem("spec.engine.scaleMetric", message, "write concurrency, with a scaleTarget of requests")
    elif engine.get("scaleTarget") is not None and not metric:
        message = "without a scaleMetric it is a share of the CPU, which Ray does not scale by"
        yield Problem("spec.engine.scaleTarget", message, "write scaleMetric: concurrency beside it")
    declared = get_str(engine, "autoscaler", "class")
    if declared not in ("", "None"):
        yield Problem(
            "spec.engine.autoscaler.class",
            f"{declared} is not supported on Ray, which scales replicas by requests in flight",
            "write None for minReplicas replicas, or scaleMetric: concurrency instead of autoscaler",
        )
    concurrency, target = get_int(engine, "containerConcurrency"), get_int(engine, "scaleTarget")
    if concurrency and target and metric and target > concurrency:
        message = f"a replica never has {target} requests: containerConcurrency is {concurrency}"
        yield Problem("spec.engine.scaleTarget", message, f"write at most {concurrency}")


# The pod


def _pod_problems(planned: Plan, pod: Document, where: str, size: int) -> Iterator[Problem]:
    """Yield what a pod asks for and Ray cannot do.

    where: the pod's place in the service. size: how many servers its group has; 0: it is in none.
    """
    spec = get_mapping(pod, "spec")
    given = get_mapping(planned.service, *where.split("."))
    for name, maximum in (("initContainers", 0), ("containers", 1)):
        if len(get_list(spec, name)) > maximum and name not in given:
            message = f"the runtime {_runtime_name(planned)} has some, and they are not supported on Ray"
            yield Problem(f"{where}.{name}", message, "choose a runtime with one container")
    container = main_container(spec)
    yield from _resource_problems(container, where)
    yield from _volume_problems(spec, container, planned.model, where)
    environment = list(_environment_problems(container, where, size))
    yield from environment
    if container and not environment:
        yield from _command_problems(pod, container, where, size)


def _resource_problems(container: Document, where: str) -> Iterator[Problem]:
    for kind in ("requests", "limits"):
        for name in get_mapping(container, "resources", kind):
            if name not in ("cpu", "memory", *_GPUS):
                field = f"{where}.runner.resources.{kind}.{name}"
                yield Problem(field, "is not supported on Ray", f"write cpu, memory or {_GPUS[0]}")


def _volume_problems(spec: Document, container: Document, model: Document | None, where: str) -> Iterator[Problem]:
    path = get_str(model, "spec", "storage", "path")
    volume_names = {
        get_str(mount, "name") for mount in get_list(container, "volumeMounts") if mount.get("mountPath") == path
    }
    mounted = {get_str(mount, "name") for mount in get_list(container, "volumeMounts")} - volume_names
    for volume in get_list(spec, "volumes"):
        name = get_str(volume, "name")
        if name in mounted and "emptyDir" not in volume and "hostPath" not in volume:
            message = "only emptyDir and hostPath are supported on Ray"
            yield Problem(f"{where}.volumes[{name}]", message, "put the files on the nodes, and write hostPath")


def _environment_problems(container: Document, where: str, size: int) -> Iterator[Problem]:
    fix = "set the variable on the nodes of the cluster, and leave it out here"
    if get_list(container, "envFrom"):
        yield Problem(f"{where}.runner.envFrom", "ConfigMaps and Secrets do not exist on Ray", fix)
    for variable in get_list(container, "env"):
        source, name = get_mapping(variable, "valueFrom"), get_str(variable, "name")
        if size and name == KEY_VARIABLE:
            continue  # each group makes a key of its own
        if source and not (source.keys() & {"fieldRef", "resourceFieldRef"}):
            field = f"{where}.runner.env[{name}].valueFrom"
            yield Problem(field, "ConfigMaps and Secrets do not exist on Ray", fix)


def _command_problems(pod: Document, container: Document, where: str, size: int) -> Iterator[Problem]:
    """Yield what the command cannot be, and more ranks than GPUs."""
    member = GroupMember(size, 0, "leader", "").environment() if size else {}
    try:
        command = build_command(CommandContext(pod, "node", environment=member), container)
    except ContainerStartError as error:
        if error.reason == "ErrImageNeverPull":
            message = f"image {get_str(container, 'image')} has no command here, and Ray starts no images"
            fix = "choose a runtime of Headrace, or write the command, which has to be installed on the nodes"
            yield Problem(f"{where}.runner.image", message, fix)
        else:
            yield Problem(f"{where}.runner", error.message, "change it")
        return
    if size and not command.is_headrace:
        yield Problem(f"{where}.runner.command", "another engine over several nodes does not run on Ray", _FIX_RUNTIME)
        return
    ranks, gpus = _ranks(command.args), _gpu_count(container)
    nodes = max(1, size)
    if gpus and ranks > gpus * nodes:
        message = f"the server has {ranks} ranks and {gpus} GPUs" + (f" on each of {nodes} nodes" if nodes > 1 else "")
        fix = f"ask for {_GPUS[0]}: {-(-ranks // nodes)}, on {'one node' if nodes == 1 else 'each node'}"
        yield Problem(f"{where}.runner.resources", message, fix)
    if not size and _option(command.args, ("--nnodes",)) not in ("", "1"):
        yield Problem(f"{where}.runner.args", "--nnodes is not supported on Ray", _FIX_NODES)


def _ranks(args: Collection[str]) -> int:
    value = _option(args, _RANKS)
    return int(value) if value.isascii() and value.isdigit() else 1


def _option(args: Collection[str], names: Collection[str]) -> str:
    """Return the value of an option: `--tp 2` or `--tp=2`."""
    words = list(args)
    for index, word in enumerate(words):
        name, separator, value = word.partition("=")
        if name in names:
            return value if separator else next(iter(words[index + 1 : index + 2]), "")
    return ""


def _amount(container: Document, name: str) -> float:
    """Return what a container asks for: its request, else its limit; 0 without both."""
    resources: Mapping[str, Document] = get_mapping(container, "resources")
    for kind in ("requests", "limits"):
        amount = parse_quantity(get_mapping(resources, kind).get(name))
        if amount and amount > 0:
            return amount
    return 0.0


def _gpu_count(container: Document) -> int:
    return int(max(_amount(container, name) for name in _GPUS))


def _engine_pod(planned: Plan, template: str = "leaderTemplate") -> Document:
    """Return the pod template of the engine's Deployment, or one of its LeaderWorkerSet."""
    wanted = component_name(name_of(planned.service), ENGINE)
    for document in planned.objects:
        if kind_of(document) == "Deployment" and name_of(document) == wanted:
            return get_mapping(document, "spec", "template")
        if kind_of(document) == "LeaderWorkerSet" and name_of(document) == lws_name(wanted):
            return get_mapping(document, "spec", "leaderWorkerTemplate", template)
    return {}


def _runtime_name(planned: Plan) -> str:
    return name_of(planned.selection.runtime) if planned.selection and planned.selection.runtime else "of the service"
