# SPDX-License-Identifier: Apache-2.0
"""One architecture from one YAML or JSON file. Called by `catalogue`.

    name: my-arch                     # what --arch says; the only key that must be there
    image: {key: MY_ARCH, default: registry.example/my:1}    # IMAGE_MY_ARCH replaces the default; none: that of cosmos-rl
    model_path:
      means: parent_model_folder      # with "folder" in it, the path of a model is a folder
      forms: [hub, path, bare]        # hf_model://ORG/NAME, /a/path, ORG/NAME
      keys: [base-2b]                 # examples for --model, where the shape is `flags`
    command:
      shape: job                      # job: --job JSON --docker_env_vars JSON; flags: --checkpoint-path or --model
      program: [my-arch-inference-microservice]
      port: unless 8080               # when --port is written: always, or `unless 8080`
      output_dir: /tmp/out            # --output-dir of the shape `flags`
      options: {idle_timeout_minutes: {flag: --idle-timeout-minutes, type: float}}      # int, float, str or flag
    request:
      fields:                         # int, float or str; `also`: other names of the same
        max_tokens: {type: int, default: 1024, least: 1, most: 4096, meaning: words, also: [max_new_tokens]}
      unsupported: [top_p]            # taken out of requests
      marks: [guidance]               # only requests for this architecture have these
    media: {required: true, images: {png: image/png}, videos: {mp4: video/mp4}, also: [image/jpg]}

Whatever is wrong is told with the file, the line and the key.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, cast, get_args

import yaml

from headrace.core.errors import InvalidArgument, NotFound
from headrace.platforms.architecture import (
    Architecture,
    Field,
    FieldType,
    MediaRules,
    ModelForm,
    Option,
    OptionType,
    PortRule,
    Shape,
)

VERSIONS = "versions.yaml"
"""Lies beside our files and is none of them."""
IMAGE_KEY = re.compile(r"[A-Z][A-Z0-9_]{0,63}")
_NAME = re.compile(r"[a-z0-9][a-z0-9._+-]{0,63}")
_FIELD = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,63}")
_FLAG = re.compile(r"--[A-Za-z][A-Za-z0-9_-]{0,63}")
_EXTENSION = re.compile(r"[a-z0-9]{1,8}")
_MIME = re.compile(r"(image|video)/[a-z0-9.+-]{1,64}")
_MOST_BYTES = 1024 * 1024


def read_folder(folder: Path) -> dict[str, Architecture]:
    """Those of all files of a folder, by name."""
    if not folder.is_dir():
        raise NotFound(f"{folder} is no folder: architectures are files in one")
    found: dict[str, Architecture] = {}
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".yaml", ".yml", ".json") or path.name == VERSIONS or path.name.endswith(".config.json"):
            continue
        arch = read_file(path)
        if arch.name in found:
            raise InvalidArgument(f"{path}: {found[arch.name].source} is named {arch.name} as well; rename one of them")
        found[arch.name] = arch
    return found


def read_file(path: Path) -> Architecture:
    """The architecture of a file."""
    source = _Source.read(path)
    return _architecture(_Part(source, (), source.document()))


@dataclass(frozen=True, slots=True)
class _Source:
    """A file and its text, for errors that say where."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> _Source:
        try:
            with path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
            if len(raw) > _MOST_BYTES:
                raise InvalidArgument(f"{path} has more than {_MOST_BYTES} bytes: that is no architecture")
            return cls(path, raw.decode())
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise InvalidArgument(f"{path} cannot be read: {reason}") from None

    def document(self) -> Any:
        # JSON is YAML but for tabs, which nobody needs.
        try:
            return yaml.safe_load(self.text.replace("\t", " ") if self.path.suffix == ".json" else self.text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = "" if mark is None else f", line {mark.line + 1}"
            raise InvalidArgument(f"{self.path}{line}: not YAML or JSON that can be read") from None

    def line(self, keys: tuple[str, ...]) -> int:
        """Where the last of these keys, that is there, is written."""
        node, line = yaml.compose(self.text.replace("\t", " "), yaml.SafeLoader), 1
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
    """An object of the file, and how one gets to it."""

    source: _Source
    keys: tuple[str, ...]
    given: Any

    def wrong(self, key: str, text: str) -> InvalidArgument:
        keys = (*self.keys, key) if key else self.keys
        where = f"{self.source.path}, line {self.source.line(keys)}"
        return InvalidArgument(f"{where}: {'.'.join(keys) or 'the document'} {text}")

    def value(self) -> dict[str, Any]:
        if self.given is None:
            return {}
        if not isinstance(self.given, dict) or not all(isinstance(key, str) for key in self.given):
            raise self.wrong("", "is no mapping of names")
        return self.given

    def below(self, key: str) -> _Part:
        return _Part(self.source, (*self.keys, key), self.value().get(key))

    def only(self, *known: str) -> dict[str, Any]:
        """The object, which has no other keys."""
        value = self.value()
        for key in value:
            if key not in known:
                raise self.wrong(key[:64], f"is not known here: there are {', '.join(known)}")
        return value

    def text(self, key: str, form: re.Pattern[str] | None = None, *, what: str = "a text") -> str:
        value = self.value().get(key, "")
        if not isinstance(value, str) or (value and form is not None and not form.fullmatch(value)):
            raise self.wrong(key, f"is not {what}")
        if any(ord(char) < 32 or ord(char) == 127 for char in value):
            raise self.wrong(key, "has a control character in it")
        return value

    def one_of(self, key: str, known: tuple[str, ...], default: str) -> str:
        value = self.value().get(key, default)
        if value not in known:
            raise self.wrong(key, f"is none of {', '.join(known)}")
        return cast("str", value)

    def texts(self, key: str, form: re.Pattern[str] | None = None, *, what: str = "texts") -> tuple[str, ...]:
        value = self.value().get(key, [])
        if not isinstance(value, list) or not all(
            isinstance(each, str) and each and "\0" not in each and (form is None or form.fullmatch(each))
            for each in value
        ):
            raise self.wrong(key, f"is no list of {what}")
        return tuple(value)

    def number(self, key: str) -> float | None:
        value = self.value().get(key)
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool)):
            raise self.wrong(key, "is no number")
        return value


