# SPDX-License-Identifier: Apache-2.0
"""The state of a request while it is generated: its choices, their text, and the replies that stream them.

Created by `instance`; the engine core's thread feeds it token by token. It knows no step and no device. The engine core
sends the replies of a step to the event loop together.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import Any

import numpy as np
import orjson

from headrace.backends.contract import Work
from headrace.backends.llm.adapter_fit import LoadedAdapter
from headrace.backends.llm.detokenizer import Detokenizer, StopStrings
from headrace.backends.llm.requests import ParsedRequest
from headrace.backends.llm.sampling.bad_words import BadWords
from headrace.backends.llm.sampling.prompt_logprobs import PromptLogprobs
from headrace.backends.llm.sampling.sampler import TokenBytes, TokenLogprobs, logprob_entry
from headrace.backends.llm.sampling.state import SamplingState
from headrace.backends.llm.sampling.structured_output import Constraint
from headrace.backends.llm.scheduler import BACKGROUND, Sequence
from headrace.backends.llm.tokenizer import Tokenizer
from headrace.backends.llm.vision.inputs import MultimodalPrompt
from headrace.core.dtypes import BYTES
from headrace.core.errors import HeadraceError, InvalidArgument
from headrace.core.generation import TEXT_OUTPUT, GeneratedTokens
from headrace.core.requests import NO_PARAMETERS, Parameters
from headrace.core.tensors import Tensor

Reply = tuple[Work, str | Several[Tensor] | HeadraceError | None, bool, Parameters]
"""Arguments of `Work.reply`: text, outputs or error, whether it is final, parameters."""


def merge_replies(steps: Several[list[Reply]]) -> list[Reply]:
    """Return the replies of several steps, with the text that a stream got in them as one reply.

    An event loop that is behind sends fewer and longer chunks then (vLLM merges outputs in the same way).
    """
    merged: list[Reply] = []
    texts: dict[tuple[Work, Any], int] = {}
    """For each choice, the index of its last reply of only text."""
    for step in steps:
        for reply in step:
            work, outputs, final, parameters = reply
            if final or not isinstance(outputs, str) or not _is_text_only(parameters):
                for choice in [choice for choice in texts if choice[0] is work]:
                    del texts[choice]  # what follows comes after this reply
                merged.append(reply)
                continue
            choice = work, parameters["index"]
            index = texts.setdefault(choice, len(merged))
            if index == len(merged):
                merged.append(reply)
            else:
                merged[index] = work, f"{merged[index][1]}{outputs}", False, _joined(merged[index][3], parameters)
    return merged


def _is_text_only(parameters: Parameters) -> bool:
    return len(parameters) == 1 or (len(parameters) == 2 and "token_ids" in parameters)


def _joined(first: Parameters, second: Parameters) -> Parameters:
    """Return the parameters of two replies of only text as one."""
    if "token_ids" not in second:
        return second
    return {**second, "token_ids": f"{first['token_ids']},{second['token_ids']}"}


class RequestState:
    """One request and its choices."""

    __slots__ = (
        "adapter",
        "arrived_ns",
        "choices",
        "constraint",
        "done",
        "multimodal_prompt",
        "on_prefilled",
        "parsed",
        "prompt_logprobs",
        "received_pages",
        "unfinished",
        "work",
    )

    def __init__(
        self,
        work: Work,
        parsed: ParsedRequest,
        constraint: Constraint | None,
        arrived_ns: int,
        multimodal_prompt: MultimodalPrompt | None = None,
    ) -> None:
        self.work = work
        self.parsed = parsed
        self.constraint = constraint
        self.arrived_ns = arrived_ns
        self.multimodal_prompt = multimodal_prompt
        self.adapter: LoadedAdapter | None = None
        """The adapter that it asks for, if that was loaded on demand."""
        self.choices: list[Choice] = []
        self.unfinished = 0
        """Number of choices that are not finished."""
        self.done = False
        """Whether the final reply was made."""
        self.on_prefilled: Callable[[RequestState, Sequence], None] | None = None
        """For a prefill-only request: called when the prompt is computed, and replies."""
        wanted = parsed.sampling.prompt_logprobs
        self.prompt_logprobs = PromptLogprobs(parsed.tokens, wanted) if wanted is not None else None
        self.received_pages: Any = None
        """Pages of its prompt that another server computed: see `Sequence.received_pages`."""

    @property
    def cache_salt(self) -> bytes:
        """The cache salt of its sequences."""
        salt = self.parsed.adapter.encode()
        if self.adapter is not None:  # another one may have the same name later
            salt += b"\0" + self.adapter.digest
        return salt if self.multimodal_prompt is None else salt + b"\0" + self.multimodal_prompt.media_hash

    def create_sequences(self, tokenizer: Tokenizer, *, prompt_inputs: Any = None) -> list[Sequence]:
        """Create the choices; return their sequences."""
        parsed, sampling, tokens, salt = self.parsed, self.parsed.sampling, self.parsed.tokens, self.cache_salt
        limit = len(tokens) + (sampling.max_tokens or 1)
        priority = BACKGROUND if self.work.request.is_background else sampling.priority
        for index in range(sampling.n):
            constraint = self.constraint.fresh() if self.constraint is not None and index else self.constraint
            bad_words = BadWords(parsed.bad_words) if parsed.bad_words else None
            state = SamplingState(sampling, tokens, constraint, tokenizer.eos_ids, index, bad_words)
            choice = Choice(self, index, state, tokenizer)
            choice.sequence = Sequence(
                tokens,
                limit,
                cache_salt=salt,
                adapter=parsed.adapter,
                prompt_inputs=prompt_inputs,
                prompt_logprobs=None if index else self.prompt_logprobs,
                priority=priority,
                owner=choice,
                speculates=state.can_speculate,
            )
            self.choices.append(choice)
        self.unfinished = len(self.choices)
        self.choices[0].sequence.received_pages, self.received_pages = self.received_pages, None
        return [choice.sequence for choice in self.choices]

    def replay(self, replies: list[Reply]) -> list[Sequence]:
        """Repeat the replies of the server that began this request; return the sequences that are not finished.

        Each sequence then has the tokens that were generated, and goes on like one that was preempted.
        """
        for generated in self.parsed.generation.continued:
            self.choices[generated.index].replay(generated, replies)
        return [choice.sequence for choice in self.choices if not choice.finished and not self.done]

    def prompt_parameters(self, tokenizer: Tokenizer) -> Parameters:
        """Return the parameters about the prompt, which a choice's first reply has."""
        if self.prompt_logprobs is None:
            return self.parsed.prompt_parameters
        return {**self.parsed.prompt_parameters, "prompt_logprobs": self.prompt_logprobs.to_json(tokenizer)}

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of all choices."""
        return [choice.sequence for choice in self.choices]

    def finish(self, replies: list[Reply], error: HeadraceError | None) -> None:
        """Add the final reply, an error or nothing more, unless there was one."""
        if not self.done:
            self.done = True
            replies.append((self.work, error, True, NO_PARAMETERS))


class Choice:
    """One of the `n` texts that are generated for a request."""

    __slots__ = (
        "_detokenizer",
        "_has_replied",
        "_is_plain",
        "_pending_logprobs",
        "_reasoning_end",
        "_reasoning_tokens",
        "_tail",
        "_tokenizer",
        "_untold",
        "cached_tokens",
        "finished",
        "index",
        "last_token_ns",
        "parameters",
        "request",
        "sampling_state",
        "sequence",
        "stops",
        "texts",
    )

    sequence: Sequence

    def __init__(self, request: RequestState, index: int, state: SamplingState, tokenizer: Tokenizer) -> None:
        self.request = request
        self.index = index
        self.sampling_state = state
        generation, sampling = request.parsed.generation, request.parsed.sampling
        self.stops = StopStrings(sampling.stop, included=sampling.include_stop_str_in_output)
        self._detokenizer = Detokenizer(
            tokenizer, skip_special=sampling.skip_special_tokens, kept=generation.output_markers
        )
        self._tokenizer = tokenizer
        self._reasoning_end = generation.reasoning_end
        """The marker that is awaited; "" if there is none, or when it has come."""
        self._reasoning_tokens = 0
        self._tail = ""
        """The end of the text, which may have the beginning of the marker."""
        self.parameters: Parameters = {"index": index}
        """Parameters of a reply in the middle of a stream; at the end, those of the last reply."""
        self.texts: list[str] = []
        """Text that was not sent yet."""
        self._pending_logprobs: list[tuple[int, TokenLogprobs]] = []
        """Tokens whose log-probabilities were not sent yet."""
        self.last_token_ns = 0
        """Time of its last token; 0 before the first."""
        self.finished = False
        self.cached_tokens: int | None = None
        """Prompt tokens in the prefix cache of the server that began the request; None: this one did."""
        self._untold: list[int] | None = [] if generation.tracks_tokens else None
        """Tokens that no reply was made of yet; None if replies do not say their tokens."""
        self._has_replied = False
        self._is_plain = state.is_plain and generation.stream and not (sampling.stop or self._reasoning_end)
        """Whether each of its tokens, but for the first and the last, is only text to send."""

    def append(self, token: int, logprobs: TokenLogprobs | None, replies: list[Reply]) -> None:
        """Add a token: detokenize it, check the stop conditions, and add a reply where there is text to send."""
        state, request, sequence = self.sampling_state, self.request, self.sequence
        # Not the length of `sequence.tokens`: a step may have added several tokens to it.
        is_last = sequence.prompt_length + state.position + 1 >= sequence.limit
        if self._untold is not None:
            self._untold.append(token)
        if self._is_plain and self._has_replied and not is_last and not state.is_stop_token(token):
            # Most tokens. What follows would come to the same.
            state.position += 1
            text = self._detokenizer.push((token,))
            if text:
                replies.append((request.work, text, False, self._with_tokens(self.parameters)))
            return
        state.advance(token)
        if state.error is not None:
            request.finish(replies, state.error)
            return
        is_stop_token = state.is_stop_token(token)
        if is_stop_token and not request.parsed.sampling.include_stop_str_in_output:
            self._finish("stop", self._flush(), replies)
            return
        if logprobs is not None:
            self._pending_logprobs.append((token, logprobs))
        text, stopped = self.stops.push(self._detokenizer.push((token,)))
        if self._reasoning_end and text:
            self._count_reasoning(text)
        if stopped:
            self._finish("stop", text, replies)
        elif is_stop_token or state.finished:
            self._finish("stop", text + self._flush(), replies)
        elif is_last:
            self._finish("length", text + self._flush(), replies)
        elif not request.parsed.stream:
            self.texts.append(text)
        elif text:
            parameters = self.parameters
            if not self._has_replied:
                parameters = self._with_prompt_parameters(parameters)
            if self._pending_logprobs:
                parameters = {**parameters, "logprobs": self._take_logprobs()}
            replies.append((request.work, text, False, self._with_tokens(parameters)))

    def replay(self, generated: GeneratedTokens, replies: list[Reply]) -> None:
        """Add the tokens of a reply that another server made, and the same reply."""
        if generated.cached_tokens is not None:
            self.cached_tokens = generated.cached_tokens
        sequence = self.sequence
        sequence.tokens = list(sequence.tokens)  # the choices of a request share their prompt
        made: list[Reply] = []
        for token in generated.tokens:
            if self.finished or self.request.done:
                raise InvalidArgument("continued: there are tokens after the end of a choice")
            sequence.tokens.append(token)
            self.append(token, None, made)
        parameters: dict[str, bool | int | float | str] = {"index": self.index}
        for _, _, _, added in made:
            parameters.update(added)
        if generated.logprobs is not None:
            parameters["logprobs"] = generated.logprobs
        error = next((outputs for _, outputs, _, _ in made if isinstance(outputs, HeadraceError)), None)
        text = "".join(outputs for _, outputs, _, _ in made if isinstance(outputs, str))
        final = bool(made) and made[-1][2]
        replies.append((self.request.work, error or text, final, {**parameters, "replayed": True}))

    def _with_tokens(self, parameters: Parameters) -> Parameters:
        """Add the tokens that a reply is made of, if the request wants to know."""
        untold = self._untold
        if untold is None:
            return parameters
        self._untold = []
        return {**parameters, "token_ids": ",".join(map(str, untold))}

    def _with_prompt_parameters(self, parameters: Parameters) -> Parameters:
        """Add the parameters about the prompt to those of the first reply."""
        if self._has_replied:
            return parameters
        self._has_replied = True
        added = self.request.prompt_parameters(self._tokenizer)
        if self._untold is not None:
            added = {**added, "cached_tokens": self._cached_tokens()}
        return {**parameters, **added} if added else parameters

    def _cached_tokens(self) -> int:
        return self.sequence.cached if self.cached_tokens is None else self.cached_tokens

    def _count_reasoning(self, text: str) -> None:
        """Look for the end of the reasoning; when it comes, count the tokens so far."""
        end = self._reasoning_end
        tail = self._tail + text
        if end in tail:
            self._reasoning_end = ""
            self._reasoning_tokens = self.sampling_state.position
        else:
            self._tail = tail[1 - len(end) :]

    def _flush(self) -> str:
        """Return the text that was held back for an incomplete character or a possible stop string."""
        text, stopped = self.stops.push(self._detokenizer.finish())
        return text if stopped else text + self.stops.finish()

    def _take_logprobs(self) -> str:
        pending, self._pending_logprobs = self._pending_logprobs, []
        return logprobs_json(self._tokenizer, [token for token, _ in pending], [logprobs for _, logprobs in pending])

    def _finish(self, reason: str, text: str, replies: list[Reply]) -> None:
        request, sequence = self.request, self.sequence
        self.finished = True
        request.unfinished -= 1
        self.texts.append(text)
        parameters: dict[str, bool | int | float | str] = {
            "index": self.index,
            "finish_reason": reason,
            "prompt_tokens": sequence.prompt_length,
            "cached_tokens": self._cached_tokens(),
            "completion_tokens": self.sampling_state.position,
        }
        if self._reasoning_tokens:
            parameters["reasoning_tokens"] = self._reasoning_tokens
        if self.stops.matched:
            parameters["matched_stop"] = self.stops.matched
        if request.parsed.sampling.logprobs is not None:
            parameters["logprobs"] = self._take_logprobs()
        self.parameters = parameters
        if not request.parsed.single_reply:
            request.done = not request.unfinished
            text = "".join(self.texts)
            complete = self._with_tokens(self._with_prompt_parameters(parameters))
            replies.append((request.work, text, request.done, complete))
        elif not request.unfinished:
            request.done = True
            output = text_tensor(*("".join(choice.texts) for choice in request.choices))
            combined = {**_combined_parameters(request.choices), **request.prompt_parameters(self._tokenizer)}
            replies.append((request.work, (output,), True, combined))


def _combined_parameters(choices: Several[Choice]) -> Parameters:
    """Return the first choice's parameters with the token counts of all choices."""
    combined = dict(choices[0].parameters)
    del combined["index"]
    combined["completion_tokens"] = sum(int(choice.parameters["completion_tokens"]) for choice in choices)
    return combined


def text_tensor(*texts: str) -> Tensor:
    """Return the output tensor of a reply with these texts."""
    array = np.empty(len(texts), dtype=object)
    array[:] = [text.encode("utf-8", "replace") for text in texts]
    return Tensor(TEXT_OUTPUT, BYTES, array)


def logprobs_json(tokenizer: TokenBytes, tokens: Several[int], logprobs: Several[TokenLogprobs | None]) -> str:
    """Return the reply parameter `logprobs` for these tokens: see `core.generation`. Tokens without any are left out."""
    entries = [
        {
            **logprob_entry(tokenizer, token, token_logprobs.logprob),
            "top_logprobs": [logprob_entry(tokenizer, other, logprob) for other, logprob in token_logprobs.top],
        }
        for token, token_logprobs in zip(tokens, logprobs, strict=True)
        if token_logprobs is not None
    ]
    return orjson.dumps(entries).decode()
