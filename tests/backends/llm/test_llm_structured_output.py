# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import builtins
import json
import re
from typing import Any

import pytest
import torch
from llm_tokenizers import tokenizer

from headrace.backends.llm.sampling import structured_output as room
from headrace.backends.llm.sampling.sampler import Sampler
from headrace.backends.llm.sampling.state import SamplingState
from headrace.backends.llm.sampling.structured_output import Constraint, ConstraintCompiler
from headrace.core.errors import FailedPrecondition, InvalidArgument
from headrace.core.generation import OutputFormat, Sampling

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["bytes", "llama"])
def constraints(request: pytest.FixtureRequest) -> ConstraintCompiler:
    return ConstraintCompiler(tokenizer(request.param))


def _said(constraints: ConstraintCompiler, constraint: Constraint, seed: int, padding: int = 9, **fields: Any) -> str:
    """What a model that knows nothing says under a constraint."""
    words: Any = constraints._tokenizer
    width = words.vocabulary + padding
    sampler, row = Sampler(width, "cpu"), SamplingState(Sampling(seed=seed, **fields), [], constraint, words.eos_ids)
    logits = torch.randn(1, width, generator=torch.Generator().manual_seed(seed)) * 0.1
    tokens: list[int] = []
    for _ in range(300):
        token = sampler.sample(logits, [row]).tokens[0]
        row.advance(token)
        assert row.error is None
        if row.is_stop_token(token):
            break
        tokens.append(token)
        if row.finished:
            break
    else:
        raise AssertionError("it did not come to an end")
    return str(words.decode(tokens))


@pytest.mark.parametrize("seed", range(4))
def test_output_always_follows_the_schema(constraints: ConstraintCompiler, seed: int) -> None:
    said = json.loads(_said(constraints, constraints.compile(OutputFormat("json_schema", PERSON)), seed))
    assert set(said) == {"name", "age", "kind"}
    assert len(said["name"]) <= 5 and 0 <= said["age"] <= 150 and said["kind"] in {"cat", "dog"}


def test_greedy_rows_are_constrained_too(constraints: ConstraintCompiler) -> None:
    schema = {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}
    said = _said(constraints, constraints.compile(OutputFormat("json_schema", schema)), 1, temperature=0.0)
    assert all(type(item) is bool for item in json.loads(said))


def test_an_expression_is_matched_from_end_to_end(constraints: ConstraintCompiler) -> None:
    for seed in range(3):
        said = _said(constraints, constraints.compile(OutputFormat("regex", regex=r"[a-c]{2}-\d{3}(x|yy)")), seed)
        assert re.fullmatch(r"[a-c]{2}-\d{3}(x|yy)", said)


def test_a_json_object_is_an_object(constraints: ConstraintCompiler) -> None:
    constraint = constraints.compile(OutputFormat("json_object"))
    # Pushed towards its end, or a model that knows nothing would open objects and texts for ever.
    words: Any = constraints._tokenizer
    quote, close = words.hugging_face.convert_tokens_to_ids(['"', "}"])
    said = _said(constraints, constraint, 3, logit_bias={quote: 24.0, close: 20.0})
    assert isinstance(json.loads(said), dict)


