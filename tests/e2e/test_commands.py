"""The octavo command as people and programs use it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import (
    PATIENCE_SECONDS,
    SERVING,
    Process,
    Stack,
    free_port,
    golden_items,
    health_of,
    octavo,
    run_octavo,
    running_stack,
    wait_until,
)
from tests.services.kv_support import clean_environment

CLEAR = next(item for item in golden_items() if min(item["gaps"]) > 0.4)
CHAT = golden_items()[11]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("commands")) as stack:
        yield stack


def generate(stack: Stack, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_octavo("generate", *arguments, "--address", stack.runner_address)


def json_lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in output.splitlines()]


class TestGenerate:
    def test_a_beam_search_finds_what_was_recorded(self, stack: Stack) -> None:
        recorded = json.loads((Path(__file__).parent.parent / "data" / "golden_beams.json").read_text())
        run = next(each for each in recorded["searches"] if (each["width"], each["early_stopping"]) == (4, True))
        ids = ",".join(map(str, recorded["prompts"][run["prompt"]]))
        options = ["--beam-width", "4", "--length-penalty", str(run["length_penalty"]), "--early-stopping", "first"]
        limit = str(run["max_new_tokens"])
        done = generate(stack, "--token-ids", ids, *options, "--n", "3", "--max-tokens", limit, "--json")
        *chunks, last = json_lines(done.stdout)
        assert [chunk["choice_index"] for chunk in chunks] == [0, 1, 2]
        assert [choice["token_ids"] for choice in last["choices"]] == run["answers"][:3]
        assert [choice["score"] for choice in last["choices"]] == pytest.approx(run["scores"][:3], abs=2e-2)

    def test_best_of_shows_the_likeliest(self, stack: Stack) -> None:
        options = ["--temperature", "0.8", "--seed", "3", "--max-tokens", "8", "--ignore-eos", "--logprobs", "0"]
        every = json_lines(generate(stack, "Once upon", *options, "--n", "4", "--json").stdout)
        means = [
            sum(chunk["logprobs"][0]["logprob"] for chunk in every[:-1] if chunk["choice_index"] == choice) / 8
            for choice in range(4)
        ]
        done = generate(stack, "Once upon", *options, "--best-of", "4", "--json")
        chunk, last = json_lines(done.stdout)
        assert last["token_ids"] == every[-1]["choices"][means.index(max(means))]["token_ids"]
        assert chunk["score"] == pytest.approx(max(means))
        assert last["usage"]["output_tokens"] == 32

    def test_text_streams_and_ends_with_a_line_of_figures(self, stack: Stack) -> None:
        done = generate(stack, CLEAR["prompt"], "--max-tokens", "48", "--ignore-eos")
        assert done.returncode == 0
        assert done.stdout == CLEAR["text"] + "\n"
        prompt = len(CLEAR["prompt_token_ids"])
        assert re.fullmatch(
            rf"{prompt} prompt tokens, \d+ cached, TTFT \d+ ms, 48 tokens at [\d.]+ tokens/s\n", done.stderr
        )

    def test_json_lines_and_the_whole_answer_last(self, stack: Stack) -> None:
        ids = ",".join(map(str, CLEAR["prompt_token_ids"]))
        lines = json_lines(generate(stack, "--token-ids", ids, "--max-tokens", "48", "--ignore-eos", "--json").stdout)
        *chunks, last = lines
        assert last["token_ids"] == CLEAR["output_ids"]
        assert last["text"] == CLEAR["text"] == "".join(chunk["text"] for chunk in chunks)
        assert last["finish_reason"] == "length"
        assert last["usage"]["prompt_tokens"] == len(CLEAR["prompt_token_ids"])
        assert last["usage"]["output_tokens"] == 48
        assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == CLEAR["output_ids"]

    def test_chat_goes_through_the_models_template(self, stack: Stack) -> None:
        message = CHAT["messages"][-1]["content"]
        last = json_lines(generate(stack, message, "--chat", "--max-tokens", "48", "--ignore-eos", "--json").stdout)[-1]
        assert last["usage"]["prompt_tokens"] == len(CHAT["prompt_token_ids"])
        assert last["token_ids"] == CHAT["output_ids"]

    def test_a_seed_repeats_and_choices_differ(self, stack: Stack) -> None:
        options = ("--temperature", "0.9", "--top-p", "0.95", "--seed", "3", "--n", "3", "--max-tokens", "12", "--json")
        first, second = (json_lines(generate(stack, "Once upon", *options).stdout)[-1] for _ in range(2))
        texts = [choice["text"] for choice in first["choices"]]
        assert texts == [choice["text"] for choice in second["choices"]]
        assert len(set(texts)) == 3
        assert first["text"] == texts[0]

    def test_stop_and_logprobs(self, stack: Stack) -> None:
        stop = CLEAR["text"][10:13]
        options = ("--stop", stop, "--max-tokens", "48", "--ignore-eos", "--logprobs", "2", "--json")
        *chunks, last = json_lines(generate(stack, CLEAR["prompt"], *options).stdout)
        assert last["text"] == CLEAR["text"][: CLEAR["text"].index(stop)]
        assert last["finish_reason"] == "stop"
        for chunk, recorded in zip(chunks, CLEAR["logprobs"], strict=False):
            assert chunk["logprobs"][0]["logprob"] == pytest.approx(recorded, abs=1e-3)

    def test_a_stop_string_that_is_part_of_the_text(self, stack: Stack) -> None:
        stop = CLEAR["text"][10:13]
        options = ("--stop", stop, "--include-stop-string", "--max-tokens", "48", "--ignore-eos", "--json")
        last = json_lines(generate(stack, CLEAR["prompt"], *options).stdout)[-1]
        assert last["text"] == CLEAR["text"][: CLEAR["text"].index(stop) + 3]
        assert last["finish_reason"] == "stop"

    def test_answers_of_a_given_form(self, stack: Stack, tmp_path: Path) -> None:
        schema = {"type": "object", "properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"]}
        schema["additionalProperties"] = False
        (tmp_path / "schema.json").write_text(json.dumps(schema))
        (tmp_path / "sums.lark").write_text('start: DIGIT ("+" DIGIT){2}\nDIGIT: /[0-9]/\n')
        options = ("--temperature", "1.5", "--seed", "5", "--n", "2", "--json")

        def texts(*form: str) -> list[str]:
            last = json_lines(generate(stack, "--chat", "How many legs has a cat?", *form, *options).stdout)[-1]
            assert {choice["finish_reason"] for choice in last["choices"]} == {"stop"}
            return [choice["text"] for choice in last["choices"]]

        for form in (str(tmp_path / "schema.json"), json.dumps(schema)):
            assert all(json.loads(text) in ({"legs": 2}, {"legs": 4}) for text in texts("--json-schema", form))
        assert all(re.fullmatch(r"\d\+\d\+\d", text) for text in texts("--grammar", str(tmp_path / "sums.lark")))
        assert all(re.fullmatch(r"[A-Z][a-z]{3}", text) for text in texts("--regex", "[A-Z][a-z]{3}"))
        assert set(texts("--choice", "two", "--choice", "four")) <= {"two", "four"}

    def test_rules_and_log_probabilities_of_the_prompt(self, stack: Stack) -> None:
        """Each option does what it says, and recorded outputs tell their own probabilities."""
        plain = ("--max-tokens", "12", "--ignore-eos", "--json")

        def answer(*options: str) -> dict[str, Any]:
            return json_lines(generate(stack, CLEAR["prompt"], *plain, *options).stdout)[-1]

        recorded = CLEAR["output_ids"][:12]
        assert answer()["token_ids"] == recorded
        assert "56" in CLEAR["text"][:12]
        assert "56" not in answer("--bad-word", "56")["text"]
        assert answer("--logit-bias", f"{recorded[0]}=-100")["token_ids"][0] != recorded[0]
        assert set(answer("--allowed-token-ids", "504,253", "--min-tokens", "3")["token_ids"]) <= {504, 253}
        varied = answer("--presence-penalty", "2", "--frequency-penalty", "2", "--repetition-penalty", "1.5")
        assert len(set(varied["token_ids"])) > len(set(recorded))
        ids = ",".join(map(str, [*CLEAR["prompt_token_ids"], *CLEAR["output_ids"]]))
        first = json_lines(generate(stack, "--token-ids", ids, *plain, "--prompt-logprobs", "1").stdout)[0]
        known = [each["logprob"] for each in first["prompt_logprobs"]][len(CLEAR["prompt_token_ids"]) - 1 :]
        assert known == pytest.approx(CLEAR["logprobs"], abs=1e-3)

    def test_options_come_from_the_environment_too(self, stack: Stack) -> None:
        done = run_octavo("generate", "a", "--json", OCTAVO_RUNNER_ADDRESS=stack.runner_address, OCTAVO_MAX_TOKENS="3")
        assert len(json_lines(done.stdout)[-1]["token_ids"]) == 3

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            ((), "Give either a text or --token-ids."),
            (("a", "--token-ids", "1"), "Give either a text or --token-ids."),
            (("--token-ids", "1,x"), "'1,x' must be whole numbers"),
            (("--token-ids", "-1"), "cannot be sent"),
            (("a", "--allowed-token-ids", "x"), "--allowed-token-ids 'x' must be whole numbers"),
            (("a", "--logit-bias", "5:1"), "--logit-bias '5:1' is not ID=BIAS"),
            (("a", "--bad-word", ""), "Bad word 0"),
            (("a", "--max-tokens", "0"), "INVALID_ARGUMENT"),
            (("a", "--top-p", "0"), "top_p is 0.0"),
            (("a", "--n", "2000000000"), "num_choices is 2000000000"),
            (("a", "--temperature", "nan"), "temperature is nan"),
            (("",), "The prompt is empty"),
            (("a", "--json-schema", "missing.json"), "missing.json cannot be read: No such file or directory."),
            (("a", "--json-schema", "{"), "The JSON schema cannot be used: "),
            (("a", "--regex", "a", "--choice", "b"), "regex and choices cannot go together"),
            (("a", "--chat", "--tools", __file__), "is no JSON"),
        ],
    )
    def test_what_cannot_be_done_is_one_line_and_exit_code_2(
        self, stack: Stack, arguments: tuple[str, ...], sentence: str
    ) -> None:
        done = generate(stack, *arguments)
        assert done.returncode == 2
        assert sentence in done.stderr
        assert len(done.stderr.splitlines()) == 1

    def test_nobody_there(self, tmp_path: Path) -> None:
        done = run_octavo("generate", "a", "--address", f"unix:{tmp_path}/none.sock", afresh=True)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "No model runner answers" in done.stderr


class TestBooks:
    def test_pool_sequence_and_check_while_a_request_runs(self, stack: Stack) -> None:
        books = ("--kv-address", stack.kv_address)
        with stack.client() as client:
            stream = client.generate([504] * 40, request_id="seen", ignore_eos=True, n=2, temperature=1.0, seed=1)
            for _ in range(4):
                next(stream)
            pool = json.loads(run_octavo("pool", *books, "--json").stdout)
            table = json.loads(run_octavo("sequence", "seen/0", *books, "--json").stdout)
            assert run_octavo("check", *books).returncode == 0
            shown = run_octavo("sequence", "seen/1", *books)
            live = json_lines(run_octavo("requests", "--address", stack.runner_address, "--json").stdout)
            stream.close()
        assert [(each["request_id"], each["state"]) for each in live] == [("seen", "running")]
        assert live[0]["sequence_ids"] == ["seen/0", "seen/1"]
        occupancy = pool["occupancy"]
        assert occupancy["held_blocks"] >= 4
        assert occupancy["shared_blocks"] >= 2
        assert occupancy["usable_blocks"] == sum(occupancy[f"{s}_blocks"] for s in ("free", "cached", "held"))
        first, second, *_ = table["blocks"]
        assert [first["reference_count"], second["reference_count"]] == [2, 2]
        assert len(first["block_hash"]) == 64
        assert table["sequence"]["num_tokens"] >= 41
        assert first["block_hash"][:16] in shown.stdout
        stack.assert_nothing_held()

    def test_a_prompt_that_is_kept_and_then_removed(self, stack: Stack) -> None:
        text = "The octavo is a book made of sheets that were folded three times into eight leaves. " * 3
        keep = ("--priority", "50", "--pin-seconds", "600", "--max-tokens", "1")
        books = ("--kv-address", stack.kv_address)
        with stack.client() as client:
            whole_blocks = len(client.tokenize(text)) // 16
        assert generate(stack, text, *keep, "--cache-salt", "mine").returncode == 0
        assert stack.pool().occupancy.pinned_blocks == whole_blocks
        prompt = ("remove-prefix", "--text", text, "--runner-address", stack.runner_address, *books)
        assert run_octavo(*prompt).stdout == "0 blocks forgotten.\n"
        done = run_octavo(*prompt, OCTAVO_SALT="mine")
        assert (done.returncode, done.stdout, done.stderr) == (0, f"{whole_blocks} blocks forgotten.\n", "")
        assert stack.pool().occupancy.pinned_blocks == 0

    def test_a_tenant_has_its_quota_and_no_more(self, stack: Stack) -> None:
        books = ("--kv-address", stack.kv_address)
        assert "of 2 blocks occupied" in run_octavo("quota", "tiny", "--max-blocks", "2", *books).stdout
        ids = ",".join(["504"] * 40)
        done = run_octavo("generate", "--token-ids", ids, "--address", stack.runner_address, OCTAVO_SALT="tiny")
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "the quota of its salt is 2 usable" in done.stderr
        shown = json.loads(run_octavo("quota", "--json", *books, OCTAVO_SALT="tiny").stdout)
        assert shown == {"quota_blocks": 2, "held_blocks": 0, "cached_blocks": 0}

    def test_events_tell_what_a_request_has_cached(self, stack: Stack) -> None:
        books = ("events", "--kv-address", stack.kv_address, "--json", "--no-follow")
        number = json_lines(run_octavo(*books).stdout)[-1]["number"]
        ids = ",".join(map(str, range(1000, 1040)))
        assert generate(stack, "--token-ids", ids, "--max-tokens", "1").returncode == 0
        stored = json_lines(run_octavo(*books, "--from", str(number + 1)).stdout)
        # 40 tokens: two full blocks.
        assert [line["kind"] for line in stored] == ["stored"] * len(stored)
        assert sum(len(line["block_hashes"]) for line in stored) == 2
        assert stored[0]["parent_hash"] == ""

    def test_an_unknown_sequence(self, stack: Stack) -> None:
        done = run_octavo("sequence", "nope", "--kv-address", stack.kv_address)
        assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
        assert "'nope'" in done.stderr


class TestUp:
    def test_serves_until_it_is_told_to_stop(self, tmp_path: Path) -> None:
        runner, books = f"127.0.0.1:{free_port()}", f"unix:{tmp_path}/kv.sock"
        arguments = ("--runner-address", runner, "--kv-address", books, "--block-size", "8", "--num-blocks", "64")
        up = Process(tmp_path, "up", *arguments, afresh=True)
        wait_until("the hint", lambda: "octavo generate" in up.log, up)
        assert health_of(runner) == health_of(books) == SERVING
        done = run_octavo("generate", CLEAR["prompt"], "--max-tokens", "48", "--ignore-eos", "--address", runner)
        assert done.stdout == CLEAR["text"] + "\n"
        pool = json.loads(run_octavo("pool", "--kv-address", books, "--json").stdout)
        assert (pool["spec"]["num_blocks"], pool["spec"]["block_size"]) == (64, 8)
        up.signal(signal.SIGINT)
        assert up.wait() == 0
        assert health_of(runner) is None
        assert health_of(books) is None
        assert not (tmp_path / "kv.sock").exists()
        # 2 x 3 KV heads x 64 x 4 bytes x 30 layers; x 8 tokens; x 64 blocks.
        for figure in (
            "= 46,080 B\n",
            "x 8 tokens = 360 KiB\n",
            "64 blocks = 22.5 MiB, of which 63 usable hold 504 tokens",
        ):
            assert figure in up.log
        assert "Loading weights" in up.log

    def test_the_demo_streams_and_ends(self, tmp_path: Path) -> None:
        runner, books = f"unix:{tmp_path}/runner.sock", f"unix:{tmp_path}/kv.sock"
        done = run_octavo("up", "--demo", "--once", "--runner-address", runner, "--kv-address", books, afresh=True)
        assert done.returncode == 0, done.stderr
        assert re.search(r"\n\d+ prompt tokens, 0 cached, TTFT \d+ ms, \d+ tokens at [\d.]+ tokens/s\n", done.stdout)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
    def test_one_service_that_ends_takes_the_other_along(self, tmp_path: Path, number: int) -> None:
        runner, books = f"unix:{tmp_path}/runner.sock", f"unix:{tmp_path}/kv.sock"
        # A KV manager that is told to stop waits so long for its runner.
        options = ("--num-blocks", "64", "--grace-seconds", "1")
        up = Process(tmp_path, "up", "--runner-address", runner, "--kv-address", books, *options, afresh=True)
        wait_until("the hint", lambda: "octavo generate" in up.log, up)
        children = _children(up.process.pid)
        assert len(children) == 2
        if number == signal.SIGKILL:
            # The command itself is killed: its children must not live on.
            up.kill()
        else:
            _terminate(children[0])
            assert up.wait() == 2
            assert "has ended with exit code 0; the others are stopped." in up.log
        wait_until("the end of both", lambda: health_of(runner) is None and health_of(books) is None)


def _children(pid: int) -> list[int]:
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    return [int(line) for line in found.stdout.split()]


def _terminate(pid: int) -> None:
    subprocess.run(["kill", "-TERM", str(pid)], check=True)


def _start(*arguments: str) -> tuple[int, str]:
    """Starts `up` where it must fail; its exit code and stderr without log lines."""
    done = run_octavo("up", *arguments)
    return done.returncode, done.stderr


class TestStartUpErrors:
    """One line, exit code 2, no traceback."""

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (("--num-blocks", "0"), "a pool of 0 blocks is not possible"),
            (("--num-blocks", "1"), "a pool of 1 blocks is not possible"),
            (("--block-size", "0"), "a block of 0 tokens is not possible"),
            (("--block-size", "-1"), "a block of -1 tokens is not possible"),
            (("--block-size", "3"), "a block of 3 tokens is not possible"),
            (("--block-size", str(2**31)), "a block of 2147483648 tokens is not possible"),
            (("--weights-dtype", "int3"), "'int3' is refused"),
            (("--runner-address", "nowhere"), "'nowhere' is no address"),
            (("--config", "none.yaml"), "none.yaml"),
            (("--runner-address", "127.0.0.1:0"), "port 0"),
            (("--tls-cert", "c.pem", "--tls-key", "k.pem"), "--tls-cert needs --tls-ca"),
            (("--max-queued-requests", "0"), "greater than or equal to 1"),
            (("--model", "nowhere"), "--model nowhere: there is no such file or directory"),
        ],
    )
    def test_settings(self, arguments: tuple[str, ...], sentence: str) -> None:
        code, stderr = _start(*arguments)
        assert code == 2
        assert sentence in stderr
        assert len(stderr.splitlines()) == 1

    def runner_error(self, tmp_path: Path, *arguments: str) -> str:
        """The last line of a model-runner that cannot start."""
        addresses = ("--kv-address", f"unix:{tmp_path}/kv.sock", "--runner-address", f"unix:{tmp_path}/runner.sock")
        done = run_octavo("model-runner", *addresses, "--runner-metrics-address", "127.0.0.1:0", *arguments)
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        return done.stderr.splitlines()[-1]

    def test_weights_that_up_finds_too_late(self, tmp_path: Path) -> None:
        corrupt = tmp_path / "corrupt.gguf"
        corrupt.write_bytes(b"not a model" * 100)
        addresses = ("--kv-address", f"unix:{tmp_path}/kv.sock", "--runner-address", f"unix:{tmp_path}/runner.sock")
        code, stderr = _start("--model", str(corrupt), *addresses)
        assert code == 2
        assert "corrupt.gguf" in stderr
        assert len(stderr.splitlines()) == 1

    def test_missing_truncated_and_corrupt_weights(self, tmp_path: Path) -> None:
        assert "missing.gguf" in self.runner_error(tmp_path, "--model", f"{tmp_path}/missing.gguf")
        corrupt = tmp_path / "corrupt.gguf"
        corrupt.write_bytes(b"not a model" * 100)
        assert "corrupt.gguf" in self.runner_error(tmp_path, "--model", str(corrupt))
        from model_runner.loading import demo_model_path

        truncated = tmp_path / "truncated.gguf"
        with demo_model_path().open("rb") as whole:
            truncated.write_bytes(whole.read(20_000_000))
        assert "truncated.gguf" in self.runner_error(tmp_path, "--model", str(truncated))

    def test_unknown_device_and_backend_and_too_little_memory(self, tmp_path: Path) -> None:
        assert "--device 'tpu'" in self.runner_error(tmp_path, "--device", "tpu")
        backend = self.runner_error(tmp_path, "--attention-backend", "magic")
        known = "auto, cpu, cpu_torch, flash_attn, flashinfer, reference, triton"
        assert f"there is no attention backend 'magic'; there are {known}" in backend
        memory = self.runner_error(tmp_path, "--kv-cache-memory", "1MiB", "--weights-dtype", "float32")
        assert "hold 1 blocks of 720 KiB" in memory

    def test_a_port_in_use(self, stack: Stack, tmp_path: Path) -> None:
        for addresses in (
            ("--kv-address", stack.kv_address, "--runner-address", f"unix:{tmp_path}/r.sock"),
            ("--kv-address", f"unix:{tmp_path}/k.sock", "--runner-address", stack.runner_address),
        ):
            code, stderr = _start("--demo", "--once", *addresses)
            assert code == 2
            assert "another process serves this socket" in stderr
            assert len(stderr.splitlines()) == 1
        line = self.runner_error(tmp_path, "--runner-address", stack.runner_address)
        assert stack.runner_address in line
        assert health_of(stack.runner_address) == SERVING

    def test_a_pool_that_is_kept_otherwise(self, stack: Stack, tmp_path: Path) -> None:
        line = self.runner_error(
            tmp_path, "--kv-address", stack.kv_address, "--prefix-index", "radix", "--num-blocks", "512"
        )
        assert "is open with index hash (asked for radix); close it first or take another pool id" in line

    def test_a_pool_that_is_open_with_other_facts(self, stack: Stack, tmp_path: Path) -> None:
        line = self.runner_error(tmp_path, "--kv-address", stack.kv_address, "--num-blocks", "50")
        assert "refuses this runner's pool" in line
        assert "num_blocks" in line


def test_ctrl_c_while_the_model_loads(tmp_path: Path) -> None:
    runner = Process(
        tmp_path,
        "model-runner",
        *("--kv-address", f"unix:{tmp_path}/kv.sock", "--runner-address", f"unix:{tmp_path}/runner.sock"),
        *("--runner-metrics-address", "127.0.0.1:0"),
        afresh=True,
    )
    wait_until("the start", lambda: "model-runner starts" in runner.log, runner)
    runner.signal(signal.SIGINT)
    assert runner.wait() == 0
    assert "Traceback" not in runner.log


def test_help_says_units_defaults_and_variables() -> None:
    shown = run_octavo("up", "--help", COLUMNS="200").stdout
    assert re.search(r"--block-size.*Tokens in one block.*OCTAVO_BLOCK_SIZE.*16", shown.replace("\n", " "))
    for name in ("runner-address", "kv-address", "weights-dtype", "num-blocks", "kv-cache-memory"):
        assert f"--{name}" in shown


def test_version() -> None:
    assert re.fullmatch(r"octavo \d+\.\d+\.\d+\n", run_octavo("--version", afresh=True).stdout)


def test_a_closed_pipe_is_no_traceback(stack: Stack) -> None:
    command = octavo(
        "generate", "a", "--max-tokens", "200", "--ignore-eos", "--json", "--address", stack.runner_address
    )
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        process.wait(PATIENCE_SECONDS)
        assert "Traceback" not in process.stderr.read()
    stack.assert_nothing_held()