def _architecture(top: _Part) -> Architecture:
    given = top.only("name", "image", "model_path", "command", "request", "media")
    if not given.get("name"):
        raise top.wrong("name", "is missing: write the name that --arch is to say")
    name = top.text("name", _NAME, what="a name of lower-case letters, digits, '.', '_', '+' and '-'")
    image, path, command, request = (top.below(key) for key in ("image", "model_path", "command", "request"))
    image.only("key", "default")
    path.only("means", "forms", "keys")
    command.only("shape", "program", "port", "output_dir", "options")
    request.only("fields", "unsupported", "marks")
    default = image.text("default")
    key = image.text("key", IMAGE_KEY, what="a key of capitals, digits and '_'")
    forms = path.texts("forms", re.compile("hub|path|bare"), what="hub, path, bare")
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
        {each: _option(options.below(each), each) for each in options.value()},
        tuple(_field(fields.below(each), each) for each in fields.value()),
        frozenset(request.texts("unsupported", _FIELD)),
        frozenset(request.texts("marks", _FIELD)),
        _media(top.below("media")),
        str(top.source.path),
    )


def _option(part: _Part, name: str) -> Option:
    part.only("flag", "type")
    kind = cast("OptionType", part.one_of("type", get_args(OptionType), "str"))
    flag = part.text("flag", _FLAG, what="a flag such as --idle-timeout-minutes")
    return Option(name, flag or "--" + name.replace("_", "-"), kind)


def _field(part: _Part, name: str) -> Field:
    given = part.only("type", "default", "least", "most", "meaning", "also")
    if not _FIELD.fullmatch(name):
        raise part.wrong("", "is no name for a field")
    kind = cast("FieldType", part.one_of("type", get_args(FieldType), "str"))
    default: Any = given.get("default")
    types: Mapping[str, type | UnionType] = {"int": int, "float": int | float, "str": str}
    fits = isinstance(default, types[kind]) and not isinstance(default, bool)
    if default is not None and not fits:
        raise part.wrong("default", f"is not of the type {kind}")
    least, most = part.number("least"), part.number("most")
    return Field(name, kind, default, least, most, part.text("meaning"), part.texts("also", _FIELD))


def _media(part: _Part) -> MediaRules:
    given = part.only("required", "images", "videos", "also")
    required = given.get("required", False)
    if not isinstance(required, bool):
        raise part.wrong("required", "is neither true nor false")
    return MediaRules(
        required,
        _extensions(part.below("images")),
        _extensions(part.below("videos")),
        frozenset(part.texts("also", _MIME, what="MIME types")),
    )


def _extensions(part: _Part) -> dict[str, str]:
    for extension in part.value():
        if not _EXTENSION.fullmatch(extension):
            raise part.wrong(extension[:64], "is no extension: write it without the dot, in lower case")
        if not part.text(extension, _MIME, what="a MIME type such as image/png"):
            raise part.wrong(extension, "has no MIME type")
    return dict(part.value())
