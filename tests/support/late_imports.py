# SPDX-License-Identifier: Apache-2.0
"""Modules that are imported when a test first uses them.

xgb = late("xgboost")
booster = late("cases.xgboost", "booster")
v1 = late("tensorflow", "compat.v1")

Every worker process of pytest imports every test file, and TensorFlow alone takes five seconds. With these, and with
`pytest.mark.worker`, a framework is imported by one worker only. What they stand for must not be used while the file is
imported: not in arguments of `parametrize`, not as a base class.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from operator import attrgetter
from typing import Any


def late(module: str, path: str = "") -> Any:
    """Something that behaves as the module, or as what it has under a path of names."""
    return _Late(module, path)


class _Late:
    def __init__(self, module: str, path: str) -> None:
        self._module = module
        self._path = path

    def _found(self) -> Any:
        # Frameworks warn of each other, of Python and of themselves when they are imported; that is not ours to mend.
        with warnings.catch_warnings(action="ignore"):
            module = import_module(self._module)
        return attrgetter(self._path)(module) if self._path else module

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for marks and fixtures in everything that a file has
            raise AttributeError(name)
        return getattr(self._found(), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._found()(*args, **kwargs)
