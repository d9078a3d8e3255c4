# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a Hugging Face folder, with its chat template.

The backend loads it with the model. Thread-safe; never uses the network.
"""

from __future__ import annotations

import hashlib
import json
import logging
import random
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.backends.llm.chat_template import ChatTemplate
from headrace.backends.llm.detokenizer import Detokenizer, TokenPieces, pieces_of
from headrace.backends.model_config import read_json_object
from headrace.core.errors import FailedPrecondition, HeadraceError, InvalidArgument
from headrace.core.extras import MissingExtra

log = logging.getLogger("headrace.llm")

_CHECK_ROUNDS, _CHECK_TOKENS = 24, 24
_NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


class Tokenizer:
    """Encodes text, decodes tokens and applies the chat template. Created by `load`."""

    def __init__(self, hugging_face: Any, eos_ids: frozenset[int], template: ChatTemplate | None) -> None:
        self.hugging_face = hugging_face
        """The transformers tokenizer."""
        self.eos_ids = eos_ids
        """EOS tokens of generation_config.json, config.json and the tokenizer."""
        self._template = template
        names: dict[str, int] = hugging_face.get_vocab()
        self.vocabulary = max(names.values(), default=-1) + 1
        """Ids below this are tokens; a model may have more ids, as padding."""
        self.pieces: TokenPieces | None = None
        """See `TokenPieces`; None if only the tokenizer can decode."""
        self._pieces_keeping: dict[tuple[str, ...], TokenPieces] = {}
        self.longest_token = max(map(len, names), default=1)
        """In characters: a text of n characters has at least n / longest_token tokens."""
        backend: Any = getattr(hugging_face, "backend_tokenizer", None)
        self._fast = backend if hasattr(backend, "encode_batch_fast") else None
        if self._fast is not None:
            # Some files enable truncation; we refuse what is too long instead.
            self._fast.no_truncation()
            self._fast.no_padding()
        pieces = _read_pieces(hugging_face, names)
        if pieces is not None:
            self.pieces = pieces
            if not self._pieces_agree():
                log.warning("This tokenizer has an unknown decoder: detokenizing streams costs more.")
                self.pieces = None

    @classmethod
    def load(cls, folder: Path, *, trust_remote_code: bool = False, chat_template: str | None = None) -> Tokenizer:
        """Load the tokenizer of a folder. `chat_template` is the text of a template that replaces the model's own."""
        try:
            from transformers import AutoTokenizer
        except ImportError:
            raise MissingExtra("a language model", "llm") from None
        try:
            hugging_face = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust_remote_code
            )
        except Exception as error:
            log.warning("The tokenizer of %s cannot be read.", folder, exc_info=error)
            raise InvalidArgument(
                f"the tokenizer in '{folder.name}' cannot be read: the folder needs tokenizer.json and "
                "tokenizer_config.json as transformers writes them; the log says what is wrong"
            ) from None
        return cls(hugging_face, _eos_ids(folder, hugging_face), _read_template(hugging_face, chat_template))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the vocabulary: servers with the same one mean the same text by the same tokens."""
        names: dict[str, int] = self.hugging_face.get_vocab()
        return hashlib.blake2b(json.dumps(sorted(names.items())).encode(), digest_size=16).hexdigest()

    def encode(self, text: str, add_special: bool = True) -> list[int]:
        """Return the tokens of a text. Without `add_special` for the output of a chat template, which has special tokens."""
        if self._fast is None:
            ids: list[int] = self.hugging_face.encode(text, add_special_tokens=add_special)
            return ids
        # The batch methods release the GIL; the others do not.
        fast: list[int] = self._fast.encode_batch_fast([text], add_special_tokens=add_special)[0].ids
        return fast

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Return the text of all tokens. See `Detokenizer` for decoding token by token."""
        # Off: the "clean up" of some old tokenizers removes spaces before full stops, even in code.
        text: str = self.hugging_face.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        return text

    def pieces_keeping(self, kept: tuple[str, ...]) -> TokenPieces | None:
        """Return the pieces for a text in which these special tokens stay."""
        if self.pieces is None:
            return None
        pieces = self._pieces_keeping.get(kept)
        if pieces is None:
            ids = frozenset(token for token in self.pieces.specials if self.token_text(token) in kept)
            pieces = self._pieces_keeping[kept] = self.pieces.keeping(ids) if ids else self.pieces
        return pieces

    def token_bytes(self, id: int) -> bytes:
        """Return the bytes of a token; of a special token, its name."""
        if self.pieces is None:
            return self.decode([id], skip_special=False).encode()
        part = self.pieces.all[id] if 0 <= id < len(self.pieces.all) else b""
        return part.encode() if isinstance(part, str) else part

    def token_text(self, id: int) -> str:
        """Return the text of a token; incomplete characters become the replacement character."""
        return self.token_bytes(id).decode(errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        arguments: Mapping[str, Any] = _NO_ARGUMENTS,
    ) -> str:
        """Return the prompt that the model's chat template renders. Slow: not for an event loop."""
        if self._template is None:
            raise FailedPrecondition(
                "this model has no chat template: send a prompt to /v1/completions, or set the model's parameter "
                "'chat_template' to a template file"
            )
        return self._template.render(messages, tools, arguments)

    def _pieces_agree(self) -> bool:
        """Return whether `Detokenizer` and the tokenizer decode random tokens to the same text."""
        generator = random.Random(0)  # noqa: S311
        for _ in range(_CHECK_ROUNDS if self.vocabulary else 0):
            ids = [generator.randrange(self.vocabulary) for _ in range(_CHECK_TOKENS)]
            for skip_special in (True, False):
                detokenizer = Detokenizer(self, skip_special)
                if detokenizer.push(ids) + detokenizer.finish() != self.decode(ids, skip_special):
                    return False
        return True


