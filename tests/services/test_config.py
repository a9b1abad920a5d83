"""Where settings come from, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvmanager.types import EvictionKind, HashAlgorithm, IndexKind
from model_runner.prompt_lookup import SHORTEST
from services.cache_options import CacheOptions
from services.config import (
    ClientSettings,
    KvManagerSettings,
    ModelRunnerSettings,
    OctavoSettings,
    UpSettings,
    default_kv_address,
    load_settings,
)
from services.config_values import parse_bytes
from services.errors import StartupError

ALL = (KvManagerSettings, ModelRunnerSettings, UpSettings, ClientSettings)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting of the developer's shell."""
    for settings_class in ALL:
        for name in settings_class.model_fields:
            monkeypatch.delenv(f"OCTAVO_{name.upper()}", raising=False)


def refusal(settings_class: type[OctavoSettings], **given: Any) -> str:
    with pytest.raises(StartupError) as caught:
        load_settings(settings_class, given)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?."))
    return sentence


def test_the_shortest_ngram_is_the_one_that_can_be_looked_up() -> None:
    assert load_settings(ModelRunnerSettings, {"speculative_ngram": SHORTEST}).speculative_ngram == SHORTEST
    assert "speculative" in refusal(ModelRunnerSettings, speculative_ngram=SHORTEST - 1)


def test_the_command_line_beats_the_environment_beats_the_file_beats_the_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "octavo.yaml"
    assert load_settings(ModelRunnerSettings).max_sequences == 64
    path.write_text("max_sequences: 3\n")
    assert load_settings(ModelRunnerSettings, {"config": str(path)}).max_sequences == 3
    monkeypatch.setenv("OCTAVO_CONFIG", str(path))
    assert load_settings(ModelRunnerSettings).max_sequences == 3
    monkeypatch.setenv("OCTAVO_MAX_SEQUENCES", "4")
    assert load_settings(ModelRunnerSettings).max_sequences == 4
    assert load_settings(ModelRunnerSettings, {"max_sequences": "5"}).max_sequences == 5
    monkeypatch.setenv("OCTAVO_MAX_SEQUENCES", "")
    assert load_settings(ModelRunnerSettings).max_sequences == 3


def test_the_config_option_beats_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("a", 1), ("b", 2)):
        (tmp_path / f"{name}.yaml").write_text(f"max_sequences: {value}\n")
    monkeypatch.setenv("OCTAVO_CONFIG", str(tmp_path / "a.yaml"))
    assert load_settings(ModelRunnerSettings, {"config": str(tmp_path / "b.yaml")}).max_sequences == 2


