# SPDX-License-Identifier: Apache-2.0
"""The command line and environment of a container on this machine. Pure.

It fills in what a kubelet fills in: `$(VAR)`, fields of the pod, keys of ConfigMaps and Secrets. It replaces, in arguments
and variables, what each pod has for itself in a cluster and the machine has once: ports, folders, hosts of Services, and
`0.0.0.0`, which would open a laptop to its network.

A router of ours that finds pods by labels would query an API server, which does not exist here. It gets the Services of
those pods instead: a Service of this machine knows which pods are ready.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.fleet.names import COMPONENT_LABEL, SERVICE_LABEL, component_name, trunc63
from headrace.fleet.planning.context import CLUSTER_DOMAIN
from headrace.fleet.planning.pod_templates import DEFAULT_PORT, main_container
from headrace.fleet.selection.model_match import parse_quantity
from headrace.platforms.kubernetes_client.objects import (
    Document,
    annotations_of,
    get_int,
    get_list,
    get_mapping,
    get_str,
    labels_of,
    name_of,
)

ADDRESS = "127.0.0.1"
LEADER_ADDRESS = "LWS_LEADER_ADDRESS"
_VARIABLE = re.compile(r"\$(?:\$|\(([-._A-Za-z0-9]+)\))")
_HEADRACE_IMAGE = re.compile(r"(.*/)?headrace([:@].*)?")
_LABEL_FIELD = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_ANY_ADDRESS = re.compile(r"(?<![0-9.])0\.0\.0\.0(?![0-9.])")


class ContainerStartError(Exception):
    """A container cannot be started here. `reason` is Kubernetes' reason, `message` says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


@dataclass(frozen=True)
class CommandContext:
    """What a container's command depends on: its pod, and this machine."""

    pod: Document
    node: str
    ports: Mapping[int, int] = field(default_factory=dict)
    """Container ports, and the ports of this machine in their place."""
    leader_ports: Mapping[int, int] = field(default_factory=dict)
    """For a worker of a group: the ports of its leader."""
    paths: Sequence[tuple[str, str]] = ()
    """Mount paths, and the folders of this machine in their place."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """`name.namespace.svc.cluster.local` of Services, and the `host:port` of their routers."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the container."""
    find: Callable[[str, str], Document | None] = lambda _kind, _name: None
    """Find a ConfigMap or Secret of the namespace; the values of a Secret are decoded."""
    runs_image: bool = False
    """Whether the image itself runs, so that its own command is used if the container has none."""
    leader_address: str = ADDRESS
    """For a worker of a group: where its leader is."""


@dataclass(frozen=True)
class ContainerCommand:
    """A command line. `is_headrace`: arguments of this Headrace; otherwise the first argument is a program."""

    args: tuple[str, ...]
    environment: Mapping[str, str]
    is_headrace: bool
    entrypoint_args: int = 0
    """How many of the arguments replace the image's entry point."""


def build_command(context: CommandContext, container: Document | None = None) -> ContainerCommand:
    """Return the command of a container of a pod, by default the main one. Raises ContainerStartError."""
    container = container if container is not None else main_container(get_mapping(context.pod, "spec"))
    variables = container_environment(container, context)
    scope = {**variables, **context.environment}
    command = [expand_variables(str(arg), scope) for arg in get_list(container, "command")]
    arguments = [expand_variables(str(arg), scope) for arg in get_list(container, "args")]
    is_headrace = _is_headrace_image(container)
    if not command and not is_headrace and not context.runs_image:
        image = get_str(container, "image") or "none"
        raise ContainerStartError(
            "ErrImageNeverPull",
            f"image {image} needs Docker: run `headrace up --driver docker`, or choose a runtime whose command is installed",
        )
    if is_headrace and command[:1] == ["headrace"]:
        command, arguments = [], [*command[1:], *arguments]
    is_headrace = is_headrace and not command
    args = [*command, *arguments]
    if is_headrace and args[:1] == ["router"]:
        args = replace_selectors(args, _service_name(context.pod), get_str(context.pod, "metadata", "namespace"))
    localized = _localize(args, context)
    if is_headrace and localized[:1] == ["serve"]:
        localized += _serve_port_args(localized, context)
    environment = {name: _localize_value(value, context) for name, value in variables.items()}
    for name, value in variables.items():
        if name.upper().endswith("PORT") and value.isdecimal() and int(value) in context.ports:
            environment[name] = str(context.ports[int(value)])
    return ContainerCommand(tuple(localized), {**environment, **context.environment}, is_headrace, len(command))


def localize_args(args: Sequence[str], context: CommandContext) -> list[str]:
    """Return the arguments of a probe's command for this machine."""
    return _localize([expand_variables(arg, context.environment) for arg in args], context)


