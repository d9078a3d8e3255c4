# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a Hugging Face folder. Loaded by the backend with the model; read by everything that knows of text.

Safe to use from several threads at once. Never asks the network for anything.
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.backends.llm.text.detokenising import Detokenizer
from headrace.backends.llm.text.pieces import Pieces, pieces_of
from headrace.backends.llm.text.templates import ChatTemplate
from headrace.core.errors import FailedPrecondition, InvalidArgument

log = logging.getLogger("headrace.llm")

_CONFIG_BYTES = 16 << 20
_TRIES, _TRY_TOKENS = 24, 24
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class Tokenizer:
    """Text to tokens and back, messages to a prompt. Made by `load`."""

    def __init__(self, hugging_face: Any, eos_ids: frozenset[int], template: ChatTemplate | None) -> None:
        self.hugging_face = hugging_face
        """transformers' own, for those who need more of it."""
        self.eos_ids = eos_ids
        """Tokens that end a text: those of generation_config.json, config.json and the tokenizer."""
        self._template = template
        names: dict[str, int] = hugging_face.get_vocab()
        self.vocabulary = max(names.values(), default=-1) + 1
        """Ids below this are tokens; a model may have more, which mean nothing."""
        self.pieces: Pieces | None = None
        """See `text.pieces`; None where only the tokenizer knows."""
        self.longest_token = max(map(len, names), default=1)
        """In characters: a text of n characters has n / longest_token tokens at least."""
        backend: Any = getattr(hugging_face, "backend_tokenizer", None)
        self._fast = backend if hasattr(backend, "encode_batch_fast") else None
        if self._fast is not None:
            # Some files say that texts are to be cut. We refuse what is too long.
            self._fast.no_truncation()
            self._fast.no_padding()
        made = _pieces(hugging_face, names)
        if made is not None:
            self.pieces = made
            if not self._agrees():
                log.warning("this tokenizer decodes in a way of its own: streaming its text costs more")
                self.pieces = None

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Read a folder. `chat_template` is the text of a template to use in place of the model's own."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise FailedPrecondition("language models need the extra 'llm': pip install 'headrace[llm]'") from None
        try:
            hugging_face = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:
            log.warning("the tokenizer of %s cannot be read", folder, exc_info=error)
            raise InvalidArgument(
                f"the tokenizer in '{folder.name}' cannot be read: the folder needs tokenizer.json and "
                "tokenizer_config.json as transformers writes them; the log says what is wrong"
            ) from None
        return cls(hugging_face, _eos_ids(folder, hugging_face), _template(hugging_face, chat_template))

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Text to tokens. Without `add_special` for what a chat template made: it wrote the special ones itself."""
        if self._fast is None:
            ids: list[int] = self.hugging_face.encode(text, add_special_tokens=add_special)
            return ids
        # Of its methods, those for many texts are the ones that let other threads run meanwhile.
        fast: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        return fast

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Tokens to text, all at once. See `Detokenizer` for one after the other."""
        # The "clean up" of some old tokenizers takes away spaces before full stops, in code and all.
        text: str = self.hugging_face.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def token_bytes(self, id: int) -> bytes:
        """What a token stands for; of a special one, its name."""
        if self.pieces is None:
            return self.decode([id], skip_special=False).encode()
        part = self.pieces.parts[id] if 0 <= id < len(self.pieces.parts) else b""
        return part.encode() if isinstance(part, str) else part

    def token_text(self, id: int) -> str:
        """The same as text; bytes that are no character become the replacement character."""
        return self.token_bytes(id).decode(errors="replace")

    def prompt_of(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
    ) -> str:
        """The prompt that the model's chat template makes. It may take long: not for an event loop."""
        if self._template is None:
            raise FailedPrecondition(
                "this model has no chat template: send a prompt to /v1/completions, or set the model's parameter "
                "'chat_template' to a template file"
            )
        return self._template.render(messages, tools, arguments)

    def _agrees(self) -> bool:
        """Whether our tables and the library make the same text of some tokens."""
        chance = random.Random(0)  # noqa: S311
        for _ in range(_TRIES if self.vocabulary else 0):
            ids = [chance.randrange(self.vocabulary) for _ in range(_TRY_TOKENS)]
            for skip_special in (True, False):
                ours = Detokenizer(self, skip_special)
                if ours.push(ids) + ours.finish() != self.decode(ids, skip_special):
                    return False
        return True


def _pieces(hugging_face: Any, names: Mapping[str, int]) -> Pieces | None:
    backend = getattr(hugging_face, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "get_added_tokens_decoder"):
        return None
    added = backend.get_added_tokens_decoder()
    tokens = {place: token for token, place in names.items()}
    tokens |= {place: token.content for place, token in added.items()}
    specials = frozenset(place for place, token in added.items() if token.special)
    decoder = backend.decoder
    return pieces_of(json.loads(decoder.__getstate__()) if decoder is not None else None, tokens, specials)


def _template(hugging_face: Any, given: str | None) -> ChatTemplate | None:
    special = {name: str(token) for name, token in hugging_face.special_tokens_map.items() if isinstance(token, str)}
    if given is not None:
        return ChatTemplate(given, special_tokens=special)
    own = hugging_face.chat_template
    texts = {"default": own} if isinstance(own, str) else dict(own or {})
    if "default" not in texts:
        return None
    try:
        return ChatTemplate(texts["default"], texts.get("tool_use"), special_tokens=special)
    except InvalidArgument as error:
        # Completions need no template, so the model is still of use.
        log.warning("the model's own chat template is left out: %s", error.message)
        return None


def _eos_ids(folder: Path, hugging_face: Any) -> frozenset[int]:
    found: list[Any] = [hugging_face.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        config = _json_object(folder / name)
        inner = config.get("text_config")
        for place in (config, inner if isinstance(inner, dict) else {}):
            value = place.get("eos_token_id")
            found.extend(value if isinstance(value, list) else [value])
    return frozenset(token for token in found if type(token) is int and token >= 0)


def _json_object(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_CONFIG_BYTES + 1)
    except FileNotFoundError:
        return {}
    if len(raw) > _CONFIG_BYTES:
        raise InvalidArgument(f"{path.name} is larger than {_CONFIG_BYTES >> 20} MiB: it is no configuration")
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError):
        raise InvalidArgument(f"{path.name} is not JSON: get the model's folder anew") from None
    return value if isinstance(value, dict) else {}