def test_one_file_serves_all_commands(tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("pool_id: p\nblock_size: 32\nkv_metrics_address: 127.0.0.1:1\nkv_cache_memory: 2MiB\n")
    given = {"config": str(path)}
    assert load_settings(KvManagerSettings, given).kv_metrics_address == "127.0.0.1:1"
    assert load_settings(ClientSettings, given).pool_id == "p"
    up = load_settings(UpSettings, given)
    assert (up.block_size, up.kv_cache_memory) == (32, 2 << 20)
    assert "kv_metrics_address" in up.model_fields_set
    assert "runner_metrics_address" not in up.model_fields_set


def test_an_unknown_key_is_refused_and_a_likely_one_named(tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("blok_size: 16\n")
    sentence = refusal(KvManagerSettings, config=str(path))
    assert str(path) in sentence
    assert "'blok_size' (did you mean 'block_size'?)." in sentence


@pytest.mark.parametrize(
    ("text", "match"), [("- a\n", "mapping"), ("a: [\n", "no valid YAML"), ("\x00", "no valid YAML")]
)
def test_a_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text(text)
    assert match in refusal(KvManagerSettings, config=str(path))


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("# nothing\n")
    assert load_settings(ModelRunnerSettings, {"config": str(path)}).block_size == 16


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refusal(KvManagerSettings, config=str(tmp_path / "no.yaml"))


@pytest.mark.parametrize("value", ["0", "-1", "3", "2147483648", "4", "512", "16.5", "x"])
def test_block_sizes_that_no_kernel_takes(value: str) -> None:
    sentence = refusal(ModelRunnerSettings, block_size=value)
    assert value in sentence
    assert "--block-size (or OCTAVO_BLOCK_SIZE)" in sentence


def test_the_sentence_says_what_is_allowed() -> None:
    assert "8, 16, 32, 64, 128, 256" in refusal(ModelRunnerSettings, block_size="3")
    assert "2 to 16777216" in refusal(ModelRunnerSettings, num_blocks="1")


@pytest.mark.parametrize("value", ["0", "1", "-5", "16777217"])
def test_pools_of_impossible_size(value: str) -> None:
    assert value in refusal(ModelRunnerSettings, num_blocks=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kv_address", "nowhere"),
        ("runner_address", "unix:"),
        ("kv_metrics_address", "unix:/x"),
        ("log_level", "loud"),
        ("log_format", "xml"),
        ("weights_dtype", "int3"),
        ("activations_dtype", "int4"),
        ("kv_cache_memory", "much"),
        ("kv_cache_memory", "0"),
        ("max_batched_tokens", "0"),
        ("max_queued_requests", "-1"),
        ("grace_seconds", "nan"),
        ("grace_seconds", "-1"),
        ("pool_id", ""),
    ],
)
def test_other_values_that_cannot_be(name: str, value: str) -> None:
    assert f"--{name.replace('_', '-')}" in refusal(UpSettings, **{name: value})


def test_how_the_pool_is_kept_has_names_and_defaults() -> None:
    assert load_settings(ModelRunnerSettings).cache_options() == CacheOptions()
    given = {"prefix_index": "radix", "block_hash": "xxh3", "eviction_policy": "lru"}
    asked = CacheOptions(HashAlgorithm.XXH3, IndexKind.RADIX, EvictionKind.LRU)
    assert load_settings(ModelRunnerSettings, given).cache_options() == asked
    assert load_settings(ModelRunnerSettings, {"prefix_index": "none"}).cache_options().index is IndexKind.NONE


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("prefix_index", "tree", "'hash', 'radix' or 'none'"),
        ("block_hash", "md5", "'sha256' or 'xxh3'"),
        ("eviction_policy", "fifo", "'adaptive' or 'lru'"),
    ],
)
def test_how_a_pool_cannot_be_kept(name: str, value: str, allowed: str) -> None:
    sentence = refusal(UpSettings, **{name: value})
    assert f"--{name.replace('_', '-')} (or OCTAVO_{name.upper()}): '{value}' is refused" in sentence
    assert allowed in sentence


def test_how_the_pool_is_kept_may_stand_in_the_file_and_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "octavo.yaml"
    path.write_text("prefix_index: none\nblock_hash: xxh3\neviction_policy: lru\n")
    monkeypatch.setenv("OCTAVO_PREFIX_INDEX", "radix")
    up = load_settings(UpSettings, {"config": str(path)})
    assert (up.prefix_index, up.block_hash, up.eviction_policy) == ("radix", "xxh3", "lru")


def test_bytes_have_units() -> None:
    assert [parse_bytes(each) for each in (5, "5", "1KiB", "1.5 GiB", "2GB", "1tb")] == [
        5,
        5,
        1024,
        3 << 29,
        2 * 10**9,
        10**12,
    ]


def test_the_socket_lies_in_the_runtime_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/1")
    assert load_settings(ClientSettings).kv_address == "unix:/run/user/1/octavo/kv.sock"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert default_kv_address().startswith("unix:/")
    assert default_kv_address().endswith("/octavo/kv.sock")


def test_tls_needs_a_pair() -> None:
    assert load_settings(KvManagerSettings).server_tls() is None
    with pytest.raises(StartupError, match="both --tls-cert and --tls-key"):
        load_settings(KvManagerSettings, {"tls_cert": "c.pem"}).server_tls()
    tls = load_settings(KvManagerSettings, {"tls_cert": "c.pem", "tls_key": "k.pem"}).server_tls()
    assert tls is not None
    assert tls.client_ca is None


@pytest.mark.parametrize("settings_class", ALL)
def test_every_setting_is_described(settings_class: type[OctavoSettings]) -> None:
    for name, field in settings_class.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name
