# SPDX-License-Identifier: Apache-2.0
"""Combine the command line, the environment and the configuration file of a server.

Used by `headrace serve` and `headrace config show`, and by code that builds server settings without a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.cli.flags import Given
from headrace.cli.options import BY_NAME, CONFIG, keys
from headrace.models.config.formats import is_hub_folder
from headrace.programs.configuration.resolution import Configuration, resolve
from headrace.programs.configuration.sections import problems_of
from headrace.programs.configuration.sources import CONFIG as CONFIG_VARIABLE

MODEL_PATH = "model-path"

Texts = Mapping[str, str | list[str] | None]


@dataclass(frozen=True, slots=True)
class Configured:
    """The resolved configuration of a server."""

    given: Given
    """Every option, whatever its source."""
    configuration: Configuration
    """Every key, with its source."""
    folders: tuple[str, ...]
    """Model folders given on the command line without an option."""
    again: Callable[[], Configuration]
    """Read everything again: the file may have changed."""


def configure(texts: Texts, folders: Sequence[str], environment: Mapping[str, str]) -> Configured:
    """Resolve the configuration. `texts` are the command-line options by name."""
    if len(folders) == 1 and not texts.get(MODEL_PATH) and is_hub_folder(Path(folders[0])):
        # The folder of one model rather than a repository, as with vLLM.
        texts, folders = {**texts, MODEL_PATH: folders[0]}, ()
    line = Given(BY_NAME, texts)
    flags = line.given()
    file = flags.get(CONFIG) or environment.get(CONFIG_VARIABLE, "")
    read = partial(resolve, keys(), flags, environment, file, problems_of)
    configuration = read()
    values = configuration.flag_values()
    if folders:
        # Folders on the command line replace those of the file.
        values.pop("model-repository", None)
    return Configured(Given(BY_NAME, texts, values), configuration, tuple(folders), read)
