# SPDX-License-Identifier: Apache-2.0
"""Structured output: constrain the text to JSON, a JSON schema or a regular expression, with llguidance.

`instance` compiles an `OutputFormat` when a request arrives; the logits processors mask the tokens that a constraint does
not allow, and each generated token advances it. An error inside a constraint fails its request only.
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
from headrace.core.extras import MissingExtra
from headrace.core.generation import OutputFormat

log = logging.getLogger("headrace.llm")

SCHEMA_CHARACTERS = 65_536
SCHEMA_DEPTH = 32
REGEX_CHARACTERS = 4_096
_CACHED_GRAMMARS = 64
_NO_EXTENSION = "NoExtensionBias"
"""llguidance's error for a schema that refers to itself alone; it detects that only while matching."""
_LEXER_STATES = 50_000
"""Limit on the memory of one lexer: a state takes one or two kilobytes."""

_JSON_OPTIONS = {
    # Bounded: otherwise an undecided model writes spaces until it runs out of tokens.
    "whitespace_pattern": r"[\x20\x0A]{0,32}",
    "coerce_one_of": True,
    "lenient": False,
}

_KNOWN_PROBLEMS = {
    "Unimplemented keys": "uses a keyword that is not supported (such as 'not', 'uniqueItems' or 'if'): leave it out",
    "Unsatisfiable": "allows nothing at all: no output could follow it",
    "look-around": "has a look-ahead or look-behind, which is not supported: write the expression without it",
    "regex parse error": "has an invalid regular expression",
    "invalid regex": "has an invalid regular expression",
    "Invalid type": "has a 'type' that JSON Schema does not know",
    "not present in a registry": "has a '$ref' to another document: write what it means into the schema itself",
    "Pointer": "has a '$ref' to a place that does not exist in it",
    "too complex": "is too complex: make it smaller",
    "too large": "is too complex: make it smaller",
    "too big": "is too complex: make it smaller",
    "fuel": "is too complex: make it smaller",
}
"""Fragments of llguidance's messages and the text that clients get instead."""


class TokenizerLike(Protocol):
    """The part of the tokenizer that constraints need."""

    hugging_face: Any
    eos_ids: frozenset[int]
    vocabulary: int


class Constraint:
    """The matcher of one choice: which tokens may follow the text so far."""

    __slots__ = ("_beginning", "_matcher", "error")

    def __init__(self, beginning: Any) -> None:
        self._beginning = beginning
        self._matcher = beginning.deep_copy()
        self.error: HeadraceError | None = None
        """Set when the matcher failed; the request fails then."""

    def fresh(self) -> Constraint:
        """Return the same constraint at the beginning of a text, for another choice."""
        return Constraint(self._beginning)

    @property
    def finished(self) -> bool:
        """Whether the text is complete and no token may follow."""
        return bool(self._matcher.is_stopped())

    def token_bitmask(self) -> npt.NDArray[np.uint32] | None:
        """Return one bit per allowed token, token 0 in the lowest bit; None if nothing is to be masked."""
        if self.error is not None or self._matcher.is_stopped():
            return None
        bits: bytes = self._matcher.compute_bitmask()
        if self._failed():
            return None
        return np.frombuffer(bits, "<u4")

    def advance(self, token: int) -> None:
        """Consume the next token. Never raises: see `error`."""
        if self.error is not None or self._matcher.is_stopped():
            return
        self._matcher.consume_token(token)
        self._failed()

    def _failed(self) -> bool:
        if not self._matcher.is_error():
            return False
        text = self._matcher.get_error()
        log.warning("A structured-output constraint failed: %s", text[:500])
        if "TooComplex" in self._matcher.stop_reason():
            self.error = InvalidArgument("response_format: it became too complex for this text: make it simpler")
        elif _NO_EXTENSION in text:
            self.error = InvalidArgument("response_format allows nothing at some place: no output could follow it")
        else:
            self.error = Internal("the output constraint failed; the server's log has the details")
        return True


class ConstraintCompiler:
    """Compiles output formats for one tokenizer, and caches the last ones. Thread-safe; compiling may take long."""

    def __init__(self, tokenizer: TokenizerLike, vocabulary: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._llguidance_tokenizer: Any = None
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def compile(self, format: OutputFormat) -> Constraint:
        """Return the constraint of an output format."""
        try:
            from llguidance import LLMatcher
        except ImportError:
            raise MissingExtra("response_format", "llm") from None
        grammar = _grammar(format, LLMatcher)
        with self._lock:
            beginning = self._compiled.get(grammar)
            if beginning is not None:
                self._compiled.move_to_end(grammar)
                return Constraint(beginning)
            tokenizer = self._llguidance_tokenizer = self._llguidance_tokenizer or self._make_tokenizer()
        beginning = _compile_grammar(LLMatcher, tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = beginning
            while len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return Constraint(beginning)

    def _make_tokenizer(self) -> Any:
        from llguidance import LLTokenizer

        backend = getattr(self._tokenizer.hugging_face, "backend_tokenizer", None)
        if backend is None:
            raise FailedPrecondition("response_format needs a model with a tokenizer.json, and this model has none")
        from tokenizers import Tokenizer

        text = backend.to_str()
        plain = Tokenizer.from_str(text)
        plain.no_padding()
        plain.no_truncation()
        width = max(self._vocabulary or 0, self._tokenizer.vocabulary)
        try:
            return LLTokenizer(plain.to_str(), n_vocab=width, eos_token=sorted(self._tokenizer.eos_ids) or None)
        except Exception as error:
            log.warning("llguidance does not support this tokenizer.", exc_info=error)
            raise FailedPrecondition(
                "response_format is not supported for this model: llguidance does not support its tokenizer"
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
    json_grammar: str = matcher.grammar_from_json_schema(text, overrides=_JSON_OPTIONS)
    return json_grammar


def _check_depth(schema: object) -> None:
    level, depth = [schema], 0
    while level:
        if depth > SCHEMA_DEPTH:
            raise InvalidArgument(f"response_format: the schema is nested more than {SCHEMA_DEPTH} deep")
        inner = [list(value.values()) if isinstance(value, Mapping) else value for value in level]
        level = [item for value in inner if isinstance(value, list | tuple) for item in value]
        depth += 1


def _compile_grammar(matcher_class: Any, tokenizer: Any, grammar: str) -> Any:
    from llguidance import LLParserLimits

    limits = LLParserLimits(max_lexer_states=_LEXER_STATES, verbose_errors=False)
    matcher = matcher_class(tokenizer, grammar, log_level=0, limits=limits)
    if matcher.is_error():
        text = matcher.get_error()
        log.info("Refused a response_format: %s", text[:500])
        problem = next((ours for theirs, ours in _KNOWN_PROBLEMS.items() if theirs in text), "cannot be followed")
        raise InvalidArgument(f"response_format {problem}")
    return matcher
