# SPDX-License-Identifier: Apache-2.0
"""What an accelerator class changes in a pod: nodes, resources, arguments, variables.

Called by `components` for each pod of an engine or a decoder. The runtime says less than the class, the class less than
the service.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.fleet.merging.drafts import PodDraft
from headrace.fleet.words import Document, items, name_of, part, text, whole

PARALLELISM_SIZE = "PARALLELISM_SIZE"
GPU = "nvidia.com/gpu"
_TENSOR = ("--tp-size", "--tp", "--tensor-parallel-size")
_PIPELINE = ("--pp-size", "--pp", "--pipeline-parallel-size")
_DATA = ("--dp-size", "--dp", "--data-parallel-size")


def add_accelerator(draft: PodDraft, accelerator: Document, entry: Document | None, *, upstream: bool) -> None:
    """Lay a class over a pod. `entry` is the runtime's for the model, with its settings for classes."""
    spec = part(accelerator, "spec")
    _add_nodes(draft, spec)
    if draft.main is None:
        return
    if not part(draft.service_main, "resources"):
        _add_resources(draft, items(spec, "resources"))
    settings = part(entry, "acceleratorConfig", name_of(accelerator))
    _add_variables(draft, part(settings, "environmentOverride"), upstream)
    wanted = [each for each in items(settings, "runtimeArgsOverride") if isinstance(each, str)]
    if wanted:
        draft.main["args"] = merged_args(_texts(draft.main.get("args")), wanted)
        draft.accelerated.append(f"{draft.main_path}.args")
    sizes = part(settings, "tensorParallelismOverride")
    for field, flags in (
        ("tensorParallelSize", _TENSOR),
        ("pipelineParallelSize", _PIPELINE),
        ("dataParallelSize", _DATA),
    ):
        size = whole(sizes, field)
        # OME has no flag for the third.
        if size and not (upstream and flags is _DATA):
            _rewrite(draft, flags, size)


def add_parallelism(draft: PodDraft, accelerator: Document | None, workers: int, *, upstream: bool) -> None:
    """Tell the main container how many accelerators its group has. OME says nothing once a class is chosen."""
    if accelerator is not None and upstream:
        return
    names = {GPU}
    if accelerator is not None:
        names |= {text(each, "name") for each in items(accelerator, "spec", "resources")}
    count = draft.accelerators(names)
    settled = accelerator is not None and draft.variable(PARALLELISM_SIZE) is not None
    if count and not settled and (upstream or PARALLELISM_SIZE not in draft.service_variables()):
        draft.set_variable(PARALLELISM_SIZE, str(count * (1 + workers)), keep=False)


def _add_nodes(draft: PodDraft, spec: Document) -> None:
    own = part(draft.service, "nodeSelector")
    labels = {name: value for name, value in part(spec, "discovery", "nodeSelector").items() if name not in own}
    draft.select_nodes(labels)
    draft.accelerated.extend(f"nodeSelector.{name}" for name in labels)
    affinity = part(spec, "discovery", "affinity")
    if affinity and not draft.says("affinity"):
        draft.pod["affinity"] = affinity
        draft.accelerated.append("affinity")


def _add_resources(draft: PodDraft, resources: Iterable[Any]) -> None:
    counts = {
        text(each, "name"): each.get("quantity", "1")
        for each in resources
        if isinstance(each, dict) and text(each, "name")
    }
    if draft.main is None or not counts:
        return
    have = part(draft.main, "resources")
    draft.main["resources"] = {
        **have,
        "requests": {**part(have, "requests"), **counts},
        "limits": {**part(have, "limits"), **counts},
    }
    draft.accelerated.extend(
        f"{draft.main_path}.resources.{kind}.{name}" for kind in ("requests", "limits") for name in counts
    )


def _add_variables(draft: PodDraft, variables: Document, upstream: bool) -> None:
    kept = () if upstream else draft.service_variables()
    for name in sorted(variables):
        if name not in kept and isinstance(variables[name], str):
            draft.set_variable(name, variables[name], keep=False)
            draft.accelerated.append(f"{draft.main_path}.env[{name}]")


def _texts(value: Any) -> list[str]:
    return [each for each in value if isinstance(each, str)] if isinstance(value, list) else []


def merged_args(args: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Arguments with others laid over them by the names of their flags."""
    if _is_script(args):
        script = args[0]
        for flag, words in _grouped(wanted):
            said = " ".join(words)
            found = _flag_pattern(flag).search(script) if flag else None
            before, after = (script[: found.start()], script[found.end() :]) if found else (f"{script.rstrip()} ", "")
            script = f"{before}{said}{after}"
        return [script]
    groups = _grouped(args)
    for flag, words in _grouped(wanted):
        places = [number for number, (name, _) in enumerate(groups) if flag and name == flag]
        if places:
            groups[places[0]] = (flag, words)
        else:
            groups.append((flag, words))
    return [word for _, words in groups for word in words]


def _grouped(args: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Flags with their values: `--a 1`, `--a=1` and `--a` are one group each; other words stand alone, without a flag."""
    groups: list[tuple[str, list[str]]] = []
    for word in args:
        if word.startswith("--"):
            groups.append((word.partition("=")[0], [word]))
        elif groups and groups[-1][0] and "=" not in groups[-1][1][0] and not word.startswith("-"):
            groups[-1][1].append(word)
        else:
            groups.append(("", [word]))
    return groups


def _is_script(args: Sequence[str]) -> bool:
    """Whether the arguments are one text for a shell."""
    return len(args) == 1 and bool(re.search(r"\s--?\w", args[0]))


def _flag_pattern(flag: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\S){re.escape(flag)}(?:(?:=|\s+)(?!-)[^\s\\]+|(?=\s|$))")


def _rewrite(draft: PodDraft, flags: Sequence[str], size: int) -> None:
    """Put a number behind the first of some flags that is there, in the arguments, else in the command."""
    if draft.main is None:
        return
    for field in ("args", "command"):
        words = _texts(draft.main.get(field))
        for flag in flags:
            made = _with_value(words, flag, str(size))
            if made is not None:
                draft.main[field] = made
                draft.accelerated.append(f"{draft.main_path}.{field}")
                return


def _with_value(words: list[str], flag: str, value: str) -> list[str] | None:
    for number, word in enumerate(words):
        if word == flag and number + 1 < len(words):
            return [*words[: number + 1], value, *words[number + 2 :]]
        if word.startswith(f"{flag}="):
            return [*words[:number], f"{flag}={value}", *words[number + 1 :]]
        found = re.search(rf"(?<!\S){re.escape(flag)}(=|\s+)[^\s\\]+", word) if len(word.split()) > 1 else None
        if found:
            inside = f"{word[: found.start()]}{flag}{found[1]}{value}{word[found.end() :]}"
            return [*words[:number], inside, *words[number + 1 :]]
    return None
