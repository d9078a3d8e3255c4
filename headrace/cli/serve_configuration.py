# SPDX-License-Identifier: Apache-2.0
"""The command line, the environment and the configuration file of a server, put together.

Called by `headrace serve` and `headrace config show`; also by whoever makes settings of a server without a command line.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headrace.cli.flags import Given
from headrace.cli.options import BY_NAME, CONFIG, keys
from headrace.models.config.hugging_face import is_hub_folder
from headrace.programs.configuration.environment import CONFIG as CONFIG_VARIABLE
from headrace.programs.configuration.merging import Configuration, resolve
from headrace.programs.configuration.serving import problems_of

MODEL_PATH = "model-path"

Texts = Mapping[str, str | list[str] | None]


@dataclass(frozen=True, slots=True)
class Configured:
    """What a server is told."""

    given: Given
    """Every option, whoever set it."""
    configuration: Configuration
    """Every key, with who set it."""
    folders: tuple[str, ...]
    """Folders of models that stand on the command line without an option."""
    again: Callable[[], Configuration]
    """Reads all of it anew: the file may have changed."""


def configure(texts: Texts, folders: Sequence[str], environment: Mapping[str, str]) -> Configured:
    """Read all of it. `texts` are the options of the command line by their names."""
    if len(folders) == 1 and not texts.get(MODEL_PATH) and is_hub_folder(Path(folders[0])):
        # Not a folder of models, but one of them: as who comes from vLLM has it.
        texts, folders = {**texts, MODEL_PATH: folders[0]}, ()
    line = Given(BY_NAME, texts)
    flags = line.given()
    file = flags.get(CONFIG) or environment.get(CONFIG_VARIABLE, "")
    read = partial(resolve, keys(), flags, environment, file, problems_of)
    configuration = read()
    settled = configuration.flag_values()
    if folders:
        # Who names folders means these; those of a file are what is there otherwise.
        settled.pop("model-repository", None)
    return Configured(Given(BY_NAME, texts, settled), configuration, tuple(folders), read)
