"""Text to ids and back: a thin layer over a Hugging Face tokenizer, without code from model repositories.

mlx-lm's streaming detokenizer for byte-level BPE drops the first leading space, so the text of a stream is
built from the bytes of single tokens, `piece_bytes`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from draftwire.models import ModelError
from draftwire.pieces import byte_alphabet, piece_rules

_FINGERPRINT_DOMAIN: Final = b"draftwire-vocabulary-1\n"
_NO_PIECE: Final = 0xFFFFFFFF
_OWN_ARGUMENTS: Final = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "load_from",
    }
)


class TokenizerError(ModelError):
    """The tokenizer of a model cannot be loaded or is of a kind that draftwire cannot stream."""


class ChatTemplateError(ValueError):
    """A chat cannot be turned into a prompt: no template, or the template refuses these messages."""


class Tokenizer:
    """The tokenizer of one model directory.

    Encoding (`encode`, `apply_chat_template`) is for one thread at a time; everything else only reads.
    """

    def __init__(self, model_dir: Path) -> None:
        """Raises TokenizerError, naming the directory, if files are missing, damaged or of another kind."""
        if not model_dir.is_dir():
            raise TokenizerError(f"{model_dir} is not a directory with a tokenizer")
        # As mlx-lm does: transformers would advise to install PyTorch, which nothing here uses.
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                str(model_dir), trust_remote_code=False, local_files_only=True
            )
            backend = json.loads(self._tokenizer.backend_tokenizer.to_str())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
            raise TokenizerError(
                f"{model_dir} has no tokenizer that can be loaded without code of its own "
                f"(a tokenizer.json is needed): {_first_line(error)}"
            ) from error
        rules = piece_rules(backend.get("decoder"))
        if rules is None:
            kind = (backend.get("decoder") or {}).get("type")
            raise TokenizerError(f"{model_dir}: tokens of a {kind!r} decoder cannot be streamed one by one")
        self.size: int = len(self._tokenizer)
        """Number of ids that have a piece; the model's head may be wider."""
        self._ids: dict[str, int] = dict(self._tokenizer.get_vocab())
        self._tokens: dict[int, str] = {token_id: token for token, token_id in self._ids.items()}
        added = self._tokenizer.added_tokens_decoder
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        """The ids that `decode` leaves out with skip_special_tokens."""
        self.strips_leading_space: bool = rules.strips_leading_space
        """`decode` drops one space at the start of a sequence, which `piece_bytes` keeps."""
        alphabet = byte_alphabet()
        self._pieces = {i: rules.encode(token, alphabet) for i, token in self._tokens.items()}
        self.fingerprint: str = vocabulary_fingerprint(self._tokens, self.size)
        """SHA-256, 64 hex digits, of the map from id to token below `size`: no roles, no head width."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Ids of the text; `add_special_tokens` adds what the tokenizer puts around it, such as a BOS."""
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return [int(token_id) for token_id in ids]

    def plain_encoder(self) -> Callable[[str], list[int]]:
        """A copy of the encoder, without special tokens, for text in the middle of other text. Any thread may call it."""
        from tokenizers import Tokenizer as Backend

        backend: Any = Backend.from_str(self._tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        return lambda text: [int(token_id) for token_id in backend.encode(text, add_special_tokens=False).ids]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of whole `ids`; ids that no token has are left out, invalid UTF-8 becomes U+FFFD."""
        text = self._tokenizer.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return str(text)

    def piece_bytes(self, token_id: int) -> bytes:
        """The bytes that this token adds to the text, leading space included; empty for an id without a token.

        Joined, they are the UTF-8 of `decode` (see `strips_leading_space`); a token may be part of a character.
        """
        return self._pieces.get(token_id, b"")

    def token_id(self, token: str) -> int | None:
        """The id of a vocabulary entry written as the tokenizer's files write it, or None."""
        return self._ids.get(token)

    @property
    def has_chat_template(self) -> bool:
        return bool(self._tokenizer.chat_template)

    def template_uses(self, name: str) -> bool:
        """Whether the chat template reads the variable `name`, for example "tools"."""
        template = self._tokenizer.chat_template or ""
        texts = template.values() if isinstance(template, dict) else (template,)
        return any(_template_reads(text, name) for text in texts)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        template_arguments: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """Ids of the chat as the model's own template writes it.

        Raises ChatTemplateError if there is no template, if it refuses the messages, or if
        `template_arguments` names an argument of the tokenizer itself.
        """
        if not self.has_chat_template:
            raise ChatTemplateError("the model has no chat template; send the prompt as text or token ids")
        if taken := sorted(_OWN_ARGUMENTS & set(template_arguments or {})):
            raise ChatTemplateError(f"template_arguments may not contain {', '.join(taken)}")
        from jinja2 import TemplateError

        try:
            ids = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=True,
                return_dict=False,
                **(template_arguments or {}),
            )
        except (TemplateError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
            fault = _first_line(error)
            raise ChatTemplateError(f"the chat template refuses these messages: {fault}") from error
        return [int(token_id) for token_id in ids]

    def end_ids(self, model_dir: Path) -> frozenset[int]:
        """The union of the end-of-sequence ids in all configuration files of `model_dir`.

        The files disagree in practice: one may name the end of a turn and another the end of a document. Ids
        come as a number, a list, or a token's text. Raises TokenizerError for a file that is not JSON.
        """
        found = {value for path in _config_files(model_dir) for value in _end_values(_read_json(path))}
        ids = {value if isinstance(value, int) else self.token_id(value) for value in found}
        return frozenset(token_id for token_id in ids if token_id is not None and token_id >= 0)


def vocabulary_fingerprint(tokens: Mapping[int, str], size: int) -> str:
    """SHA-256 over ids [0, size): each as its UTF-8 length (4 bytes, little-endian) and its UTF-8.

    An id without a token has the length 0xFFFFFFFF and no bytes. The hash begins with
    "draftwire-vocabulary-1\\n" and `size` (4 bytes, little-endian).
    """
    digest = hashlib.sha256(_FINGERPRINT_DOMAIN + struct.pack("<I", size))
    for token_id in range(size):
        token = tokens.get(token_id)
        if token is None:
            digest.update(struct.pack("<I", _NO_PIECE))
        else:
            raw = token.encode("utf-8", errors="surrogatepass")
            digest.update(struct.pack("<I", len(raw)) + raw)
    return digest.hexdigest()


def _template_reads(template: str, name: str) -> bool:
    from jinja2 import Environment, TemplateSyntaxError, meta

    try:
        syntax = Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=False).parse(template)
    except TemplateSyntaxError:
        # A tag that only transformers knows, such as {% generation %}: look for the word instead.
        return re.search(rf"\b{re.escape(name)}\b", template) is not None
    return name in meta.find_undeclared_variables(syntax)


def _config_files(model_dir: Path) -> list[Path]:
    names = ("config.json", "generation_config.json", "tokenizer_config.json", "special_tokens_map.json")
    return [model_dir / name for name in names if (model_dir / name).exists()]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} is not readable JSON: {_first_line(error)}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{path} must hold a JSON object")
    return content


def _end_values(config: Mapping[str, Any]) -> Iterator[int | str]:
    nested = config.get("text_config")
    if isinstance(nested, dict):
        yield from _end_values(nested)
    for key in ("eos_token_id", "eos_token"):
        value = config.get(key)
        for entry in value if isinstance(value, list) else [value]:
            match entry:
                case bool():
                    continue
                case int() | str():
                    yield entry
                case {"content": str(content)}:
                    yield content


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