def container_ports(pod: Document, *, serves: bool = True) -> tuple[int, ...]:
    """Return the container ports of a pod, those of the main container first; 8080 if it serves and declares none."""
    main = main_container(get_mapping(pod, "spec"))
    ports = _port_numbers(main) or ([DEFAULT_PORT] if serves else [])
    others = [
        number for container in all_containers(pod) if container is not main for number in _port_numbers(container)
    ]
    return tuple(dict.fromkeys([*ports, *others]))


def all_containers(pod: Document) -> list[Document]:
    """Return all containers of a pod, init containers first."""
    return [*get_list(pod, "spec", "initContainers"), *get_list(pod, "spec", "containers")]


def _port_numbers(container: Document) -> list[int]:
    return [number for port in get_list(container, "ports") if (number := get_int(port, "containerPort"))]


def is_port_configurable(pod: Document, port: int) -> bool:
    """Whether the command or a variable of the container sets the port, so that it can be replaced."""
    main = main_container(get_mapping(pod, "spec"))
    return _configures_port(
        next((container for container in all_containers(pod) if port in _port_numbers(container)), main), port
    )


def _configures_port(container: Document, port: int) -> bool:
    args = [str(arg) for arg in (*get_list(container, "command"), *get_list(container, "args"))]
    if _is_headrace_image(container) and (args[:1] == ["serve"] or args[:2] == ["headrace", "serve"]):
        return True
    is_variable = any(
        get_str(variable, "name").upper().endswith("PORT") and get_str(variable, "value") == str(port)
        for variable in get_list(container, "env")
    )
    return is_variable or _replace_ports(args, {port: -1}) != args


def container_environment(container: Document, context: CommandContext) -> dict[str, str]:
    """Return the variables of a container, before they are localized. Raises ContainerStartError."""
    variables: dict[str, str] = {}
    for source in get_list(container, "envFrom"):
        for kind, ref in (
            ("ConfigMap", get_mapping(source, "configMapRef")),
            ("Secret", get_mapping(source, "secretRef")),
        ):
            if ref:
                document = _find(context, kind, ref)
                variables |= {f"{get_str(source, 'prefix')}{name}": value for name, value in _data(document).items()}
    for source in get_list(container, "env"):
        name = get_str(source, "name")
        if not name:
            continue
        if get_mapping(source, "valueFrom"):
            value = _value_from(get_mapping(source, "valueFrom"), container, context)
            if value is not None:
                variables[name] = value
        else:
            variables[name] = expand_variables(get_str(source, "value"), {**variables, **context.environment})
    return variables


def expand_variables(value: str, variables: Mapping[str, str]) -> str:
    """Return a text with `$(VAR)` filled in; an unknown variable is left as it is, and `$$` is `$`."""
    return _VARIABLE.sub(lambda match: "$" if match[1] is None else variables.get(match[1], match[0]), value)


