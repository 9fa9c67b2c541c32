"""Names of the tokens of each sequence of a batch, from a tokenizer and ids, or from an encoding of texts."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from regard.look.readable_tokens import from_bytes, from_offsets, readable


@runtime_checkable
class NamesTokens(Protocol):
    """The interface of a tokenizer of the transformers library: the one method that is used to name tokens."""

    def convert_ids_to_tokens(self, ids: list[int], /) -> list[str]: ...


@runtime_checkable
class NamesToken(Protocol):
    """The interface of a tokenizer of the tokenizers library: the one method that is used to name a token."""

    def id_to_token(self, id: int, /) -> str | None: ...


@runtime_checkable
class Encoding(Protocol):
    """The encoding of one text by the tokenizers library."""

    @property
    def tokens(self) -> list[str]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...

    @property
    def attention_mask(self) -> list[int]: ...

    @property
    def special_tokens_mask(self) -> list[int]: ...


class Named(NamedTuple):
    """The names of the tokens of one sequence, and the positions that are not padding (None: all of them)."""

    names: list[str]
    shown: tuple[int, ...] | None


def is_encoding(given: object) -> bool:
    """Return whether the object is an encoding of texts by the transformers library or by the tokenizers library."""
    return (isinstance(given, Mapping) and "input_ids" in given) or isinstance(given, Encoding)


def of_tokenizer(tokenizer: object, given: Any) -> list[Named]:
    """Return the names of tokens; `given` are the ids of one sequence or of a batch, or an encoding with ids.

    The attention mask of an encoding marks the padding.
    """
    if isinstance(given, Encoding):
        given = {"input_ids": getattr(given, "ids", []), "attention_mask": given.attention_mask}
    ids = given["input_ids"] if isinstance(given, Mapping) else given
    rows = _numbers(ids)
    masks = _masks(given, rows) if isinstance(given, Mapping) else [None] * len(rows)
    own = tokenizer if isinstance(tokenizer, NamesToken) else getattr(tokenizer, "model", None)
    if not isinstance(tokenizer, NamesTokens) and isinstance(own, NamesToken):
        # if the tokenizer is a wrapper such as regard's sub-word tokenizer, its wrapped tokenizer is used
        tokenizer = own
    return [Named(_readable(tokenizer, numbers), _shown(mask)) for numbers, mask in zip(rows, masks, strict=True)]


def of_encodings(given: Any) -> list[Named]:
    """Return the names of tokens from an encoding alone, without its text or tokenizer: its pieces as readable text."""
    named = []
    for encoding in _encodings(given):
        special = [bool(flag) for flag in encoding.special_tokens_mask]
        named.append(Named(readable(encoding.tokens, special), _shown(encoding.attention_mask)))
    return named


def of_texts(texts: str | Sequence[str], given: Any) -> list[Named]:
    """Return the names of tokens from their encoding and the encoded texts: the characters at each token's offsets."""
    several = [texts] if isinstance(texts, str) else list(texts)
    encodings = _encodings(given)
    if len(several) != len(encodings) or not all(isinstance(text, str) for text in several):
        raise ValueError(f"{len(encodings)} texts were encoded, but {len(several)} texts are given for their labels")
    named = []
    for text, encoding in zip(several, encodings, strict=True):
        names = from_offsets(text, encoding.offsets, encoding.tokens)
        named.append(Named(names, _shown(encoding.attention_mask)))
    return named


def _encodings(given: Any) -> list[Encoding]:
    if isinstance(given, Encoding):
        return [given]
    encodings = getattr(given, "encodings", None)
    if not encodings or not all(isinstance(encoding, Encoding) for encoding in encodings):
        raise TypeError("this encoding has ids only: give (tokenizer, encoding) for labels")
    return list(encodings)


def _numbers(ids: Any) -> list[list[int]]:
    numbers = ids.tolist() if hasattr(ids, "tolist") else [_plain(row) for row in ids]
    rows = numbers if numbers and all(isinstance(row, list) for row in numbers) else [numbers]
    if not all(type(number) is int for row in rows for number in row):
        raise ValueError(
            "ids of the tokens must be whole numbers: a list for one sequence, or a list of lists for each"
        )
    return rows


def _plain(ids: Any) -> Any:
    return ids.tolist() if hasattr(ids, "tolist") else list(ids) if isinstance(ids, (list, tuple)) else ids


def _masks(given: Mapping[str, Any], rows: list[list[int]]) -> list[list[int] | None]:
    mask = given.get("attention_mask")
    if mask is None:
        return [None] * len(rows)
    masks = _numbers(mask)
    if [len(row) for row in masks] != [len(row) for row in rows]:
        raise ValueError("input_ids and attention_mask of the encoding have other sizes")
    return [*masks]


def _shown(mask: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return the positions that are not padding; None (all positions) if there is no padding, or only padding.

    A sequence that is only padding is shown whole, so that its display is not empty.
    """
    if mask is None or all(mask) or not any(mask):
        return None
    return tuple(n for n, real in enumerate(mask) if real)


def _readable(tokenizer: object, numbers: list[int]) -> list[str]:
    """Return the readable text of each token id, with the first of four methods that the tokenizer has."""
    if isinstance(tokenizer, NamesTokens):
        pieces = [str(token) for token in tokenizer.convert_ids_to_tokens(numbers)]
    elif isinstance(tokenizer, NamesToken):
        pieces = [tokenizer.id_to_token(number) or f"<{number}>" for number in numbers]
    else:
        # `decode_single_token_bytes` is a method of the tokenizers of the library tiktoken
        of_bytes = getattr(tokenizer, "decode_single_token_bytes", None)
        if of_bytes is not None:
            return from_bytes([of_bytes(number) for number in numbers])
        decode = getattr(tokenizer, "decode", None)
        if decode is None:
            raise TypeError(
                f"a tokenizer must have convert_ids_to_tokens, id_to_token or decode, got {type(tokenizer)}"
            )
        return [str(decode([number])) for number in numbers]
    special = _special(tokenizer)
    return readable(pieces, [number in special for number in numbers], byte_level=_is_byte_level(tokenizer))


def _special(tokenizer: object) -> set[int]:
    """Return the ids of the tokenizer's special and added tokens, which are shown unchanged."""
    # transformers has a dict `added_tokens_decoder`, tokenizers a method `get_added_tokens_decoder()`.
    added = getattr(tokenizer, "added_tokens_decoder", None)
    if added is None:
        added = getattr(tokenizer, "get_added_tokens_decoder", dict)()
    return {*added, *getattr(tokenizer, "all_special_ids", ())}


def _is_byte_level(tokenizer: object) -> bool | None:
    """Return whether the letters of the tokenizer's pieces represent bytes (byte-level BPE); None if unknown."""
    # the attribute `byte_decoder` belongs to a slow (Python) tokenizer of the transformers library
    if isinstance(getattr(tokenizer, "byte_decoder", None), dict):
        return True
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    decoder = getattr(backend, "decoder", None)
    if decoder is None or not hasattr(decoder, "__getstate__"):
        return None
    try:
        described = json.loads(decoder.__getstate__())
    except (TypeError, ValueError):
        return None
    parts = described.get("decoders", [described])
    return any(part.get("type") == "ByteLevel" for part in parts)
