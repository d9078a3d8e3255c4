# SPDX-License-Identifier: Apache-2.0
"""`ModelConfig`, which `auto_complete_config` edits, and the functions that read a configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


class ModelConfig:
    """The configuration to complete."""

    def __init__(self, model_config: str) -> None:
        self._config: dict[str, Any] = json.loads(model_config)

    def as_dict(self) -> dict[str, Any]:
        """Return the whole configuration, read-only."""
        return self._config

    def set_max_batch_size(self, max_batch_size: int) -> None:
        """Set the largest batch size; it must not be smaller than the configured one."""
        given = self._config.get("max_batch_size", 0)
        if given > max_batch_size:
            raise ValueError(
                f"configuration specified max_batch_size {given}, but in auto-complete-config function for model "
                f"'{self._name}' specified max_batch_size {max_batch_size}"
            )
        self._config["max_batch_size"] = max_batch_size

    def set_dynamic_batching(self) -> None:
        """Enable dynamic batching, unless the configuration already does."""
        for other in ("sequence_batching", "ensemble_scheduling"):
            if other in self._config:
                raise ValueError(
                    f"Configuration specified scheduling_choice as '{other}', but auto-complete-config function for "
                    f"model '{self._name}' tries to set scheduling_choice as 'dynamic_batching'"
                )
        self._config.setdefault("dynamic_batching", {})

    def add_input(self, input: Mapping[str, Any]) -> None:
        """Add an input: name, data_type, dims, and optionally `optional`."""
        self._add("input", dict(input), {"name", "data_type", "dims", "optional"})

    def add_output(self, output: Mapping[str, Any]) -> None:
        """Add an output: name, data_type, dims."""
        self._add("output", dict(output), {"name", "data_type", "dims"})

    def set_model_transaction_policy(self, transaction_policy_dict: Mapping[str, Any]) -> None:
        """Set whether the model is decoupled."""
        for key in transaction_policy_dict:
            if key != "decoupled":
                raise ValueError(
                    f"model transaction property in auto-complete-config function for model '{self._name}' contains "
                    "property other than 'decoupled'."
                )
        given = self._config.setdefault("model_transaction_policy", {})
        wanted = transaction_policy_dict.get("decoupled", False)
        if given.get("decoupled", wanted) != wanted:
            raise ValueError(
                f"trying to change decoupled property in auto-complete-config for model '{self._name}', which is "
                f"already set to '{given['decoupled']}'."
            )
        given["decoupled"] = wanted

    @property
    def _name(self) -> str:
        return str(self._config.get("name", ""))

    def _add(self, where: str, tensor: dict[str, Any], allowed: set[str]) -> None:
        place = f"in auto-complete-config function for model '{self._name}'"
        shown = f"{where} '{tensor['name']}'" if "name" in tensor else where
        if not tensor.keys() <= allowed:
            raise ValueError(f"{shown} {place} contains property other than {', '.join(sorted(allowed))}.")
        for needed in ("name", "data_type", "dims"):
            if needed not in tensor:
                raise ValueError(f"{shown} {place} is missing '{needed}' property.")
        for given in self._config.setdefault(where, []):
            if given["name"] == tensor["name"]:
                self._agree(where, given, tensor)
                given.update(tensor)
                return
        self._config[where].append(tensor)

    def _agree(self, where: str, given: dict[str, Any], tensor: dict[str, Any]) -> None:
        data_type = given.get("data_type", "TYPE_INVALID")
        if data_type not in ("TYPE_INVALID", tensor["data_type"]):
            raise ValueError(
                f"unable to load model '{self._name}', configuration expects datatype {data_type} for {where} "
                f"'{tensor['name']}', model provides {tensor['data_type']}"
            )
        dims = given.get("dims")
        if dims and list(dims) != list(tensor["dims"]):
            raise ValueError(
                f"model '{self._name}', tensor '{tensor['name']}': the model expects dims {list(tensor['dims'])} but "
                f"the model configuration specifies dims {dims}"
            )


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the properties of an input, or None."""
    return _named(model_config.get("input", ()), name)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the properties of an output, or None."""
    return _named(model_config.get("output", ()), name)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether the model is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def _named(tensors: Any, name: str) -> Any:
    return next((tensor for tensor in tensors if tensor["name"] == name), None)
