# SPDX-License-Identifier: Apache-2.0
"""A container as a command line and variables of this machine. Pure; called by `replica` before each start.

What a kubelet fills in is filled in: `$(VAR)`, fields of the pod, keys of ConfigMaps and Secrets. What a pod has for itself
and a machine has once is changed in words and variables: ports, folders, the hosts of Services, and `0.0.0.0`, which would
open a laptop to its neighbours.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from headrace.fleet.local.selectors import with_services
from headrace.fleet.names import SERVICE_LABEL
from headrace.fleet.planning.pods import DEFAULT_PORT, main_container
from headrace.fleet.selection.measures import quantity
from headrace.fleet.words import Document, annotations_of, items, labels_of, name_of, part, text, whole

ADDRESS = "127.0.0.1"
LEADER_ADDRESS = "LWS_LEADER_ADDRESS"
_VARIABLE = re.compile(r"\$(?:\$|\(([-._A-Za-z0-9]+)\))")
_OURS = re.compile(r"(.*/)?headrace([:@].*)?")
_KEYED = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")
_ANY = re.compile(r"(?<![0-9.])0\.0\.0\.0(?![0-9.])")


class CannotRun(Exception):
    """A container cannot be run here. `reason` is one word of Kubernetes, `message` says what to do."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason, self.message = reason, message


@dataclass(frozen=True)
class Surroundings:
    """What a pod finds on this machine."""

    pod: Document
    node: str
    ports: Mapping[int, int] = field(default_factory=dict)
    """Ports of its containers, and those that it has here."""
    leader_ports: Mapping[int, int] = field(default_factory=dict)
    """Of a worker: those of its leader."""
    paths: Sequence[tuple[str, str]] = ()
    """Folders in the container, and where they lie."""
    hosts: Mapping[str, str] = field(default_factory=dict)
    """`name.namespace.svc.cluster.local` of Services, and `host:port` where they are."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Beside those of the container."""
    find: Callable[[str, str], Document | None] = lambda _kind, _name: None
    """ConfigMaps and Secrets of its namespace; the values of a Secret as `stringData`."""
    image_runs: bool = False
    """Whether the image itself is run, so that its own command does where the container says none."""


@dataclass(frozen=True)
class Line:
    """What to run: `ours` are words for this Headrace, else the first is a program to be found."""

    words: tuple[str, ...]
    variables: Mapping[str, str]
    ours: bool
    entry: int = 0
    """How many of the words stand for the image's entry point."""


def line_of(around: Surroundings, container: Document | None = None) -> Line:
    """A container of a pod, the main one unless told. Raises CannotRun."""
    container = container if container is not None else main_container(part(around.pod, "spec"))
    variables = variables_of(container, around)
    scope = {**variables, **around.variables}
    command = [expanded(str(each), scope) for each in items(container, "command")]
    args = [expanded(str(each), scope) for each in items(container, "args")]
    ours = _is_ours(container)
    if not command and not ours and not around.image_runs:
        image = text(container, "image") or "none"
        raise CannotRun(
            "ErrImageNeverPull",
            f"image {image} needs Docker: run `headrace up --driver docker`, or choose a runtime whose command is here",
        )
    if ours and command[:1] == ["headrace"]:
        command, args = [], [*command[1:], *args]
    ours = ours and not command
    said = [*command, *args]
    if ours and said[:1] == ["router"]:
        said = with_services(said, _service_of(around.pod), text(around.pod, "metadata", "namespace"))
    words = _here(said, around)
    if ours and words[:1] == ["serve"]:
        words += _of_serve(words, around)
    made = {name: _moved(value, around) for name, value in variables.items()}
    for name, value in variables.items():
        if name.upper().endswith("PORT") and value.isdecimal() and int(value) in around.ports:
            made[name] = str(around.ports[int(value)])
    return Line(tuple(words), {**made, **around.variables}, ours, len(command))


