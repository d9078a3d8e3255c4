# SPDX-License-Identifier: Apache-2.0
"""What a key of the configuration is: a row of `table`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["text", "whole", "number", "truth", "rows", "tree"]
"""rows: a list of mappings with `fields`. tree: anything, which its own reader looks at."""

PREFIX = "INFERENCE_"


@dataclass(frozen=True, slots=True)
class Key:
    """One value that can be set."""

    path: str
    """Where it is in the file: `safeguards.rate_limit.enabled`."""
    help: str
    kind: Kind = "text"
    default: Any = None
    """None where leaving it out is not the same as giving any value."""
    flag: str = ""
    """The option of `headrace serve` for it, without dashes; "" for none."""
    scale: int = 1
    """What to multiply a value with for the flag, which may count bytes where the file has megabytes."""
    names: tuple[str, ...] = ()
    """Short names of environment variables, without the prefix."""
    metavar: str = ""
    many: bool = False
    """Whether it is a list."""
    least: float = -math.inf
    most: float = math.inf
    choices: tuple[str, ...] = ()
    pattern: str = ""
    """What a text must look like; `metavar` says it to people."""
    fields: tuple[Key, ...] = ()
    """Of each of the rows."""
    secret: bool = False
    """Whether there may be a password in it."""

    @property
    def variable(self) -> str:
        """The environment variable."""
        return PREFIX + self.path.upper().replace(".", "_").replace("-", "_")

    @property
    def variables(self) -> tuple[str, ...]:
        """All its names in the environment, the short ones first."""
        return (*(PREFIX + name for name in self.names), self.variable)

    @property
    def takes(self) -> str:
        """What a value has to be, for people."""
        if self.choices:
            return " or ".join(self.choices)
        if self.pattern:
            return self.metavar
        if self.kind == "truth":
            return "true or false"
        if self.kind in ("rows", "tree"):
            return "a list of mappings" if self.kind == "rows" else "a mapping"
        if self.kind == "text":
            return "a list of texts" if self.many else "a text"
        noun = "a whole number" if self.kind == "whole" else "a number"
        if math.isfinite(self.most):
            return f"{noun} from {self.least:.15g} to {self.most:.15g}"
        return f"{noun} of {self.least:.15g} or more" if math.isfinite(self.least) else noun
