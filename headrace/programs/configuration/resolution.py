# SPDX-License-Identifier: Apache-2.0
"""Merge command line, environment, file and defaults into one value per option, with the origin of each value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from headrace.core.errors import InvalidArgument
from headrace.engine.traffic.settings import SplitSettings, check_split, parse_split
from headrace.models.config.problems import Problem
from headrace.models.staging import is_single_model
from headrace.models.storage.locations import HUB_SCHEMES, is_hub_name, scheme_of
from headrace.programs.configuration.option import Option
from headrace.programs.configuration.option_table import CONFIG, KEYS
from headrace.programs.configuration.sources import (
    CONFIG_VARIABLE,
    ENVIRONMENT,
    FileValues,
    Texts,
    read_command_line,
    read_environment,
    read_file,
)

MAX_PROBLEMS = 50
"""Maximum number of problems in an error."""

_MODEL_PATH, _REPOSITORY = "model-path", "model-repository"


class SettingsError(InvalidArgument):
    """Raised when a configuration has mistakes; one line for each."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems[:MAX_PROBLEMS])
        count = len(problems)
        head = "" if count == 1 else f"the configuration has {count} mistakes:\n"
        super().__init__(head + "\n".join(str(problem) for problem in self.problems))


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a value came from."""

    kind: Literal["flag", "env", "file", "default"]
    name: str = ""
    """The option, the variable or the file."""
    line: int = 0

    def __str__(self) -> str:
        if self.kind == "file":
            return f"{self.name}:{self.line}"
        return f"{self.kind} {self.name}".rstrip()


DEFAULT = Origin("default")


@dataclass(frozen=True, slots=True)
class Setting:
    """An option with its value."""

    option: Option
    value: Any
    """In the unit of the file."""
    origin: Origin


class OptionValues:
    """One value for every option, by its key or its name on the command line (then in the command line's unit)."""

    def __init__(
        self,
        settings: Mapping[str, Setting],
        warnings: Sequence[str],
        file: str,
        reload: Callable[[], OptionValues],
        more_models: Sequence[str] = (),
    ) -> None:
        self.settings = settings
        """By key."""
        self.warnings = tuple(warnings)
        self.file = file
        self.reload = reload
        """Read all sources again: the file may have changed."""
        self.more_models = tuple(more_models)
        """Models of the command line beside the one of `model.path`: paths, or names on the Hugging Face Hub."""
        self._by_flag = {setting.option.flag: setting for setting in settings.values() if setting.option.flag}

    def has(self, name: str) -> bool:
        """Return whether the option was set."""
        return (self._by_flag.get(name) or self.settings[name]).origin != DEFAULT

    def get(self, name: str) -> Any:
        """Return the value; None if there is none."""
        setting = self._by_flag.get(name)
        if setting is None:
            return self.settings[name].value
        scale = setting.option.scale
        return setting.value if scale == 1 else round(setting.value * scale)

    def error(self, key: str, text: str) -> InvalidArgument:
        """Return an error about a value, which names its origin."""
        origin = self.settings[key].origin
        location = origin.name if origin.kind in ("flag", "env") else f"{origin}: {key}"
        return InvalidArgument(f"{location}: {text}")

    # In this order, with `str` last: each method hides the type of its name from the annotations below it.

    def strings(self, name: str) -> tuple[str, ...]:
        """Return a list; empty if there is none."""
        return tuple(self.get(name) or ())

    def bool(self, name: str) -> bool:
        """Return a boolean; False if there is none."""
        return bool(self.get(name))

    def float(self, name: str) -> float:
        """Return a number; 0 if there is none."""
        return float(self.get(name) or 0)

    def int(self, name: str) -> int:
        """Return an integer; 0 if there is none."""
        return int(self.get(name) or 0)

    def str(self, name: str) -> str:
        """Return a string; "" if there is none."""
        return str(self.get(name) or "")


def configure(texts: Texts, folders: Sequence[str], environment: Mapping[str, str]) -> OptionValues:
    """Merge all sources. `folders` are the MODELS of the command line.

    Raise InvalidArgument for the first mistake of the command line, then SettingsError with all other mistakes.
    """
    reload = partial(configure, texts, folders, environment)
    models = [text for text in folders if _is_model(text)]
    repositories = [text for text in folders if text not in models]
    if models and not texts.get(_MODEL_PATH):
        texts = {**texts, _MODEL_PATH: models.pop(0)}
    if repositories:
        texts = {**texts, _REPOSITORY: [*repositories, *(texts.get(_REPOSITORY) or ())]}
    arguments = read_command_line(texts)
    file = arguments.get(CONFIG) or environment.get(CONFIG_VARIABLE, "")
    from_file = read_file(file) if file else FileValues("")
    from_environment = read_environment(environment)
    settings: dict[str, Setting] = {}
    for key, option in KEYS.items():
        setting = Setting(option, option.default, DEFAULT)
        if option.flag in arguments:
            setting = Setting(option, arguments[option.flag], Origin("flag", f"--{option.flag}"))
        elif key in from_environment.values:
            value, variable = from_environment.values[key]
            setting = Setting(option, value, Origin("env", variable))
        elif key in from_file.values:
            value, line = from_file.values[key]
            setting = Setting(option, value, Origin("file", file, line))
        settings[key] = setting
    values = OptionValues(settings, from_environment.warnings, file, reload, models)
    problems = [*from_file.problems, *from_environment.problems, *_find_conflicts(values)]
    if problems:
        raise SettingsError(problems)
    return values


def _is_model(text: str) -> bool:
    """Return whether an argument is one model, as vLLM takes it, rather than a model repository."""
    path = Path(text).expanduser()
    # Below a folder that exists, a name that does not is a mistake rather than a model of the Hub.
    return is_single_model(path) or scheme_of(text) in HUB_SCHEMES or (is_hub_name(text) and not path.parent.exists())


def _find_conflicts(values: OptionValues) -> list[Problem]:
    """Return the mistakes that concern several options, or what an option names."""
    problems: list[Problem] = []

    def add(key: str, text: str) -> None:
        origin = values.settings[key].origin
        location = {"file": origin.name, "env": ENVIRONMENT, "flag": "command line"}.get(origin.kind, "configuration")
        field = key if origin.kind in ("file", "default") else origin.name
        problems.append(Problem(location, origin.line or None, field, text))

    checks, rate = "safeguards.input_validation", "safeguards.rate_limit"
    minimum, maximum = values.get(f"{checks}.min"), values.get(f"{checks}.max")
    if minimum is not None and maximum is not None and minimum > maximum:
        add(f"{checks}.max", f"is {maximum:g}, and min is {minimum:g}: no number would be taken")
    keys_file = values.str("safeguards.api_keys_file")
    if keys_file and not Path(keys_file).is_file():
        add("safeguards.api_keys_file", f"there is no file {keys_file[:200]!a}: name one, or make it")
    url = values.str(f"{rate}.redis_url")
    if url and not url.startswith(("redis://", "rediss://", "unix://")):
        add(f"{rate}.redis_url", "takes a URL such as redis://localhost:6379/0")
    if values.bool(f"{rate}.enabled") and values.get(f"{rate}.requests_per_minute") == 0:
        add(f"{rate}.requests_per_minute", "is 0, which is not a limit: write a number, or enabled: false")
    for model, split in (values.get("traffic") or {}).items():
        try:
            traffic_split(model, split)
        except InvalidArgument as error:
            add("traffic", error.message)
    return problems


def traffic_split(model: str, tree: object) -> SplitSettings:
    """Parse and check the traffic split of a model. Raise InvalidArgument."""
    split = parse_split(tree, f"traffic.{model}")
    check_split(model, split)
    return split


_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s]*@")
_VALUE = re.compile(r"=.*", re.DOTALL)
_IN_QUERY = re.compile(r"(?i)(?<=[?&])([^=&\s]*(?:password|secret|token|key)[^=&\s]*)=[^&\s]*")


def shown_value(setting: Setting) -> Any:
    """Return the value as plain data, without passwords."""
    return _mask(setting.option, setting.value)


def value_text(value: Any) -> str:
    """Return a value as text for a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def as_json(values: OptionValues) -> dict[str, dict[str, Any]]:
    """Return every key with its value and origin."""
    return {
        key: {
            "value": shown_value(setting),
            "origin": str(setting.origin),
            "kind": setting.origin.kind,
            "variable": setting.option.variable,
        }
        for key, setting in values.settings.items()
    }


def _mask(option: Option, value: Any) -> Any:
    if isinstance(value, str):
        if option.secret and "://" not in value:
            return _VALUE.sub("=***", value)
        return _IN_QUERY.sub(r"\1=***", _CREDENTIALS.sub(_mask_credentials, value))
    if isinstance(value, list | tuple):
        return [_mask(option, item) for item in value]
    if isinstance(value, dict):
        return {name: _mask(option, item) for name, item in value.items()}
    return value


def _mask_credentials(match: re.Match[str]) -> str:
    user, colon, _ = match.group().partition(":")
    return f"{user}:***@" if colon else "***@"
