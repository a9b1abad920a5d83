"""The commands that call a model runner: `generate` streams an answer, `requests` lists what is live."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from octavo.runner.v1 import model_runner_pb2 as pb

from model_runner.request import Chunk
from services.cli_answer import Answer, chunk_json
from services.cli_common import SALT_VARIABLES, parse_ids, print_json
from services.cli_files import read_schema, read_text, read_tools
from services.client import Client, OctavoError
from services.client_request import generate_request
from services.config import ClientSettings
from services.errors import StartupError
from services.options import with_settings

DEFAULT_MAX_TOKENS = 256
CALL_SECONDS = 10.0

_FIELDS = ("runner_address", "auth_token_file", "tls_ca", "tls_cert", "tls_key")


class EarlyStop(StrEnum):
    """When a beam search ends, where it is not to guess."""

    FIRST = "first"
    NEVER = "never"


def add_generate_command(app: typer.Typer) -> None:
    """Mounts the command."""
    app.command("generate", short_help="Stream an answer.")(generate)
    app.command("requests", short_help="List the live requests.")(requests)


@with_settings(ClientSettings, only=_FIELDS, names={"runner_address": ("--address",)})
def generate(
    settings: ClientSettings,
    text: Annotated[str | None, typer.Argument(help="The prompt, or with --chat the user's message.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send the text as a chat message.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message of the chat.")] = None,
    token_ids: Annotated[
        str | None, typer.Option("--token-ids", help="The prompt as token ids, separated by commas.", metavar="1,2,3")
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Tokens to generate at most, for each choice.")
    ] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float, typer.Option("--temperature", help="Divides the logits; 0 takes the most likely token each time.")
    ] = 0.0,
    top_p: Annotated[
        float,
        typer.Option("--top-p", help="Draws among the most likely tokens that make up this share of probability."),
    ] = 1.0,
    top_k: Annotated[int, typer.Option("--top-k", help="Draws among this many most likely tokens; 0: all.")] = 0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Draws among tokens at least this share as likely as the best; 0: all.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Makes the draws repeatable.", show_default="a new one each time")
    ] = None,
    repetition_penalty: Annotated[
        float,
        typer.Option("--repetition-penalty", help="Above 1: tokens that the text has already come less likely again."),
    ] = 1.0,
    presence_penalty: Annotated[
        float,
        typer.Option("--presence-penalty", help="Taken from the logit of each token that the answer has; -2 to 2."),
    ] = 0.0,
    frequency_penalty: Annotated[
        float,
        typer.Option("--frequency-penalty", help="The same for each time that the answer has the token; -2 to 2."),
    ] = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            "--logit-bias", metavar="ID=BIAS", help="Add to a token's logit, -100 to 100; may be given several times."
        ),
    ] = None,
    allowed_token_ids: Annotated[
        str | None, typer.Option("--allowed-token-ids", help="Draw no other tokens than these.", metavar="1,2,3")
    ] = None,
    bad_word: Annotated[
        list[str] | None,
        typer.Option("--bad-word", help="A word that the answer must not have; may be given several times."),
    ] = None,
    min_tokens: Annotated[
        int, typer.Option("--min-tokens", help="Tokens to generate before an end token or --stop may end the answer.")
    ] = 0,
    n: Annotated[int, typer.Option("--n", help="Independent answers; the prompt is computed once.")] = 1,
    best_of: Annotated[
        int, typer.Option("--best-of", help="Draw so many answers, and show the --n likeliest, best first; 0: all.")
    ] = 0,
    beam_width: Annotated[
        int | None,
        typer.Option(
            "--beam-width",
            help="Search for the likeliest answer instead of drawing one, with so many kept at each token; shows the "
            "--n best.",
            show_default="no search",
        ),
    ] = None,
    length_penalty: Annotated[
        float | None,
        typer.Option(
            "--length-penalty",
            help="Of a beam search: an answer's score is its log-probability over its length to this power.",
            show_default="1",
        ),
    ] = None,
    early_stopping: Annotated[
        EarlyStop | None,
        typer.Option(
            "--early-stopping",
            help="End a beam search as soon as as many answers have finished as are kept, or never before no other "
            "could be better.",
            show_default="when none looks better",
        ),
    ] = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="End before this string; may be given several times.")
    ] = None,
    include_stop_string: Annotated[
        bool, typer.Option("--include-stop-string", help="Keep the string that ended the answer in its text.")
    ] = False,
    json_schema: Annotated[
        str | None,
        typer.Option("--json-schema", metavar="FILE_OR_JSON", help="Answer with JSON that is valid under this schema."),
    ] = None,
    json_object: Annotated[bool, typer.Option("--json-object", help="Answer with a JSON object.")] = False,
    regex: Annotated[
        str | None, typer.Option("--regex", help="Answer with a text that this expression matches as a whole.")
    ] = None,
    grammar: Annotated[
        Path | None,
        typer.Option("--grammar", metavar="FILE", help="Answer with a text of this grammar, in llguidance's Lark."),
    ] = None,
    choice: Annotated[
        list[str] | None, typer.Option("--choice", help="Answer with this string or another --choice.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option("--tools", metavar="FILE", help="Tools that the model may call in a chat: a JSON list of them."),
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's end tokens.")] = False,
    logprobs: Annotated[
        int | None,
        typer.Option("--logprobs", help="With --json: log-probabilities of each token and of so many candidates."),
    ] = None,
    prompt_logprobs: Annotated[
        int | None,
        typer.Option("--prompt-logprobs", help="The same for each token of the prompt, which is computed whole."),
    ] = None,
    request_id: Annotated[
        str, typer.Option("--request-id", help="Name of the request; the server makes one up if it has none.")
    ] = "",
    cache_salt: Annotated[
        str,
        typer.Option(
            "--cache-salt",
            envvar=SALT_VARIABLES,
            help="Share cached prefixes only with prompts of the same salt. Other users of the machine see a command "
            "line: prefer OCTAVO_SALT.",
        ),
    ] = "",
    skip_cache_read: Annotated[
        bool, typer.Option("--skip-cache-read", help="Compute the whole prompt, whatever is cached of it.")
    ] = False,
    skip_cache_write: Annotated[
        bool, typer.Option("--skip-cache-write", help="Leave nothing of prompt and answer in the cache.")
    ] = False,
    tenant: Annotated[
        str, typer.Option("--tenant", help="Whom the request is counted for in metrics and in `octavo requests`.")
    ] = "",
    priority: Annotated[
        int,
        typer.Option("--priority", help="Keep what is cached before that of lower priorities; 0 to 100."),
    ] = 0,
    pin_seconds: Annotated[
        float,
        typer.Option(
            "--pin-seconds",
            metavar="SECONDS",
            help="Keep the prompt's full blocks in the cache for so long after the end, whatever happens; to a week.",
        ),
    ] = 0.0,
    queue_priority: Annotated[
        int,
        typer.Option(
            "--queue-priority",
            help="Run before requests of higher numbers; -100 to 100. For a server with --scheduling-policy priority.",
        ),
    ] = 0,
    json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object a line; the last has the whole answer.")
    ] = False,
) -> None:
    """Streams an answer from a model runner."""
    request = _request_of(
        {"text": text, "token_ids": token_ids, "chat": chat, "system": system},
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        seed=seed,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        logit_bias=_parse_biases(logit_bias or ()),
        allowed_token_ids=parse_ids(allowed_token_ids, "--allowed-token-ids") if allowed_token_ids else None,
        bad_words=bad_word or (),
        min_tokens=min_tokens,
        n=n,
        best_of=best_of,
        beam_width=beam_width,
        length_penalty=length_penalty,
        early_stopping=early_stopping.value if early_stopping else None,
        stop=stop or (),
        include_stop_string=include_stop_string,
        json_schema=read_schema(json_schema),
        json_object=json_object,
        regex=regex,
        grammar=read_text(grammar),
        choices=choice or None,
        tools=read_tools(tools),
        ignore_eos=ignore_eos,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        request_id=request_id,
        cache_salt=cache_salt,
        skip_cache_read=skip_cache_read,
        skip_cache_write=skip_cache_write,
        tenant=tenant,
        priority=priority,
        pin_seconds=pin_seconds,
        queue_priority=queue_priority,
    )
    with Client(settings.runner_address, tls=settings.tls(), token=settings.token()) as client:
        answer = Answer(max(1, n), is_streamed=beam_width is None and best_of <= n)
        try:
            for chunk in client.stream(request):
                answer.add(chunk)
                _show(chunk, answer, json)
        except OctavoError as error:
            _end_line(answer, json)
            raise StartupError(str(error)) from None
        except KeyboardInterrupt:
            _end_line(answer, json)
            raise typer.Exit(130) from None
    if json:
        print_json(answer.as_json())
    else:
        _finish(answer)


@with_settings(ClientSettings, only=_FIELDS, names={"runner_address": ("--address",)})
def requests(
    settings: ClientSettings,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, for programs.")] = False,
) -> None:
    """Lists the requests that wait or run, with their sequences at the KV manager."""
    with Client(settings.runner_address, tls=settings.tls(), token=settings.token(), timeout=CALL_SECONDS) as client:
        try:
            live = client.requests()
        except OctavoError as error:
            raise StartupError(str(error)) from None
    for each in live:
        state = pb.RequestState.Name(each.state).removeprefix("REQUEST_STATE_").lower()
        facts = {
            "request_id": each.request_id,
            "state": state,
            "prompt_tokens": each.prompt_tokens,
            "output_tokens": each.output_tokens,
            "age_seconds": round(each.age.ToTimedelta().total_seconds(), 3),
            "sequence_ids": list(each.sequence_ids),
            "tenant": each.tenant,
        }
        if json:
            print_json(facts)
        else:
            ids = " ".join(each.sequence_ids) or "-"
            whose = f" of {each.tenant}" if each.tenant else ""
            typer.echo(
                f"{each.request_id}{whose}  {state}, {each.prompt_tokens} prompt tokens, "
                f"{each.output_tokens} generated, {facts['age_seconds']:.1f} s old, sequences: {ids}"
            )
    if not live and not json:
        typer.echo("No request is live.")


def _request_of(prompt: dict[str, Any], **options: Any) -> Any:
    """The message of the prompt options. Raises StartupError with a sentence for what cannot be sent."""
    text, ids, chat = prompt["text"], prompt["token_ids"], prompt["chat"] or prompt["system"] is not None
    if (text is None) == (ids is None):
        raise StartupError("Give either a text or --token-ids.")
    if chat and text is None:
        raise StartupError("--chat and --system need a text.")
    if options["tools"] and not chat:
        raise StartupError("--tools needs --chat.")
    try:
        if chat:
            system = [] if prompt["system"] is None else [{"role": "system", "content": prompt["system"]}]
            return generate_request(chat=[*system, {"role": "user", "content": text}], **options)
        return generate_request(text if ids is None else parse_ids(ids), **options)
    except (ValueError, OverflowError) as error:
        raise StartupError(f"The request cannot be sent: {error}.") from None


def _parse_biases(texts: Sequence[str]) -> dict[int, float]:
    """Biases by token id, from ID=BIAS each."""
    biases = {}
    for text in texts:
        token_id, _, bias = text.partition("=")
        try:
            biases[int(token_id)] = float(bias)
        except ValueError:
            raise StartupError(f"--logit-bias {text!r} is not ID=BIAS, as in 504=-1.5.") from None
    return biases


def _show(chunk: Chunk, answer: Answer, json: bool) -> None:
    """One chunk as it comes. Several choices would mix on a terminal, so there they are shown when they are whole."""
    if json:
        print_json(chunk_json(chunk))
    elif answer.num_choices == 1:
        print(chunk.text, end="", flush=True)


def _end_line(answer: Answer, json: bool) -> None:
    """What comes next must not be glued to a half answer."""
    if answer.choices[0].text and answer.num_choices == 1 and not json:
        typer.echo()


def _finish(answer: Answer) -> None:
    if answer.num_choices == 1:
        typer.echo()
    else:
        for index, choice in sorted(answer.choices.items()):
            score = "" if choice.score is None else f" {choice.score:.3f}"
            typer.echo(f"[{index}{score}] {choice.text}")
    typer.echo(answer.summary(), err=True)
