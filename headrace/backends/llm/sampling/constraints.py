# SPDX-License-Identifier: Apache-2.0
"""Output that must be JSON, must follow a JSON schema or must match a regular expression, by `llguidance`.

The engine compiles an `OutputFormat` when a request comes in; the sampler masks what a constraint does not allow, and each
token that was kept is told to it. What goes wrong inside one is that request's error, and nobody else's.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from headrace.core.errors import FailedPrecondition, HeadraceError, Internal, InvalidArgument
from headrace.core.generation import OutputFormat

log = logging.getLogger("headrace.llm")

SCHEMA_CHARACTERS = 65_536
SCHEMA_DEPTH = 32
REGEX_CHARACTERS = 4_096
_KEPT_GRAMMARS = 64
_NOTHING_FOLLOWS = "NoExtensionBias"
"""The library's word for a schema that means itself and nothing else, which it only sees when it gets there."""
_LEXER_STATES = 50_000
"""At one or two kilobytes each."""

_JSON_OPTIONS = {
    # Without an end, a model that is in doubt writes spaces until its tokens are used up.
    "whitespace_pattern": r"[\x20\x0A]{0,32}",
    "coerce_one_of": True,
    "lenient": False,
}

_KNOWN_PROBLEMS = {
    "Unimplemented keys": "uses a keyword that is not supported (such as 'not', 'uniqueItems' or 'if'): leave it out",
    "Unsatisfiable": "allows nothing at all: no output could follow it",
    "look-around": "has a look-ahead or look-behind, which is not supported: write the expression without it",
    "regex parse error": "has a regular expression that cannot be read",
    "invalid regex": "has a regular expression that cannot be read",
    "Invalid type": "has a 'type' that JSON Schema does not know",
    "not present in a registry": "has a '$ref' to another document: write what it means into the schema itself",
    "Pointer": "has a '$ref' to a place that does not exist in it",
    "too complex": "is too complex: make it smaller",
    "too large": "is too complex: make it smaller",
    "too big": "is too complex: make it smaller",
    "fuel": "is too complex: make it smaller",
}
"""What the library's texts say, in ours: theirs are not for callers."""


class Spelling(Protocol):
    """What is needed of a tokenizer: `text.tokenizer.Tokenizer`."""

    hugging_face: Any
    eos_ids: frozenset[int]
    vocabulary: int


class Constraint:
    """What one choice may still become. `fresh` gives another choice its own."""

    __slots__ = ("_beginning", "_matcher", "error")

    def __init__(self, beginning: Any) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self.error: HeadraceError | None = None
        """Set when it cannot go on; the request has failed then."""

    def fresh(self) -> Constraint:
        """The same constraint at the beginning of a text."""
        return Constraint(self._beginning)

    @property
    def finished(self) -> bool:
        """Whether the text is whole: nothing may follow."""
        return bool(self._matcher.is_stopped())

    def allowed(self) -> npt.NDArray[np.uint32] | None:
        """A bit for each token, the first in the lowest place; None where nothing is to be masked."""
        if self.error is not None or self._matcher.is_stopped():
            return None
        bits: bytes = self._matcher.compute_bitmask()
        if self._failed():
            return None
        return np.frombuffer(bits, "<u4")

    def advance(self, token: int) -> None:
        """The next token is this. Never raises: see `error`."""
        if self.error is not None or self._matcher.is_stopped():
            return
        self._matcher.consume_token(token)
        self._failed()

    def _failed(self) -> bool:
        if not self._matcher.is_error():
            return False
        text = self._matcher.get_error()
        log.warning("a constraint on the output failed: %s", text[:500])
        if "TooComplex" in self._matcher.stop_reason():
            self.error = InvalidArgument("response_format: it became too complex for this text: make it simpler")
        elif _NOTHING_FOLLOWS in text:
            self.error = InvalidArgument("response_format allows nothing at some place: no output could follow it")
        else:
            self.error = Internal("the constraint on the output failed; the server's log has the details")
        return True


class Constraints:
    """Compiles formats for one tokenizer, and keeps the last ones. Safe to call from any thread; it may take long."""

    def __init__(self, tokenizer: Spelling, vocabulary: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._words: Any = None
        self._kept: OrderedDict[str, Any] = OrderedDict()

    def compile(self, format: OutputFormat) -> Constraint:
        """The constraint of a format."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise FailedPrecondition(
                "response_format needs the extra 'llm' with llguidance: pip install 'headrace[llm]'"
            ) from None
        grammar = _grammar(format, LLMatcher)
        with self._lock:
            beginning = self._kept.get(grammar)
            if beginning is not None:
                self._kept.move_to_end(grammar)
                return Constraint(beginning)
            words = self._words = self._words or self._read_words()
        beginning = _matcher(LLMatcher, words, grammar)
        with self._lock:
            self._kept[grammar] = beginning
            while len(self._kept) > _KEPT_GRAMMARS:
                self._kept.popitem(last=False)
        return Constraint(beginning)

    def _read_words(self) -> Any:
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer.hugging_face, "backend_tokenizer", None)
        if backend is None:
            raise FailedPrecondition("response_format needs a model with a tokenizer.json, which this one has not")
        from tokenizers import Tokenizer

        text = backend.to_str()
        plain = Tokenizer.from_str(text)
        plain.no_padding()
        plain.no_truncation()
        width = max(self._vocabulary or 0, self._tokenizer.vocabulary)
        try:
            return LLTokenizer(plain.to_str(), n_vocab=width, eos_token=sorted(self._tokenizer.eos_ids) or None)
        except Exception as error:
            log.warning("this tokenizer is of no use for constraints", exc_info=error)
            raise FailedPrecondition(
                "response_format cannot be followed by this model: its tokenizer is of a kind that is not supported"
            ) from None


def _grammar(format: OutputFormat, matcher: Any) -> str:
    if format.kind == "regex":
        if not format.regex or len(format.regex) > REGEX_CHARACTERS:
            raise InvalidArgument(
                f"response_format: the regular expression must have 1 to {REGEX_CHARACTERS} characters"
            )
        grammar: str = matcher.grammar_from_regex(format.regex)
        return grammar
    schema: Mapping[str, Any] = {"type": "object"}
    if format.kind == "json_schema":
        if format.schema is None:
            raise InvalidArgument("response_format: 'json_schema' needs a 'schema'")
        schema = {name: value for name, value in format.schema.items() if name != "x-guidance"}
    _check_depth(schema)
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError):
        raise InvalidArgument("response_format: the schema must be JSON") from None
    if len(text) > SCHEMA_CHARACTERS:
        raise InvalidArgument(
            f"response_format: the schema has {len(text)} characters; at most {SCHEMA_CHARACTERS} are allowed"
        )
    made: str = matcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    return made


def _check_depth(schema: object) -> None:
    level, depth = [schema], 0
    while level:
        if depth > SCHEMA_DEPTH:
            raise InvalidArgument(f"response_format: the schema is nested more than {SCHEMA_DEPTH} deep")
        inner = [list(value.values()) if isinstance(value, Mapping) else value for value in level]
        level = [item for value in inner if isinstance(value, list | tuple) for item in value]
        depth += 1


def _matcher(kind: Any, words: Any, grammar: str) -> Any:
    from llguidance import LLParserLimits

    limits = LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
    made = kind(words, grammar, log_level=0, limits=limits)
    if made.is_error():
        text = made.get_error()
        log.info("a response_format was refused: %s", text[:500])
        problem = next((ours for theirs, ours in _KNOWN_PROBLEMS.items() if theirs in text), "cannot be followed")
        raise InvalidArgument(f"response_format {problem}")
    return made
