"""The error of a request that is refused, and the checks that many of its fields share. All raise InvalidRequest."""

from __future__ import annotations

from collections.abc import Collection


class InvalidRequest(ValueError):
    """A request was refused. `field` is the name of the request's field at fault; the message is a sentence."""

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(sentence)
        self.field = field


def are_tokens(token_ids: Collection[int], vocab_size: int) -> bool:
    """Whether all of them, one at least, are in the vocabulary."""
    return min(token_ids) >= 0 and max(token_ids) < vocab_size


def check_token_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Refuses tokens outside of the vocabulary; there may be none."""
    if not token_ids or are_tokens(token_ids, vocab_size):
        return
    token = min(each for each in token_ids if not 0 <= each < vocab_size)
    raise InvalidRequest(field, f"{field} has {token}; this model's token ids go from 0 to {vocab_size - 1}.")


def check_range(field: str, value: float, least: float, most: float, hint: str = "") -> None:
    """Refuses a number outside of least to most."""
    # Written so that NaN, which compares false with everything, is refused.
    if not least <= value <= most:
        raise InvalidRequest(field, f"{field} is {value}; use a number from {least} to {most}{hint}.")


def check_count(field: str, count: int, most: int) -> None:
    """Refuses too many entries."""
    if count > most:
        raise InvalidRequest(field, f"{field} has {count} entries; the most is {most}.")


def check_printable(field: str, text: str) -> None:
    """Refuses a text with characters that cannot be shown."""
    odd = next((index for index, character in enumerate(text) if not character.isprintable()), None)
    if odd is not None:
        raise InvalidRequest(
            field,
            f"{field} has U+{ord(text[odd]):04X} at index {odd}, which cannot be printed; "
            "use printable characters only.",
        )


def check_bytes(field: str, text: str, most: int) -> None:
    """Refuses a text of too many bytes."""
    size = utf8_size(text)
    if size > most:
        raise InvalidRequest(field, f"{field} has {size} bytes in UTF-8; the most is {most}.")


def utf8_size(text: str) -> int:
    """Bytes of a text in UTF-8."""
    # Half a surrogate pair has no UTF-8; as a limit its 3 bytes will do.
    return len(text.encode("utf-8", "surrogatepass"))