def words_here(words: Sequence[str], around: Surroundings) -> list[str]:
    """The words of a probe for this machine."""
    return _here([expanded(each, around.variables) for each in words], around)


def ports_of(pod: Document, *, serves: bool = True) -> tuple[int, ...]:
    """The ports of its containers, those of the main one first. Who serves and names none has 8080."""
    main = main_container(part(pod, "spec"))
    found = _numbers(main) or ([DEFAULT_PORT] if serves else [])
    others = [number for each in containers_of(pod) if each is not main for number in _numbers(each)]
    return tuple(dict.fromkeys([*found, *others]))


def containers_of(pod: Document) -> list[Document]:
    """All of them, those that come first too."""
    return [*items(pod, "spec", "initContainers"), *items(pod, "spec", "containers")]


def _numbers(container: Document) -> list[int]:
    return [number for each in items(container, "ports") if (number := whole(each, "containerPort"))]


def tells(pod: Document, port: int) -> bool:
    """Whether the container of a port is told it, so that it can be told another one."""
    main = main_container(part(pod, "spec"))
    return _told(next((each for each in containers_of(pod) if port in _numbers(each)), main), port)


def _told(container: Document, port: int) -> bool:
    words = [str(each) for each in (*items(container, "command"), *items(container, "args"))]
    if _is_ours(container) and (words[:1] == ["serve"] or words[:2] == ["headrace", "serve"]):
        return True
    named = any(
        text(each, "name").upper().endswith("PORT") and text(each, "value") == str(port)
        for each in items(container, "env")
    )
    return named or _with_ports(words, {port: -1}) != words


def variables_of(container: Document, around: Surroundings) -> dict[str, str]:
    """The variables that a container says, as it says them. Raises CannotRun."""
    made: dict[str, str] = {}
    for each in items(container, "envFrom"):
        for kind, ref in (("ConfigMap", part(each, "configMapRef")), ("Secret", part(each, "secretRef"))):
            if ref:
                found = _found(around, kind, ref)
                made |= {f"{text(each, 'prefix')}{name}": value for name, value in _data(found).items()}
    for each in items(container, "env"):
        name = text(each, "name")
        if not name:
            continue
        if part(each, "valueFrom"):
            value = _from(part(each, "valueFrom"), container, around)
            if value is not None:
                made[name] = value
        else:
            made[name] = expanded(text(each, "value"), {**made, **around.variables})
    return made


def expanded(value: str, variables: Mapping[str, str]) -> str:
    """With `$(VAR)` filled in; one that is not known stays, and `$$` is `$`."""
    return _VARIABLE.sub(lambda found: "$" if found[1] is None else variables.get(found[1], found[0]), value)


