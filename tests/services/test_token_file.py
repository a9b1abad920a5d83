"""The file of tokens: what it gives, when it is read again, and what is refused, without a word of its secrets."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.callers import Caller
from services.errors import StartupError
from services.token_file import TokenFile

ACME, OTHER = "acme-token-0123456789", "other-token-0123456789"
SECRET = "a-salt-secret-of-some-length"


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def file_of(directory: Path, text: str) -> Path:
    path = directory / "tokens.yaml"
    path.write_text(text)
    return path


def refusal(directory: Path, text: str) -> str:
    with pytest.raises(StartupError) as caught:
        TokenFile(file_of(directory, text))
    sentence = str(caught.value)
    assert sentence.startswith(f"--auth-tokens: {directory}/tokens.yaml")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    for secret in (ACME, OTHER, SECRET, "pepper"):
        assert secret not in sentence
    return sentence


def test_a_token_is_a_tenant_with_a_salt_from_the_secret(tmp_path: Path) -> None:
    digest = hashlib.sha256(OTHER.encode()).hexdigest()
    text = f"""
    salt_secret: {SECRET}
    tokens:
      - {{tenant: acme, token: {ACME}}}
      - {{tenant: other, token_sha256: {digest}}}
      - {{tenant: third, token: {ACME}-3, salt: pepper}}
    """
    tokens = TokenFile(file_of(tmp_path, text))
    salts = {name: hmac.new(SECRET.encode(), name.encode(), hashlib.sha256).hexdigest() for name in ("acme", "other")}
    assert tokens.caller(ACME) == Caller("acme", salts["acme"])
    assert tokens.caller(OTHER) == Caller("other", salts["other"])
    assert tokens.caller(f"{ACME}-3") == Caller("third", "pepper")
    assert [tokens.caller(each) for each in ("", ACME[:-1], f"{ACME} ", digest)] == [None] * 4


def test_without_a_secret_the_salt_is_of_the_process(tmp_path: Path) -> None:
    path = file_of(tmp_path, f"- {{tenant: acme, token: {ACME}}}\n- {{tenant: acme, token: {OTHER}}}\n")
    first, second = TokenFile(path), TokenFile(path)
    one, two = first.caller(ACME), second.caller(ACME)
    assert one is not None
    assert two is not None
    assert one.cache_salt != two.cache_salt
    assert len(one.cache_salt) == 64
    # Two tokens of a tenant: while one takes the other's place, the cache stays.
    assert first.caller(OTHER) == one


def test_a_caller_does_not_show_its_salt() -> None:
    assert "pepper" not in repr(Caller("acme", "pepper"))


def test_only_digests_stay_in_memory(tmp_path: Path) -> None:
    tokens = TokenFile(file_of(tmp_path, f"- {{tenant: acme, token: {ACME}}}\n"))
    assert list(tokens._callers) == [hashlib.sha256(ACME.encode()).digest()]
    assert ACME not in repr(vars(tokens))


def test_a_changed_file_is_read_again_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    path = file_of(tmp_path, f"- {{tenant: acme, token: {ACME}}}\n")
    tokens = TokenFile(path, clock)
    before = tokens.caller(ACME)
    path.write_text(f"- {{tenant: acme, token: {OTHER}}}\n")
    clock.now = 0.9
    assert tokens.caller(ACME) == before
    assert tokens.caller(OTHER) is None
    clock.now = 1.0
    assert tokens.caller(ACME) is None
    # The salt does not go with the token.
    assert tokens.caller(OTHER) == before


def test_a_swapped_link_is_a_change_as_with_a_mounted_secret(tmp_path: Path) -> None:
    clock = Clock()
    for name, token in (("one", ACME), ("two", OTHER)):
        (tmp_path / name).mkdir()
        file_of(tmp_path / name, f"- {{tenant: acme, token: {token}}}\n")
        os.utime(tmp_path / name / "tokens.yaml", (1, 1))
    (tmp_path / "data").symlink_to("one")
    (tmp_path / "tokens.yaml").symlink_to("data/tokens.yaml")
    tokens = TokenFile(tmp_path / "tokens.yaml", clock)
    (tmp_path / "next").symlink_to("two")
    os.replace(tmp_path / "next", tmp_path / "data")
    clock.now = 5.0
    assert tokens.caller(ACME) is None
    assert tokens.caller(OTHER) is not None


@pytest.mark.parametrize("broken", [f"- {{tenant: acme, token: {OTHER}", "[]\n", None])
def test_a_broken_new_file_leaves_the_old_tokens(tmp_path: Path, broken: str | None) -> None:
    clock = Clock()
    path = file_of(tmp_path, f"- {{tenant: acme, token: {ACME}}}\n")
    tokens = TokenFile(path, clock)
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
    with capture_logs() as logs:
        for clock.now in (1.0, 2.0, 3.0):
            assert tokens.caller(ACME) is not None
    assert [(each["log_level"], each["event"]) for each in logs] == [("warning", "the tokens stay as they were")]
    assert OTHER not in str(logs)
    path.write_text(f"- {{tenant: acme, token: {OTHER}}}\n")
    clock.now = 4.0
    assert tokens.caller(ACME) is None
    assert tokens.caller(OTHER) is not None


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "tokens"),
        ("[]", "at tokens: tuple should have at least 1 item"),
        (f"- {{tenant: acme, token: {ACME}, colour: red}}", "at tokens.0.colour: extra inputs are not permitted"),
        (f"- {{tenant: acme/x, token: {ACME}}}", "at tokens.0.tenant"),
        (f"- {{token: {ACME}}}", "at tokens.0.tenant: field required"),
        ("- {tenant: acme}", "at tokens.0: give either token or token_sha256"),
        (f"- {{tenant: acme, token: {ACME}, token_sha256: {'0a' * 32}}}", "give either token or token_sha256"),
        ("- {tenant: acme, token: short}", "at tokens.0.token: string should have at least 16 characters"),
        ("- {tenant: acme, token: 12345678901234567890}", "at tokens.0.token: input should be a valid string"),
        (f"- {{tenant: acme, token: '{ACME} x'}}", "at tokens.0.token: string should match"),
        ("- {tenant: acme, token_sha256: 12ab}", "at tokens.0.token_sha256"),
        (f"- {{tenant: acme, token: {ACME}, salt: {'s' * 129}}}", "the salt has more than 128 bytes"),
        (
            f"- {{tenant: a, token: {ACME}, salt: pepper}}\n- {{tenant: a, token: {OTHER}, salt: mint}}",
            "gives tenant 'a' two salts",
        ),
        (f"- {{tenant: a, token: {ACME}}}\n- {{tenant: b, token: {ACME}}}", "gives one token to 'a' and 'b'"),
        (f"salt_secret: short\ntokens: [{{tenant: a, token: {ACME}}}]", "at salt_secret"),
        (f"- {{tenant: acme,\n  token: {ACME}: {OTHER}", "is no valid YAML (line "),
    ],
)
def test_what_is_refused_is_one_sentence_without_secrets(tmp_path: Path, text: str, what: str) -> None:
    assert what in refusal(tmp_path, text)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"cannot read .*no\.yaml: No such file or directory\."):
        TokenFile(tmp_path / "no.yaml")
