# SPDX-License-Identifier: Apache-2.0
"""What is known of a kind of service. Made by `architecture_files` and `catalogue`; others take it from `catalogue`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

FieldType = Literal["int", "float", "str"]
OptionType = Literal["int", "float", "str", "flag"]
ModelForm = Literal["hub", "path", "bare"]
"""`hub`: hf_model://ORG/NAME. `path`: an absolute one. `bare`: ORG/NAME."""
Shape = Literal["job", "flags"]
"""`job`: all is told by --job and --docker_env_vars. `flags`: by --checkpoint-path or --model, and --output-dir."""
PortRule = Literal["always", "unless 8080"]


@dataclass(frozen=True, slots=True)
class Field:
    """A sampling parameter of a request, as it is offered to people."""

    name: str
    type: FieldType
    default: int | float | str | None = None
    """None where the model decides: then a request has no such field."""
    least: float | None = None
    most: float | None = None
    meaning: str = ""
    also: tuple[str, ...] = ()
    """Other names of it: a request that has one of them has the field."""


@dataclass(frozen=True, slots=True)
class Option:
    """A word of the command line that a service can do without."""

    name: str
    flag: str
    type: OptionType


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Pictures and videos of a request."""

    required: bool = False
    """Whether a request without any is refused."""
    images: Mapping[str, str] = field(default_factory=dict)
    """Extensions of files, and the MIME type that each is sent as."""
    videos: Mapping[str, str] = field(default_factory=dict)
    also: frozenset[str] = frozenset()
    """More MIME types that are taken."""

    @property
    def mimes(self) -> frozenset[str]:
        """All that are taken."""
        return self.also | frozenset(self.images.values()) | frozenset(self.videos.values())


@dataclass(frozen=True, slots=True)
class Architecture:
    """One kind of service."""

    name: str
    image_key: str
    """Of `IMAGE_<KEY>`."""
    image_default: str
    """A key of versions.yaml, `group.name`, or an image; "" for none."""
    model_path_form: str = ""
    """TAO's word for what the model's path is: `parent_model_folder`."""
    model_forms: tuple[ModelForm, ...] = ("hub", "path", "bare")
    model_keys: tuple[str, ...] = ()
    """For `--model`, which is never derived from a name."""
    command: Shape = "job"
    program: tuple[str, ...] = ()
    port: PortRule = "unless 8080"
    """When `--port` is written."""
    output_dir: str = ""
    options: Mapping[str, Option] = field(default_factory=dict)
    fields: tuple[Field, ...] = ()
    """What people are asked for before a request."""
    unsupported: frozenset[str] = frozenset()
    """Fields that are taken out of a request."""
    marks: frozenset[str] = frozenset()
    """Fields by which a request is seen to be for this architecture and no other."""
    media: MediaRules = MediaRules()
    source: str = ""
    """The file that says so."""

    @property
    def folder(self) -> bool:
        """Whether a model's path is a folder and not a file."""
        return "folder" in self.model_path_form
