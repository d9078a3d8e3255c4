# SPDX-License-Identifier: Apache-2.0
"""The catalogue of network architectures, read from data files: ours, those of a user's folder, and TAO's config files.

An architecture is described by one YAML or JSON file:

    name: my-arch                     # the value of --arch; the only required key
    image: {key: MY_ARCH, default: registry.example/my:1}    # IMAGE_MY_ARCH replaces the default; none: that of cosmos-rl
    model_path:
      means: parent_model_folder      # with "folder" in it, the path of a model is a folder
      forms: [hub, path, bare]        # hf_model://ORG/NAME, /a/path, ORG/NAME
      keys: [base-2b]                 # examples for --model, for the shape `flags`
    command:
      shape: job                      # job: --job JSON --docker_env_vars JSON; flags: --checkpoint-path or --model
      program: [my-arch-inference-microservice]
      port: unless 8080               # when --port is passed: always, or `unless 8080`
      output_dir: /tmp/out            # --output-dir of the shape `flags`
      options: {idle_timeout_minutes: {flag: --idle-timeout-minutes, type: float}}      # int, float, str or flag
    request:
      fields:                         # int, float or str; `also`: other names of the same field
        max_tokens: {type: int, default: 1024, least: 1, most: 4096, meaning: text, also: [max_new_tokens]}
      unsupported: [top_p]            # removed from requests
      marks: [guidance]               # fields that only requests for this architecture have
    media: {required: true, images: {png: image/png}, videos: {mp4: video/mp4}, also: [image/jpg]}

Errors name the file, the line and the key. TAO's `{arch}.config.json` may replace the image key and the model path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from types import UnionType
from typing import Any, Literal, cast, get_args

import yaml

from headrace.core.errors import InvalidArgument, NotFound
from headrace.core.names import nearest
from headrace.core.yaml_loader import compose_yaml, load_yaml, yaml_error_line, yaml_error_reason

FieldType = Literal["int", "float", "str"]
OptionType = Literal["int", "float", "str", "flag"]
ModelForm = Literal["hub", "path", "bare"]
"""`hub`: hf_model://ORG/NAME. `path`: an absolute one. `bare`: ORG/NAME."""
Shape = Literal["job", "flags"]
"""`job`: --job and --docker_env_vars. `flags`: --checkpoint-path or --model, and --output-dir."""
PortRule = Literal["always", "unless 8080"]


@dataclass(frozen=True, slots=True)
class Field:
    """A sampling parameter of a request."""

    name: str
    type: FieldType
    default: int | float | str | None = None
    """None: the model has its own default, and requests omit the field."""
    least: float | None = None
    most: float | None = None
    meaning: str = ""
    also: tuple[str, ...] = ()
    """Other names of the field."""


@dataclass(frozen=True, slots=True)
class Option:
    """An optional argument of a service's program."""

    name: str
    flag: str
    type: OptionType


@dataclass(frozen=True, slots=True)
class MediaRules:
    """The images and videos that a request may have."""

    required: bool = False
    """Whether a request needs one."""
    images: Mapping[str, str] = field(default_factory=dict)
    """MIME types by file extension."""
    videos: Mapping[str, str] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    """Additional MIME types."""

    @property
    def mimes(self) -> frozenset[str]:
        """All supported MIME types."""
        return self.also | frozenset(self.images.values()) | frozenset(self.videos.values())


@dataclass(frozen=True, slots=True)
class Architecture:
    """One network architecture."""

    name: str
    image_key: str
    """The key of `IMAGE_<KEY>`."""
    image_default: str
    """A key of versions.yaml, `group.name`, or an image; "" for none."""
    model_path_form: str = ""
    """TAO's name for the model's path: `parent_model_folder`."""
    model_forms: tuple[ModelForm, ...] = ("hub", "path", "bare")
    model_keys: tuple[str, ...] = ()
    """Values of `--model`; never derived from a name."""
    command: Shape = "job"
    program: tuple[str, ...] = ()
    port: PortRule = "unless 8080"
    """When `--port` is passed."""
    output_dir: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    """Sampling parameters that are offered to users."""
    unsupported: frozenset[str] = frozenset()
    """Fields that are removed from a request."""
    marks: frozenset[str] = frozenset()
    """Fields that identify a request for this architecture."""
    media: MediaRules = MediaRules()
    source: str = ""
    """The file that it was read from."""

    @property
    def folder(self) -> bool:
        """Whether a model's path is a folder and not a file."""
        return "folder" in self.model_path_form


