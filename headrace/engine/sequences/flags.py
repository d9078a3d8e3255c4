# SPDX-License-Identifier: Apache-2.0
"""What a request says of its sequence: which one, and whether it is the first or the last of it.

Called by the scheduler for every request. The texts marked so are Triton's to the letter.
"""

from __future__ import annotations

from typing import NamedTuple

from headrace.core.errors import InvalidArgument
from headrace.core.messages import InferRequest

SequenceId = int | str

_MOST_ID_CHARACTERS = 128
_MOST_ID = (1 << 64) - 1


class Flags(NamedTuple):
    """The parameters `sequence_id`, `sequence_start` and `sequence_end`."""

    id: SequenceId
    start: bool
    end: bool


def read_flags(request: InferRequest, model_name: str) -> Flags:
    """Read them off a request; raises `InvalidArgument` where there is no sequence or no sense in it."""
    given = request.parameters.get("sequence_id", 0)
    if given in (0, "") and given is not False:
        raise InvalidArgument(  # Triton's
            f"inference request to model '{model_name}' must specify a non-zero or non-empty correlation ID"
        )
    if isinstance(given, str):
        if len(given) > _MOST_ID_CHARACTERS:
            raise InvalidArgument(
                f"sequence_id has {len(given)} characters; use {_MOST_ID_CHARACTERS} at most for model '{model_name}'"
            )
    # `True` is an int to Python and a mistake to everyone else.
    elif type(given) is not int or not 0 < given <= _MOST_ID:
        raise InvalidArgument(
            f"sequence_id {str(given)[:32]!a} for model '{model_name}' is no correlation ID: use text, or a whole number "
            f"from 1 to {_MOST_ID}"
        )
    return Flags(given, _flag(request, "sequence_start"), _flag(request, "sequence_end"))


def _flag(request: InferRequest, name: str) -> bool:
    value = request.parameters.get(name, False)
    if not isinstance(value, bool):
        raise InvalidArgument(f"parameter '{name}' is {str(value)[:32]!a}: use true or false")
    return value


def not_started(id: SequenceId, model_name: str) -> InvalidArgument:
    """For a request of a sequence that nobody knows. Triton's text."""
    return InvalidArgument(
        f"inference request for sequence {id} to model '{model_name}' must specify the START flag on the first request "
        "of the sequence"
    )


def many_rows(model_name: str) -> InvalidArgument:
    """For a request that is a batch already. Triton's text."""
    return InvalidArgument(
        f"inference request to model '{model_name}' must specify batch-size 1 due to requirements of sequence batcher"
    )