def _from(source: Document, container: Document, around: Surroundings) -> str | None:
    if part(source, "fieldRef"):
        return _field(text(source, "fieldRef", "fieldPath"), around)
    if part(source, "resourceFieldRef"):
        asked = part(source, "resourceFieldRef")
        kind, _, resource = text(asked, "resource").partition(".")
        amount = quantity(part(container, "resources", kind).get(resource)) or 0.0
        return str(int(-(-amount // (quantity(asked.get("divisor")) or 1.0))))
    for kind, name in (("ConfigMap", "configMapKeyRef"), ("Secret", "secretKeyRef")):
        asked = part(source, name)
        if asked:
            found, key = _found(around, kind, asked), text(asked, "key")
            if key in _data(found):
                return _data(found)[key]
            if asked.get("optional") is True:
                return None
            said = f"{kind} {text(asked, 'name')} has no key {key}: apply one that has"
            raise CannotRun("CreateContainerConfigError", said)
    return None


def _field(path: str, around: Surroundings) -> str:
    pod = around.pod
    keyed = _KEYED.fullmatch(path)
    if keyed:
        return (labels_of(pod) if keyed[1] == "labels" else annotations_of(pod)).get(keyed[2], "")
    known = {
        "metadata.name": name_of(pod),
        "metadata.namespace": text(pod, "metadata", "namespace"),
        "metadata.uid": text(pod, "metadata", "uid"),
        "spec.nodeName": around.node,
        "spec.serviceAccountName": text(pod, "spec", "serviceAccountName") or "default",
        "status.hostIP": ADDRESS,
        "status.podIP": ADDRESS,
        "status.hostIPs": ADDRESS,
        "status.podIPs": ADDRESS,
    }
    if path not in known:
        raise CannotRun("CreateContainerConfigError", f"there is no field {path} of a pod that a variable can have")
    return known[path]


def _found(around: Surroundings, kind: str, ref: Document) -> Document | None:
    found = around.find(kind, text(ref, "name"))
    if found is None and ref.get("optional") is not True:
        said = f"{kind} {text(ref, 'name')} is not here: apply it"
        raise CannotRun("CreateContainerConfigError", said)
    return found


def _data(document: Document | None) -> dict[str, str]:
    return {
        name: value
        for place in ("data", "stringData")
        for name, value in part(document, place).items()
        if isinstance(value, str)
    }


def _is_ours(container: Document) -> bool:
    return bool(_OURS.fullmatch(text(container, "image")))


def _service_of(pod: Document) -> str:
    """The InferenceService that a pod belongs to."""
    return labels_of(pod).get(SERVICE_LABEL, "")


def _of_serve(words: Sequence[str], around: Surroundings) -> Iterator[str]:
    """Ports that a server of ours opens without being asked: a second one on this machine could not."""
    first = next(iter(around.ports.values()), None)
    if first is not None and not any(each.split("=")[0] == "--http-port" for each in words):
        yield f"--http-port={first}"
    if not any(each.split("=")[0] == "--grpc-port" for each in words):
        yield "--grpc-port=0"
    if not any(each.split("=")[0] == "--metrics-port" for each in words):
        yield "--metrics-port=0"


def _here(words: Sequence[str], around: Surroundings) -> list[str]:
    """The words for this machine. Ports of the pod before the hosts of Services: what those become may look like its own."""
    made = list(words)
    if around.leader_ports:
        made = [
            re.sub(
                rf"{re.escape(ADDRESS)}:([0-9]+)",
                lambda found: f"{ADDRESS}:{around.leader_ports.get(int(found[1]), found[1])}",
                each,
            )
            for each in made
        ]
    return [_moved(each, around) for each in _with_ports(made, around.ports)]


def _moved(value: str, around: Surroundings) -> str:
    """Hosts, folders and the address of all interfaces."""
    for host, place in around.hosts.items():
        value = re.sub(rf"(?<![\w.-]){re.escape(host)}(?::[0-9]+)?(?![\w.-])", place, value)
    for inside, here in sorted(around.paths, key=lambda pair: -len(pair[0])):
        pattern = rf"(?<![\w./\0-]){re.escape(inside.rstrip('/'))}(?=$|[/\s\"':,;)])"
        # Once changed, a path is not to be changed again by a shorter one: what is put in begins like no container's.
        value = re.sub(pattern, lambda _, here=here: f"\0{here}", value)  # type: ignore[misc]
    return _ANY.sub(ADDRESS, value.replace("\0", ""))


def _with_ports(words: Sequence[str], ports: Mapping[int, int]) -> list[str]:
    """Words with other ports: `--port=8080`, `--port 8080`, `host:8080`, and the same in a line for a shell."""
    made: list[str] = []
    for index, word in enumerate(words):
        before = words[index - 1].lower() if index else ""
        if (
            word.isdecimal()
            and int(word) in ports
            and before.startswith("-")
            and before.rstrip("=").endswith(("port", "-p"))
        ):
            made.append(str(ports[int(word)]))
            continue

        def swapped(found: re.Match[str]) -> str:
            return f"{found[1]}{ports.get(int(found[2]), found[2])}"

        made.append(re.sub(r"((?i:port)[=\s]\s*[\"']?|(?<=[\w\])]):)([0-9]{1,5})(?![\w.])", swapped, word))
    return made