FALLBACK_KEY = "COSMOS_RL"
"""The image key of an architecture without one."""
VERSIONS = "versions.yaml"
"""A file in the folder of architectures that is not an architecture."""
IMAGE_KEY = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._+-]{0,63}")
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_-]{0,63}")
_EXTENSION = re.compile(r"[a-z0-9]{1,8}")
_MIME = re.compile(r"(image|video)/[a-z0-9.+-]{1,64}")
_MAX_BYTES = 1024 * 1024


def read_folder(folder: Path) -> dict[str, Architecture]:
    """Return the architectures of a folder, by name."""
    if not folder.is_dir():
        raise NotFound(f"{folder} is not a folder of architecture files")
    architectures: dict[str, Architecture] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".yaml", ".yml", ".json") or path.name == VERSIONS or path.name.endswith(".config.json"):
            continue
        arch = read_file(path)
        if arch.name in architectures:
            raise InvalidArgument(
                f"{path}: {architectures[arch.name].source} is named {arch.name} as well; rename one of them"
            )
        architectures[arch.name] = arch
    return architectures


def read_file(path: Path) -> Architecture:
    """Return the architecture of a file."""
    source = _Source.read(path)
    return _architecture(_Part(source, (), source.document()))


@dataclass(frozen=True, slots=True)
class _Source:
    """A file and its text, for error messages with a line."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> _Source:
        try:
            with path.open("rb") as file:
                raw = file.read(_MAX_BYTES + 1)
            if len(raw) > _MAX_BYTES:
                raise InvalidArgument(f"{path} has more than {_MAX_BYTES} bytes: it is not an architecture")
            return cls(path, raw.decode())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InvalidArgument(f"{path} cannot be read: {reason}") from None

    def document(self) -> Any:
        # JSON is YAML except for tabs.
        try:
            return load_yaml(self.text.replace("\t", " ") if self.path.suffix == ".json" else self.text)
        except (yaml.YAMLError, ValueError) as error:
            line = yaml_error_line(error)
            location = self.path if line is None else f"{self.path}, line {line}"
            raise InvalidArgument(f"{location}: {yaml_error_reason(error, 'not valid YAML or JSON')}") from None

    def line(self, keys: tuple[str, ...]) -> int:
        """Return the line of the last of these keys that exists."""
        node, line = compose_yaml(self.text.replace("\t", " ")), 1
        for key in keys:
            if not isinstance(node, yaml.MappingNode):
                break
            for name, value in node.value:
                if name.value == key:
                    node, line = value, name.start_mark.line + 1
                    break
            else:
                break
        return line


@dataclass(frozen=True, slots=True)
class _Part:
    """An object of the file, and the keys that lead to it."""

    source: _Source
    keys: tuple[str, ...]
    given: Any

    def wrong(self, key: str, text: str) -> InvalidArgument:
        keys = (*self.keys, key) if key else self.keys
        location = f"{self.source.path}, line {self.source.line(keys)}"
        return InvalidArgument(f"{location}: {'.'.join(keys) or 'the document'} {text}")

    def value(self) -> dict[str, Any]:
        if self.given is None:
            return {}
        if not isinstance(self.given, dict) or not all(isinstance(key, str) for key in self.given):
            raise self.wrong("", "is not a mapping of names")
        return self.given

    def below(self, key: str) -> _Part:
        return _Part(self.source, (*self.keys, key), self.value().get(key))

    def only(self, *known: str) -> dict[str, Any]:
        """Return the object. Raises InvalidArgument if it has other keys."""
        value = self.value()
        for key in value:
            if key not in known:
                raise self.wrong(key[:64], f"is unknown here: use {', '.join(known)}")
        return value

    def text(self, key: str, form: re.Pattern[str] | None = None, *, noun: str = "a text") -> str:
        value = self.value().get(key, "")
        if not isinstance(value, str) or (value and form is not None and not form.fullmatch(value)):
            raise self.wrong(key, f"is not {noun}")
        if any(ord(char) < 32 or ord(char) == 127 for char in value):
            raise self.wrong(key, "has a control character in it")
        return value

    def one_of(self, key: str, choices: tuple[str, ...], default: str) -> str:
        value = self.value().get(key, default)
        if value not in choices:
            raise self.wrong(key, f"is none of {', '.join(choices)}")
        return cast("str", value)

    def texts(self, key: str, form: re.Pattern[str] | None = None, *, noun: str = "texts") -> tuple[str, ...]:
        value = self.value().get(key, [])
        if not isinstance(value, list) or not all(
            isinstance(text, str) and text and "\0" not in text and (form is None or form.fullmatch(text))
            for text in value
        ):
            raise self.wrong(key, f"is not a list of {noun}")
        return tuple(value)

    def number(self, key: str) -> float | None:
        value = self.value().get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise self.wrong(key, "is not a number")
        return value


def _architecture(top: _Part) -> Architecture:
    document = top.only("name", "image", "model_path", "command", "request", "media")
    if not document.get("name"):
        raise top.wrong("name", "is missing: add the value of --arch")
    name = top.text("name", _NAME, noun="a name of lower-case letters, digits, '.', '_', '+' and '-'")
    image, path, command, request = (top.below(key) for key in ("image", "model_path", "command", "request"))
    image.only("key", "default")
    path.only("means", "forms", "keys")
    command.only("shape", "program", "port", "output_dir", "options")
    request.only("fields", "unsupported", "marks")
    default = image.text("default")
    key = image.text("key", IMAGE_KEY, noun="a key of capitals, digits and '_'")
    forms = path.texts("forms", re.compile("hub|path|bare"), noun="hub, path, bare")
    fields, options = request.below("fields"), command.below("options")
    return Architecture(
        name,
        key or (re.sub(r"[^A-Z0-9]+", "_", name.upper()) if default else ""),
        default,
        path.text("means"),
        cast("tuple[ModelForm, ...]", forms) or get_args(ModelForm),
        path.texts("keys"),
        cast("Shape", command.one_of("shape", get_args(Shape), "job")),
        command.texts("program") or (f"{name}-inference-microservice",),
        cast("PortRule", command.one_of("port", get_args(PortRule), "unless 8080")),
        command.text("output_dir"),
        {key_name: _option(options.below(key_name), key_name) for key_name in options.value()},
        tuple(_field(fields.below(key_name), key_name) for key_name in fields.value()),
        frozenset(request.texts("unsupported", _FIELD)),
        frozenset(request.texts("marks", _FIELD)),
        _media(top.below("media")),
        str(top.source.path),
    )


def _option(part: _Part, name: str) -> Option:
    part.only("flag", "type")
    kind = cast("OptionType", part.one_of("type", get_args(OptionType), "str"))
    flag = part.text("flag", _FLAG, noun="a flag such as --idle-timeout-minutes")
    return Option(name, flag or "--" + name.replace("_", "-"), kind)


def _field(part: _Part, name: str) -> Field:
    document = part.only("type", "default", "least", "most", "meaning", "also")
    if not _FIELD.fullmatch(name):
        raise part.wrong("", "is not a valid field name")
    kind = cast("FieldType", part.one_of("type", get_args(FieldType), "str"))
    default: Any = document.get("default")
    types: Mapping[str, type | UnionType] = {"int": int, "float": int | float, "str": str}
    fits = isinstance(default, types[kind]) and not isinstance(default, bool)
    if default is not None and not fits:
        raise part.wrong("default", f"is not of the type {kind}")
    minimum, maximum = part.number("least"), part.number("most")
    return Field(name, kind, default, minimum, maximum, part.text("meaning"), part.texts("also", _FIELD))


def _media(part: _Part) -> MediaRules:
    document = part.only("required", "images", "videos", "also")
    required = document.get("required", False)
    if not isinstance(required, bool):
        raise part.wrong("required", "is neither true nor false")
    return MediaRules(
        required,
        _extensions(part.below("images")),
        _extensions(part.below("videos")),
        frozenset(part.texts("also", _MIME, noun="MIME types")),
    )


def _extensions(part: _Part) -> dict[str, str]:
    for extension in part.value():
        if not _EXTENSION.fullmatch(extension):
            raise part.wrong(extension[:64], "is not an extension: write it without the dot, in lower case")
        if not part.text(extension, _MIME, noun="a MIME type such as image/png"):
            raise part.wrong(extension, "has no MIME type")
    return dict(part.value())


def load(extra: Path | None = None) -> Mapping[str, Architecture]:
    """Return all architectures by name: ours, and those of a folder of *.yaml, *.yml and *.json, which may replace ours.

    Raises InvalidArgument with the file, line and key of an error, NotFound if there is no such folder.
    """
    architectures = read_folder(Path(str(files("headrace.platforms") / "architectures")))
    if extra is not None:
        architectures = {**architectures, **read_folder(extra)}
    defaults = image_defaults(architectures.values())
    return {name: _with_image(arch, defaults) for name, arch in sorted(architectures.items())}


def find(catalogue: Mapping[str, Architecture], name: str) -> Architecture:
    """Return an architecture by name. Raises InvalidArgument with the known ones."""
    arch = catalogue.get(name.lower())
    if arch is None:
        closest = nearest(name, catalogue, 0.5)
        meant = f"; did you mean {closest}?" if closest else ""
        raise InvalidArgument(
            f"unknown architecture {name[:64]!a}: use one of {', '.join(catalogue)}, or add a folder with your own by "
            f"--architectures{meant}"
        )
    return arch


def image_defaults(architectures: Iterable[Architecture]) -> dict[str, str]:
    """Return the default image for each image key."""
    return {arch.image_key: arch.image_default for arch in architectures if arch.image_key and arch.image_default}


def configured(
    arch: Architecture, folders: Iterable[Path], catalogue: Mapping[str, Architecture] | None = None
) -> Architecture:
    """Return the architecture with the image key and model path of the first `{arch}.config.json` in these folders, if any.

    A file without an image means `FALLBACK_KEY`. Raises InvalidArgument with the file if it cannot be read.
    """
    for folder in folders:
        path = folder / f"{arch.name.lower()}.config.json"
        if path.is_file():
            return _by_config(arch, path, image_defaults((load() if catalogue is None else catalogue).values()))
    return arch


def _by_config(arch: Architecture, path: Path, defaults: Mapping[str, str]) -> Architecture:
    document = _config(path)
    image = _at(document, path, "api_params", "image")
    form = _at(document, path, "spec_params", "inference", "model_path")
    if image and not IMAGE_KEY.fullmatch(image):
        raise InvalidArgument(
            f"{path}: api_params.image is {image[:64]!a}: write a key of capitals, digits and '_', such as COSMOS_RL"
        )
    key = image or FALLBACK_KEY
    default = arch.image_default if key == arch.image_key else defaults.get(key, "")
    return replace(
        arch,
        image_key=key,
        image_default=default,
        model_path_form=form or arch.model_path_form,
        source=str(path),
    )


def _config(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None)
        raise InvalidArgument(
            f"{path}{'' if line is None else f', line {line}'}: not valid JSON; correct or remove it"
        ) from None


def _at(document: Any, path: Path, *keys: str) -> str:
    for number, key in enumerate(keys):
        if not isinstance(document, dict):
            raise InvalidArgument(f"{path}: {'.'.join(keys[:number]) or 'the document'} is not an object")
        document = document.get(key)
        if document is None:
            return ""
    if not isinstance(document, str):
        raise InvalidArgument(f"{path}: {'.'.join(keys)} is not a string")
    return document


def _with_image(arch: Architecture, defaults: Mapping[str, str]) -> Architecture:
    if arch.image_key:
        return arch if arch.image_default else replace(arch, image_default=defaults.get(arch.image_key, ""))
    return replace(arch, image_key=FALLBACK_KEY, image_default=defaults.get(FALLBACK_KEY, ""))