def _value_from(source: Document, container: Document, context: CommandContext) -> str | None:
    if get_mapping(source, "fieldRef"):
        return _field(get_str(source, "fieldRef", "fieldPath"), context)
    if get_mapping(source, "resourceFieldRef"):
        reference = get_mapping(source, "resourceFieldRef")
        kind, _, resource = get_str(reference, "resource").partition(".")
        amount = parse_quantity(get_mapping(container, "resources", kind).get(resource)) or 0.0
        return str(int(-(-amount // (parse_quantity(reference.get("divisor")) or 1.0))))
    for kind, name in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        reference = get_mapping(source, name)
        if reference:
            document, key = _find(context, kind, reference), get_str(reference, "key")
            if key in _data(document):
                return _data(document)[key]
            if reference.get("optional") is True:
                return None
            message = f"{kind} {get_str(reference, 'name')} has no key {key}: apply one that has it"
            raise ContainerStartError("CreateContainerConfigError", message)
    return None


def _field(path: str, context: CommandContext) -> str:
    pod = context.pod
    match = _LABEL_FIELD.fullmatch(path)
    if match:
        return (labels_of(pod) if match[1] == "labels" else annotations_of(pod)).get(match[2], "")
    fields = {
        "metadata.name": name_of(pod),
        "metadata.namespace": get_str(pod, "metadata", "namespace"),
        "metadata.uid": get_str(pod, "metadata", "uid"),
        "spec.nodeName": context.node,
        "spec.serviceAccountName": get_str(pod, "spec", "serviceAccountName") or "default",
        "status.hostIP": ADDRESS,
        "status.podIP": ADDRESS,
        "status.hostIPs": ADDRESS,
        "status.podIPs": ADDRESS,
    }
    if path not in fields:
        raise ContainerStartError("CreateContainerConfigError", f"a variable cannot refer to the field {path} of a pod")
    return fields[path]


def _find(context: CommandContext, kind: str, reference: Document) -> Document | None:
    document = context.find(kind, get_str(reference, "name"))
    if document is None and reference.get("optional") is not True:
        message = f"{kind} {get_str(reference, 'name')} does not exist: apply it"
        raise ContainerStartError("CreateContainerConfigError", message)
    return document


def _data(document: Document | None) -> dict[str, str]:
    return {
        name: value
        for field in ("data", "stringData")
        for name, value in get_mapping(document, field).items()
        if isinstance(value, str)
    }


def _is_headrace_image(container: Document) -> bool:
    return bool(_HEADRACE_IMAGE.fullmatch(get_str(container, "image")))


def _service_name(pod: Document) -> str:
    """Return the InferenceService that a pod belongs to."""
    return labels_of(pod).get(SERVICE_LABEL, "")


def _serve_port_args(args: Sequence[str], context: CommandContext) -> Iterator[str]:
    """Yield options for ports that our server opens by default: a second server on this machine could not open them."""
    first = next(iter(context.ports.values()), None)
    if first is not None and not any(arg.split("=")[0] == "--http-port" for arg in args):
        yield f"--http-port={first}"
    if not any(arg.split("=")[0] == "--grpc-port" for arg in args):
        yield "--grpc-port=0"
    if not any(arg.split("=")[0] == "--metrics-port" for arg in args):
        yield "--metrics-port=0"


def _localize(args: Sequence[str], context: CommandContext) -> list[str]:
    """Return arguments for this machine. Replaces ports first: the address of a host may look like a port of the pod."""
    localized = list(args)
    if context.leader_ports:
        localized = [
            re.sub(
                rf"{re.escape(context.leader_address)}:([0-9]+)",
                lambda match: f"{context.leader_address}:{context.leader_ports.get(int(match[1]), match[1])}",
                arg,
            )
            for arg in localized
        ]
    return [_localize_value(arg, context) for arg in _replace_ports(localized, context.ports)]


def _localize_value(value: str, context: CommandContext) -> str:
    """Replace hosts, folders and the address of all interfaces."""
    for host, address in context.hosts.items():
        value = re.sub(rf"(?<![\w.-]){re.escape(host)}(?::[0-9]+)?(?![\w.-])", address, value)
    for mount_path, host_path in sorted(context.paths, key=lambda pair: -len(pair[0])):
        pattern = rf"(?<![\w./\0-]){re.escape(mount_path.rstrip('/'))}(?=$|[/\s\"':,;)])"
        # A replaced path must not be replaced again by a shorter one: it starts with a byte that no path has.
        value = re.sub(pattern, lambda _, host_path=host_path: f"\0{host_path}", value)  # type: ignore[misc]
    return _ANY_ADDRESS.sub(ADDRESS, value.replace("\0", ""))


def _replace_ports(args: Sequence[str], ports: Mapping[int, int]) -> list[str]:
    """Replace ports: `--port=8080`, `--port 8080`, `host:8080`, and the same in a line for a shell."""
    replaced: list[str] = []
    for index, arg in enumerate(args):
        before = args[index - 1].lower() if index else ""
        if (
            arg.isdecimal()
            and int(arg) in ports
            and before.startswith("-")
            and before.rstrip("=").endswith(("port", "-p"))
        ):
            replaced.append(str(ports[int(arg)]))
            continue

        def replace_port(match: re.Match[str]) -> str:
            return f"{match[1]}{ports.get(int(match[2]), match[2])}"

        replaced.append(re.sub(r"((?i:port)[=\s]\s*[\"']?|(?<=[\w\])]):)([0-9]{1,5})(?![\w.])", replace_port, arg))
    return replaced


_ROLES = {
    "--discover-pods": "",
    "--discover-prefill-pods": ",role=prefill",
    "--discover-decode-pods": ",role=decode",
}


def replace_selectors(args: Sequence[str], service: str, namespace: str) -> list[str]:
    """Return the arguments of a router with label selectors replaced by the Services of the selected components."""
    replaced: list[str] = []
    for flag, value, original in _flags(args):
        component = _component(value) if flag in _ROLES else ""
        if component:
            host = f"{trunc63(component_name(service, component))}.{namespace}.{CLUSTER_DOMAIN}"
            replaced.append(f"--backend=http://{host}:{DEFAULT_PORT}{_ROLES[flag]}")
        else:
            replaced += original
    return replaced


def selected_components(args: Sequence[str]) -> set[str]:
    """Return the components whose pods a router selects."""
    return {component for flag, value, _ in _flags(args) if flag in _ROLES and (component := _component(value))}


def _flags(args: Sequence[str]) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each flag, its value, and its arguments: one or two."""
    remaining = iter(args)
    for arg in remaining:
        if arg in _ROLES:
            value = next(remaining, "")
            yield arg, value, [arg, value]
        else:
            flag, _, value = arg.partition("=")
            yield flag, value, [arg]


def _component(selector: str) -> str:
    labels = dict(label.split("=", 1) for label in selector.split(",") if "=" in label)
    return labels.get(COMPONENT_LABEL, "")
