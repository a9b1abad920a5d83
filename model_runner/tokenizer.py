"""A model's tokenizer, with what the model's own settings say of it: which tokens end a text, and how a chat is put."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.processors import TemplateProcessing

from model_runner.chat_template import ChatTemplate, ChatTemplateError
from model_runner.errors import ModelLoadError
from model_runner.json_file import read_object, read_text


class Tokenizer:
    """Text to token ids and back. Many threads may use it at once."""

    def __init__(
        self, backend: Backend, eos_token_ids: Sequence[int] = (), chat_template: ChatTemplate | None = None
    ) -> None:
        """backend's post-processor is what adds special tokens to a text, if the model wants any."""
        backend.no_padding()
        backend.no_truncation()
        self.backend = backend
        self.eos_token_ids = tuple(eos_token_ids)
        self.chat_template = chat_template
        vocabulary = backend.get_vocab(with_added_tokens=True)
        # One more than the highest id: ids may have gaps.
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes = max((len(token.encode()) for token in vocabulary), default=1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; special tokens written out in the text are taken as such.

        add_special_tokens: with those that the model's settings put around a text. Not for a rendered chat, which
        has all of its special tokens.
        """
        # The batch call lets other threads run meanwhile; encode() would stop the whole process for a long text.
        return self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text; ids outside the vocabulary leave no trace, bytes that are not UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt of a chat, up to where the assistant goes on; options as ChatTemplate.render() has them.

        Raises ChatTemplateError.
        """
        if self.chat_template is None:
            raise ChatTemplateError("The model has no chat template; send the prompt as text or token ids.")
        return self.chat_template.render(messages, **options)


def tokenizer_from_hf(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory. Raises ModelLoadError.

    Reads tokenizer.json and, if they are there, tokenizer_config.json and chat_template.jinja.
    """
    backend = _backend(path / "tokenizer.json")
    config_file = path / "tokenizer_config.json"
    settings = read_object(config_file) if config_file.exists() else {}
    bos, eos = _token_text(settings.get("bos_token")), _token_text(settings.get("eos_token"))
    eos_id = backend.token_to_id(eos)
    _heed_add_bos(backend, settings.get("add_bos_token"), bos)
    return Tokenizer(
        backend,
        eos_token_ids=() if eos_id is None else (eos_id,),
        chat_template=compile_template(path, _template_source(path, settings), bos, eos),
    )


def add_bos(backend: Backend, bos: str) -> None:
    """Makes `bos` the first token of every text that is encoded with special tokens."""
    token_id = backend.token_to_id(bos)
    backend.post_processor = TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, token_id)]
    )


def compile_template(file: Path, source: str | None, bos: str, eos: str) -> ChatTemplate | None:
    """The template that `file` has, if any. Raises ModelLoadError when it is not valid."""
    if source is None:
        return None
    try:
        return ChatTemplate(source, bos, eos)
    except ChatTemplateError as error:
        raise ModelLoadError(f"{file}: {error}") from None


def _backend(file: Path) -> Backend:
    text = read_text(file)
    try:
        return Backend.from_str(text)
    except Exception as error:
        # The library raises bare Exception for whatever it does not understand.
        raise ModelLoadError(f"{file} is no valid tokenizer: {' '.join(str(error).split())}.") from None


def _heed_add_bos(backend: Backend, wanted: Any, bos: str) -> None:
    """Settles the case where tokenizer_config.json says otherwise than tokenizer.json."""
    if not isinstance(wanted, bool) or backend.token_to_id(bos) is None:
        return
    begins = backend.encode("", add_special_tokens=True).ids[:1] == [backend.token_to_id(bos)]
    if wanted and not begins:
        add_bos(backend, bos)
    if begins and not wanted:
        backend.post_processor = TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])


def _token_text(setting: Any) -> str:
    """A special token is given by its text, or as an object that has it."""
    if isinstance(setting, dict):
        setting = setting.get("content")
    return setting if isinstance(setting, str) else ""


def _template_source(path: Path, settings: Mapping[str, Any]) -> str | None:
    """chat_template.jinja comes first; tokenizer_config.json may have one template, or several by name."""
    file = path / "chat_template.jinja"
    if file.exists():
        return read_text(file)
    source = settings.get("chat_template")
    if isinstance(source, list):
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    return source if isinstance(source, str) else None