def _read_pieces(hugging_face: Any, names: Mapping[str, int]) -> TokenPieces | None:
    backend = getattr(hugging_face, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "get_added_tokens_decoder"):
        return None
    added = backend.get_added_tokens_decoder()
    tokens = {token_id: token for token, token_id in names.items()}
    tokens |= {token_id: token.content for token_id, token in added.items()}
    specials = frozenset(token_id for token_id, token in added.items() if token.special)
    decoder = backend.decoder
    return pieces_of(json.loads(decoder.__getstate__()) if decoder is not None else None, tokens, specials)


def _read_template(hugging_face: Any, given: str | None) -> ChatTemplate | None:
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
        # Completions need no template, so the model is still useful.
        log.warning("Ignoring the model's own chat template: %s", error.message)
        return None


def _eos_ids(folder: Path, hugging_face: Any) -> frozenset[int]:
    ids: list[Any] = [hugging_face.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if not path.exists():
            continue
        config = read_json_object(path, name, f"{name} cannot be read: download the model again", InvalidArgument)
        inner = config.get("text_config")
        for section in (config, inner if isinstance(inner, dict) else {}):
            value = section.get("eos_token_id")
            ids.extend(value if isinstance(value, list) else [value])
    return frozenset(token for token in ids if type(token) is int and token >= 0)


def template_text(folder: Path) -> str:
    """Return the chat templates in the files of a model folder; "" if there are none that can be read."""
    try:
        return (folder / "chat_template.jinja").read_text()
    except (OSError, UnicodeDecodeError):
        pass
    try:
        template = read_json_object(folder / "tokenizer_config.json", "tokenizer_config.json", "").get("chat_template")
    except HeadraceError:
        return ""  # loading the tokenizer says what is wrong
    templates = template if isinstance(template, list) else [{"template": template}]
    return "\n".join(str(entry.get("template") or "") for entry in templates if isinstance(entry, dict))
