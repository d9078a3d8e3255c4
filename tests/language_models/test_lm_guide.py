# SPDX-License-Identifier: Apache-2.0
"""The guide's table has every parameter of the backend, and no other. That its commands work is for `tests/docs`."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.backends.llm.settings import _OTHER_PARAMETERS, LlmSettings

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "language-models.md"


def test_every_parameter_is_in_the_guide() -> None:
    table = GUIDE.read_text().partition("<!-- llm-parameters:start -->")[2].partition("<!-- llm-parameters:end -->")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(named) == sorted({*LlmSettings.__dataclass_fields__, *_OTHER_PARAMETERS})
