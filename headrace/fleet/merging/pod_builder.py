# SPDX-License-Identifier: Apache-2.0
"""Build a pod spec from a merged pod: add the model, the accelerator class, and their nodes, volumes and variables."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from headrace.fleet.documents import Problem, namespace_of
from headrace.fleet.names import INJECT_FINE_TUNED_ADAPTER, INJECT_MODEL_INIT, model_label, trunc63
from headrace.platforms.kubernetes_client.objects import (
    Document,
    get_int,
    get_list,
    get_mapping,
    get_str,
    kind_of,
    name_of,
)


class PodBuilder:
    """A pod spec under construction. `main` is the container that serves."""

    def __init__(self, pod: Document, main_name: str, service: Document) -> None:
        self.pod: dict[str, Any] = dict(pod)
        containers = [container for container in get_list(pod, "containers") if isinstance(container, dict)]
        index = next((number for number, container in enumerate(containers) if container.get("name") == main_name), 0)
        self.main: dict[str, Any] | None = None
        if containers:
            self.main = containers[index] = dict(containers[index])
        self.pod["containers"] = containers
        self.service = service
        """The pod as the service itself defines it."""
        main_containers = [
            container for container in get_list(service, "containers") if get_str(container, "name") == main_name
        ]
        self.service_main: Document = main_containers[0] if main_containers else {}
        self.accelerated: list[str] = []
        """Fields that the accelerator class has set."""

    @property
    def main_path(self) -> str:
        """Path of the main container in the origins."""
        return f"containers[{get_str(self.main, 'name')}]"

    def service_sets(self, *path: str) -> bool:
        """Whether the service itself sets a field of the pod."""
        return bool(get_mapping(self.service, *path[:-1]).get(path[-1]))

    def variable(self, name: str) -> Document | None:
        """Return an environment variable of the main container."""
        return next((variable for variable in get_list(self.main, "env") if get_str(variable, "name") == name), None)

    def service_variables(self) -> Collection[str]:
        """Return the names of the variables that the service itself sets."""
        return {get_str(variable, "name") for variable in get_list(self.service_main, "env")}

    def set_variable(self, name: str, value: str, *, keep: bool) -> bool:
        """Set a variable of the main container; with `keep`, only if it is not set. Return whether it was set."""
        if self.main is None or (keep and self.variable(name) is not None):
            return False
        variable, env = {"name": name, "value": value}, get_list(self.main, "env")
        places = [number for number, other in enumerate(env) if get_str(other, "name") == name]
        if places:
            env[places[0]] = variable
        else:
            env.append(variable)
        self.main["env"] = env
        return True

    def add_volume(self, volume: Document) -> None:
        """Add a volume, unless one of its name exists."""
        volumes = get_list(self.pod, "volumes")
        if all(get_str(other, "name") != volume["name"] for other in volumes):
            self.pod["volumes"] = [*volumes, volume]

    def add_mount(self, mount: Document) -> None:
        """Mount a volume in the main container, unless something is mounted there."""
        if self.main is None:
            return
        mounts = get_list(self.main, "volumeMounts")
        if all(get_str(other, "mountPath") != mount["mountPath"] for other in mounts):
            self.main["volumeMounts"] = [*mounts, mount]

    def select_nodes(self, labels: Document) -> None:
        """Add node labels to the node selector."""
        if labels:
            self.pod["nodeSelector"] = {**get_mapping(self.pod, "nodeSelector"), **labels}

    def prefer_nodes(self, key: str, value: str) -> None:
        """Prefer nodes with a label."""
        term = {
            "weight": 100,
            "preference": {"matchExpressions": [{"key": key, "operator": "In", "values": [value]}]},
        }
        affinity, node = get_mapping(self.pod, "affinity"), get_mapping(self.pod, "affinity", "nodeAffinity")
        field = "preferredDuringSchedulingIgnoredDuringExecution"
        self.pod["affinity"] = {**affinity, "nodeAffinity": {**node, field: [*get_list(node, field), term]}}

    def accelerators(self, names: Collection[str]) -> int:
        """Return how many accelerators the main container requests."""
        resources = get_mapping(self.main, "resources")
        maximum = 0
        for name in names:
            for value in (get_mapping(resources, "limits").get(name), get_mapping(resources, "requests").get(name)):
                if isinstance(value, str | int) and not isinstance(value, bool) and str(value).isascii():
                    maximum = max(maximum, int(value) if str(value).isdigit() else 0)
        return maximum


MODEL_PATH = "MODEL_PATH"
WEIGHT_PATH, WEIGHT_NAME = "FINE_TUNED_WEIGHT_PATH", "FINE_TUNED_WEIGHT_NAME"
MEMORY_VOLUME, MEMORY_PATH = "model-empty-dir", "/opt/ml/model"
READY = "Ready"


def has_merged_weights(weights: Sequence[Document]) -> bool:
    """Whether the weights contain their base model."""
    return bool(weights) and get_mapping(weights[0], "spec", "configuration").get("merged_weights") in (True, "true")


def add_model(
    builder: PodBuilder,
    model: Document | None,
    weights: Sequence[Document],
    annotations: Mapping[str, str],
    *,
    serves: bool,
    pinning: Literal["required", "preferred", "none"],
) -> None:
    """Add the model to a pod. A router only gets the volume."""
    in_memory = annotations.get(INJECT_MODEL_INIT) == "true" or INJECT_FINE_TUNED_ADAPTER in annotations
    if in_memory:
        builder.add_volume({"name": MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}})
        if serves:
            builder.add_mount({"name": MEMORY_VOLUME, "mountPath": MEMORY_PATH})
            builder.set_variable(MODEL_PATH, MEMORY_PATH, keep=True)
    for number, weight in enumerate(weights):
        _add_weight(builder, weight, serves=serves, is_model=has_merged_weights(weights) and number == 0)
    if model is None or has_merged_weights(weights):
        return
    if not in_memory:
        path = _add_files(builder, model, volume_name(name_of(model)), serves=serves)
        if serves and path:
            builder.set_variable(MODEL_PATH, path, keep=True)
    if serves and not parse_claim(model):
        _pin_to_nodes(builder, model, pinning)


def _add_files(builder: PodBuilder, document: Document, name: str, *, serves: bool) -> str:
    """Add the volume of a model or a weight and its mount. Return the mount path."""
    path, claim = get_str(document, "spec", "storage", "path"), parse_claim(document)
    if not path and not claim:
        return ""
    mount: dict[str, Any] = {"name": name, "mountPath": path or MEMORY_PATH, "readOnly": True}
    if claim:
        _, claim_name, subpath = claim
        builder.add_volume({"name": name, "persistentVolumeClaim": {"claimName": claim_name, "readOnly": True}})
        if subpath:
            mount["subPath"] = subpath
    else:
        builder.add_volume({"name": name, "hostPath": {"path": path}})
    if serves:
        builder.add_mount(mount)
    return str(mount["mountPath"])


def _add_weight(builder: PodBuilder, weight: Document, *, serves: bool, is_model: bool) -> None:
    # Prefixed: a weight may have the name of its model.
    path = _add_files(builder, weight, volume_name(f"weight-{name_of(weight)}"), serves=serves)
    if serves and path:
        builder.set_variable(WEIGHT_PATH, path, keep=True)
        builder.set_variable(WEIGHT_NAME, name_of(weight), keep=True)
        if is_model:
            builder.set_variable(MODEL_PATH, path, keep=True)


def _pin_to_nodes(builder: PodBuilder, model: Document, pinning: str) -> None:
    if pinning == "none":
        return
    label = model_label(name_of(model), namespace_of(model) if kind_of(model) == "BaseModel" else "")
    if pinning == "required":
        builder.select_nodes({label: READY})
    else:
        builder.prefer_nodes(label, READY)


def parse_claim(document: Document) -> tuple[str, str, str] | None:
    """Return the namespace ("" for the pod's own), name and folder of a model's claim, if it is on one."""
    scheme, separator, rest = get_str(document, "spec", "storage", "storageUri").partition("://")
    if scheme != "pvc" or not separator:
        return None
    claim, _, subpath = rest.partition("/")
    namespace, colon, name = claim.partition(":")
    return (namespace, name, subpath.strip("/")) if colon else ("", claim, subpath.strip("/"))


def claim_problem(model: Document | None, namespace: str) -> Problem | None:
    """Return the problem of a claim in another namespace, which pods cannot mount."""
    claim = parse_claim(model) if model is not None else None
    if claim is None or claim[0] in ("", namespace):
        return None
    message = f"the model's files are on a claim of namespace {claim[0]}, and pods of {namespace} cannot mount it"
    return Problem("spec.model.name", message, f"create the service in {claim[0]}, or copy the model to {namespace}")


def volume_name(name: str) -> str:
    """Turn a model's name into that of a volume: no dots, at most 63 characters."""
    return trunc63(name.replace(".", "-"))


PARALLELISM_SIZE = "PARALLELISM_SIZE"
GPU = "nvidia.com/gpu"
_TENSOR = ("--tp-size", "--tp", "--tensor-parallel-size")
_PIPELINE = ("--pp-size", "--pp", "--pipeline-parallel-size")
_DATA = ("--dp-size", "--dp", "--data-parallel-size")


def add_accelerator(builder: PodBuilder, accelerator: Document, entry: Document | None, *, upstream: bool) -> None:
    """Apply an accelerator class to a pod. `entry`: the runtime's supported format, with settings per class."""
    spec = get_mapping(accelerator, "spec")
    _add_nodes(builder, spec)
    if builder.main is None:
        return
    if not get_mapping(builder.service_main, "resources"):
        _add_resources(builder, get_list(spec, "resources"))
    settings = get_mapping(entry, "acceleratorConfig", name_of(accelerator))
    _add_variables(builder, get_mapping(settings, "environmentOverride"), upstream)
    overrides = [argument for argument in get_list(settings, "runtimeArgsOverride") if isinstance(argument, str)]
    if overrides:
        builder.main["args"] = merge_args(_strings(builder.main.get("args")), overrides)
        builder.accelerated.append(f"{builder.main_path}.args")
    sizes = get_mapping(settings, "tensorParallelismOverride")
    for field, flags in (
        ("tensorParallelSize", _TENSOR),
        ("pipelineParallelSize", _PIPELINE),
        ("dataParallelSize", _DATA),
    ):
        size = get_int(sizes, field)
        # OME has no flag for data parallelism.
        if size and not (upstream and flags is _DATA):
            _set_flag(builder, flags, size)


def add_parallelism(builder: PodBuilder, accelerator: Document | None, workers: int, *, upstream: bool) -> None:
    """Set the number of accelerators of a group as a variable. OME does not do so with an accelerator class."""
    if accelerator is not None and upstream:
        return
    names = {GPU}
    if accelerator is not None:
        names |= {get_str(resource, "name") for resource in get_list(accelerator, "spec", "resources")}
    count = builder.accelerators(names)
    settled = accelerator is not None and builder.variable(PARALLELISM_SIZE) is not None
    if count and not settled and (upstream or PARALLELISM_SIZE not in builder.service_variables()):
        builder.set_variable(PARALLELISM_SIZE, str(count * (1 + workers)), keep=False)


def _add_nodes(builder: PodBuilder, spec: Document) -> None:
    own = get_mapping(builder.service, "nodeSelector")
    labels = {name: value for name, value in get_mapping(spec, "discovery", "nodeSelector").items() if name not in own}
    builder.select_nodes(labels)
    builder.accelerated.extend(f"nodeSelector.{name}" for name in labels)
    affinity = get_mapping(spec, "discovery", "affinity")
    if affinity and not builder.service_sets("affinity"):
        builder.pod["affinity"] = affinity
        builder.accelerated.append("affinity")


def _add_resources(builder: PodBuilder, resources: Iterable[Any]) -> None:
    counts = {
        get_str(resource, "name"): resource.get("quantity", "1")
        for resource in resources
        if isinstance(resource, dict) and get_str(resource, "name")
    }
    if builder.main is None or not counts:
        return
    resources_before = get_mapping(builder.main, "resources")
    builder.main["resources"] = {
        **resources_before,
        "requests": {**get_mapping(resources_before, "requests"), **counts},
        "limits": {**get_mapping(resources_before, "limits"), **counts},
    }
    builder.accelerated.extend(
        f"{builder.main_path}.resources.{kind}.{name}" for kind in ("requests", "limits") for name in counts
    )


def _add_variables(builder: PodBuilder, variables: Document, upstream: bool) -> None:
    kept = () if upstream else builder.service_variables()
    for name in sorted(variables):
        if name not in kept and isinstance(variables[name], str):
            builder.set_variable(name, variables[name], keep=False)
            builder.accelerated.append(f"{builder.main_path}.env[{name}]")


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def merge_args(args: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """Override arguments by the names of their flags."""
    if _is_script(args):
        script = args[0]
        for flag, flag_args in _group_flags(overrides):
            value = " ".join(flag_args)
            match = _flag_pattern(flag).search(script) if flag else None
            before, after = (script[: match.start()], script[match.end() :]) if match else (f"{script.rstrip()} ", "")
            script = f"{before}{value}{after}"
        return [script]
    groups = _group_flags(args)
    for flag, flag_args in _group_flags(overrides):
        places = [number for number, (name, _) in enumerate(groups) if flag and name == flag]
        if places:
            groups[places[0]] = (flag, flag_args)
        else:
            groups.append((flag, flag_args))
    return [arg for _, flag_args in groups for arg in flag_args]


def _group_flags(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Group flags with their values: `--a 1`, `--a=1` and `--a`; other arguments are groups without a flag."""
    groups: list[tuple[str, list[str]]] = []
    for arg in args:
        if arg.startswith("--"):
            groups.append((arg.partition("=")[0], [arg]))
        elif groups and groups[-1][0] and "=" not in groups[-1][1][0] and not arg.startswith("-"):
            groups[-1][1].append(arg)
        else:
            groups.append(("", [arg]))
    return groups


def _is_script(args: Sequence[str]) -> bool:
    """Whether the arguments are one shell script."""
    return len(args) == 1 and bool(re.search(r"\s--?\w", args[0]))


def _flag_pattern(flag: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\S){re.escape(flag)}(?:(?:=|\s+)(?!-)[^\s\\]+|(?=\s|$))")


def _set_flag(builder: PodBuilder, flags: Sequence[str], size: int) -> None:
    """Set the value of the first of some flags that exists in the arguments, else in the command."""
    if builder.main is None:
        return
    for field in ("args", "command"):
        args = _strings(builder.main.get(field))
        for flag in flags:
            changed = _replace_flag_value(args, flag, str(size))
            if changed is not None:
                builder.main[field] = changed
                builder.accelerated.append(f"{builder.main_path}.{field}")
                return


def _replace_flag_value(args: list[str], flag: str, value: str) -> list[str] | None:
    for number, arg in enumerate(args):
        if arg == flag and number + 1 < len(args):
            return [*args[: number + 1], value, *args[number + 2 :]]
        if arg.startswith(f"{flag}="):
            return [*args[:number], f"{flag}={value}", *args[number + 1 :]]
        match = re.search(rf"(?<!\S){re.escape(flag)}(=|\s+)[^\s\\]+", arg) if len(arg.split()) > 1 else None
        if match:
            changed = f"{arg[: match.start()]}{flag}{match[1]}{value}{arg[match.end() :]}"
            return [*args[:number], changed, *args[number + 1 :]]
    return None