def test_each_choice_has_its_own(constraints: ConstraintCompiler) -> None:
    first = constraints.compile(OutputFormat("regex", regex="ab"))
    second = first.fresh()
    words: Any = constraints._tokenizer
    a = words.hugging_face.convert_tokens_to_ids("a")
    first.advance(a)
    before, after = second.token_bitmask(), first.token_bitmask()
    assert before is not None and after is not None and before[a // 32] >> (a % 32) & 1
    assert not after[a // 32] >> (a % 32) & 1
    assert constraints.compile(OutputFormat("regex", regex="ab")).token_bitmask().tolist() == before.tolist()  # type: ignore[union-attr]


def test_rows_without_a_constraint_are_unchanged(constraints: ConstraintCompiler) -> None:
    words: Any = constraints._tokenizer
    logits = torch.zeros(3, words.vocabulary)
    logits[:, 5] = 3.0
    zero = words.hugging_face.convert_tokens_to_ids("0")
    constraint = constraints.compile(OutputFormat("regex", regex="0"))
    rows = [
        SamplingState(Sampling(temperature=0.0), []),
        SamplingState(Sampling(temperature=0.0), [], constraint),
        SamplingState(Sampling(temperature=0), []),
    ]
    assert not Sampler.all_argmax_only(rows)
    assert Sampler(words.vocabulary, "cpu").sample(logits, rows).tokens == [5, zero, 5]


def test_a_token_that_is_not_allowed_fails_this_row_only(constraints: ConstraintCompiler) -> None:
    words: Any = constraints._tokenizer
    wrong = words.hugging_face.convert_tokens_to_ids("{")
    row = SamplingState(Sampling(), [], constraints.compile(OutputFormat("regex", regex="0+")))
    other = SamplingState(Sampling(temperature=0.0), [], constraints.compile(OutputFormat("regex", regex="0+")))
    row.advance(wrong)
    assert row.error is not None and "log has the details" in row.error.message
    logits = torch.zeros(2, words.vocabulary)
    tokens = Sampler(words.vocabulary, "cpu").sample(logits, [row, other]).tokens
    assert tokens[1] == words.hugging_face.convert_tokens_to_ids("0")
    row.advance(tokens[0])
    assert other.error is None


def test_min_tokens_do_not_forbid_the_end_of_what_is_whole(constraints: ConstraintCompiler) -> None:
    said = _said(constraints, constraints.compile(OutputFormat("regex", regex="0")), 0, min_tokens=5)
    assert said == "0"


@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "nope"}, "'type'"),
        ({"not": {"type": "string"}}, "not supported"),
        ({"$ref": "http://127.0.0.1/x"}, "another document"),
        ({"$ref": "#/$defs/missing"}, "response_format"),
        ({"type": "string", "pattern": "(?=a)b"}, "look-ahead"),
        ({"type": "string", "pattern": "("}, "regular expression"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "allows nothing"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "not supported"),
        ({"description": "x" * 70_000}, "at most 65536"),
        ({"default": object()}, "must be JSON"),
    ],
)
def test_a_schema_that_cannot_be_followed_is_refused(constraints: ConstraintCompiler, schema: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match="response_format") as error:
        constraints.compile(OutputFormat("json_schema", schema))
    assert text in error.value.message


def test_a_self_referencing_schema_is_the_callers_error(constraints: ConstraintCompiler) -> None:
    constraint = constraints.compile(OutputFormat("json_schema", {"$ref": "#"}))
    assert constraint.token_bitmask() is None
    assert isinstance(constraint.error, InvalidArgument)


def test_a_deep_schema_is_refused(constraints: ConstraintCompiler) -> None:
    schema: Any = {"type": "null"}
    for _ in range(2000):
        schema = {"items": schema}
    with pytest.raises(InvalidArgument, match="nested more than 32"):
        constraints.compile(OutputFormat("json_schema", schema))


@pytest.mark.parametrize("regex", ["", "(", "a(?!b)", "x" * 5000])
def test_an_expression_that_cannot_be_read_is_refused(constraints: ConstraintCompiler, regex: str) -> None:
    with pytest.raises(InvalidArgument, match="response_format"):
        constraints.compile(OutputFormat("regex", regex=regex))


def test_only_the_last_grammars_are_kept(constraints: ConstraintCompiler) -> None:
    for number in range(room._CACHED_GRAMMARS + 5):
        constraints.compile(OutputFormat("regex", regex=f"a{{{number + 1}}}"))
    assert len(constraints._compiled) == room._CACHED_GRAMMARS


def test_without_llguidance_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "llguidance":
            raise ImportError(name)
        return real(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(FailedPrecondition, match=r"headrace\[llm\]"):
        ConstraintCompiler(tokenizer("bytes")).compile(OutputFormat("json_object"))
