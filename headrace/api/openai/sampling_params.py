# SPDX-License-Identifier: Apache-2.0
"""Sampling parameters of a chat or completions request."""

from __future__ import annotations

from typing import Any

from headrace.api.openai.errors import BadRequest
from headrace.api.openai.fields import Fields
from headrace.api.openai.settings import OpenAiSettings
from headrace.core.generation import Sampling

MOST_TOKENS = 10_000_000
"""Longer than any context."""
_STOPS, _STOP_CHARACTERS = 16, 1000
_STOP_TOKENS = 128
_BIASES = 1024
_TOKEN_IDS = 1 << 24
_ALTERNATIVES = 20

_BAD_WORDS, _BAD_WORD_CHARACTERS = 128, 256
_ALLOWED_TOKENS = 65_536
_PRIORITIES = 1 << 31

UNSUPPORTED = {
    "best_of": "is for /v1/completions: use 'n'",
    "use_beam_search": "beam search is not supported",
    "logits_processors": "the server does not run code from clients",
    "guided_grammar": "grammars are not supported: use 'response_format' with a JSON schema, or 'guided_regex'",
    "mm_processor_kwargs": "the model's own settings for images and videos are used",
}
"""Members of other servers that would change the response and that this server does not support."""


def parse_sampling(fields: Fields, settings: OpenAiSettings, *, chat: bool, least_tokens: int = 1) -> Sampling:
    """Parse the sampling parameters; chat differs in `logprobs` and the newer name of `max_tokens`.

    `least_tokens`: the lowest `max_tokens`.
    """
    members = fields.members
    # A chat's `best_of` equal to `n` changes nothing; `completions` reads its own.
    allows_best_of = not chat or members.get("best_of") == members.get("n", 1)
    fields.reject({name: why for name, why in UNSUPPORTED.items() if name != "best_of" or not allows_best_of})
    prompt_logprobs = fields.integer("prompt_logprobs", 0, _ALTERNATIVES)
    if prompt_logprobs is not None and fields.boolean("stream"):
        raise fields.error("prompt_logprobs", "cannot be combined with 'stream': true")
    length = "max_tokens"
    if chat and fields.get("max_completion_tokens") is not None:
        length = "max_completion_tokens"
    return Sampling(
        max_tokens=fields.integer(length, least_tokens, MOST_TOKENS),
        min_tokens=fields.integer("min_tokens", 0, MOST_TOKENS) or 0,
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_p=fields.number("top_p", 0, 1, 1.0, above=True),
        top_k=_top_k(fields),
        min_p=fields.number("min_p", 0, 1, 0.0),
        repetition_penalty=fields.number("repetition_penalty", 0, 10, 1.0, above=True),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        logit_bias=_logit_bias(fields),
        seed=fields.integer("seed", -(1 << 63), (1 << 63) - 1),
        stop=_stop(fields),
        stop_token_ids=_token_ids(fields, "stop_token_ids", _STOP_TOKENS),
        ignore_eos=fields.boolean("ignore_eos"),
        n=fields.integer("n", 1, settings.choices) or 1,
        logprobs=_chat_logprobs(fields) if chat else fields.integer("logprobs", 0, _ALTERNATIVES),
        prompt_logprobs=prompt_logprobs,
        bad_words=_bad_words(fields),
        allowed_token_ids=_allowed_tokens(fields),
        truncate_prompt_tokens=_truncate_prompt_tokens(fields),
        include_stop_str_in_output=fields.boolean("include_stop_str_in_output"),
        skip_special_tokens=fields.boolean("skip_special_tokens", default=True),
        priority=fields.integer("priority", -_PRIORITIES, _PRIORITIES - 1) or 0,
    )


def token_ids(param: str, values: list[Any]) -> tuple[int, ...]:
    """Check a list of token ids; the model checks whether it has them."""
    for value in values:
        if type(value) is not int or not 0 <= value < _TOKEN_IDS:
            raise BadRequest(param, "tokens must be integers of 0 or more")
    return tuple(values)


def _top_k(fields: Fields) -> int:
    # Some servers use -1 for all tokens.
    return max(fields.integer("top_k", -1, _TOKEN_IDS) or 0, 0)


def _chat_logprobs(fields: Fields) -> int | None:
    enabled = fields.boolean("logprobs")
    alternatives = fields.integer("top_logprobs", 0, _ALTERNATIVES)
    if alternatives and not enabled:
        raise fields.error("top_logprobs", "needs 'logprobs': true")
    return (alternatives or 0) if enabled else None


def _stop(fields: Fields) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > _STOPS:
        raise fields.error("stop", f"must be a string, or a list of at most {_STOPS} strings")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= _STOP_CHARACTERS:
            raise fields.error("stop", f"each item must be a string of 1 to {_STOP_CHARACTERS} characters")
    return tuple(stops)


def _bad_words(fields: Fields) -> tuple[str, ...]:
    words = fields.list("bad_words", _BAD_WORDS) or []
    for word in words:
        if not isinstance(word, str) or len(word) > _BAD_WORD_CHARACTERS or not word.strip():
            raise fields.error("bad_words", f"each item must be a word of 1 to {_BAD_WORD_CHARACTERS} characters")
    return tuple(words)


def _allowed_tokens(fields: Fields) -> tuple[int, ...] | None:
    tokens = fields.list("allowed_token_ids", _ALLOWED_TOKENS)
    if tokens is None:
        return None
    if not tokens:
        raise fields.error("allowed_token_ids", "must not be empty: leave it out to allow all tokens")
    return token_ids(fields.param("allowed_token_ids"), tokens)


def _truncate_prompt_tokens(fields: Fields) -> int | None:
    count = fields.integer("truncate_prompt_tokens", -1, MOST_TOKENS)
    if count == 0:
        raise fields.error("truncate_prompt_tokens", "must be 1 or more, or -1 for as many tokens as fit")
    return count


def _token_ids(fields: Fields, name: str, most: int) -> tuple[int, ...]:
    return token_ids(fields.param(name), fields.list(name, most) or [])


def _logit_bias(fields: Fields) -> dict[int, float]:
    biases_by_token = fields.object("logit_bias") or {}
    if len(biases_by_token) > _BIASES:
        raise fields.error("logit_bias", f"has {len(biases_by_token)} tokens; at most {_BIASES} are allowed")
    biases = {}
    for token, bias in biases_by_token.items():
        if not (token.isascii() and token.isdecimal() and len(token) < 9):
            raise fields.error("logit_bias", f"{token[:32]!a} is not a token: use the token id as a string")
        if type(bias) not in (int, float) or not -100 <= bias <= 100:
            raise fields.error("logit_bias", f"the bias of token {token} must be a number from -100 to 100")
        biases[int(token)] = float(bias)
    return biases
