"""Sessions over both wires, with a real KV manager: how streams end and what is left then, restores after a kill, and
runners side by side."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from octavo.kv.v1 import kv_manager_pb2 as pb
from octavo.kv.v1 import kv_manager_pb2_grpc

from services.channels import open_channel
from services.columns import from_column, to_column
from services.errors import describe_rpc_error
from tests.services.kv_support import (
    WAIT_SECONDS,
    clean_environment,
    command,
    kv_process,
    kv_settings,
    kv_stub,
    running_kv_manager,
    scrape,
)
from tests.services.runner_streams import WAYS, Dial, Stream, dial_by
from tests.services.session_script import LEASE, SIZE, ScriptedRunner, admit, opening, orders_of, step

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
Stub = kv_manager_pb2_grpc.KvManagerServiceStub


def eventually(true: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def occupancy(stub: Stub, pool_id: str = "") -> pb.Occupancy:
    return stub.GetPool(pb.GetPoolRequest(pool_id=pool_id), timeout=WAIT_SECONDS).occupancy


def sound(stub: Stub, pool_id: str = "") -> bool:
    return stub.Check(pb.CheckRequest(pool_id=pool_id), timeout=WAIT_SECONDS).ok


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_kv_manager(kv_settings(tmp_path_factory.mktemp("kv"), session_silence_seconds=30)) as running:
        yield running.address


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """What carries the sessions."""
    return request.param


@pytest.fixture
def dial(way: str, address: str) -> Dial:
    return dial_by(way, address)


@pytest.fixture
def stub(address: str) -> Iterator[Stub]:
    with kv_stub(address) as each:
        yield each


@pytest.fixture
def pool(request: pytest.FixtureRequest) -> str:
    """A pool of the test's own."""
    return request.node.name


def begin(dial: Dial, pool: str, runner_id: str = "one") -> tuple[Stream, int]:
    """A stream with one sequence of six tokens, five of them computed, and its epoch."""
    stream = dial()
    epoch = stream.say(opening(runner_id, pool)).opened.epoch
    stream.say(step(epoch, 1, admit(1, range(6))))
    stream.say(step(epoch, 2, orders_of(handles=[1], computed_tokens=[5])))
    return stream, epoch


def test_a_stream_that_is_finished_ends_its_sequences_and_keeps_the_cache(dial, stub, pool):
    stream, _ = begin(dial, pool)
    assert occupancy(stub, pool).leased_blocks == LEASE
    assert stream.finish() == []
    now = occupancy(stub, pool)
    assert (now.sequences, now.held_blocks, now.cached_blocks, now.leased_blocks) == (0, 0, 1, 0)
    assert sound(stub, pool)


@pytest.mark.parametrize("how", ["cancelled", "connection lost"])
def test_a_broken_stream_ends_its_sequences(dial, stub, pool, how):
    stream, _ = begin(dial, pool)
    if how == "cancelled":
        stream.cancel()
    else:
        stream.lose()
    assert eventually(lambda: occupancy(stub, pool).held_blocks == 0)
    assert occupancy(stub, pool).cached_blocks == 1
    assert sound(stub, pool)


def test_a_killed_runner_frees_its_pool(way, address, stub, pool):
    """A process that is killed says nothing: the end of its connection does."""
    code = (
        "import sys, time\n"
        "from tests.services.runner_streams import dial_by\n"
        "from tests.services.test_session_stream import begin\n"
        "kept = begin(dial_by(sys.argv[1], sys.argv[2]), sys.argv[3])\n"
        "print('begun', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [*command()[:2], code, way, address, pool], stdout=subprocess.PIPE, text=True, env=clean_environment()
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    assert occupancy(stub, pool).sequences == 1
    process.send_signal(signal.SIGKILL)
    process.wait(WAIT_SECONDS)
    assert eventually(lambda: occupancy(stub, pool).held_blocks == 0)
    assert sound(stub, pool)


def test_a_later_opening_ends_an_earlier_stream(dial, stub, pool):
    stream, epoch = begin(dial, pool)
    later, later_epoch = begin(dial, pool, "two")
    assert later_epoch == epoch + 1
    view = stream.failure()
    assert (view.code, view.reason) == ("ABORTED", "STALE_EPOCH")
    assert occupancy(stub, pool).sequences == 1
    with pytest.raises(grpc.RpcError) as error:
        stub.Free(pb.FreeRequest(pool_id=pool, epoch=epoch, sequences=[pb.SequenceAppend(sequence_id="s1")]))
    assert describe_rpc_error(error.value).reason == "STALE_EPOCH"
    later.finish()


def test_a_step_of_another_epoch_ends_the_stream(dial, stub, pool):
    stream, epoch = begin(dial, pool)
    stream.tell(step(epoch - 1, 3))
    view = stream.failure()
    assert (view.code, view.reason) == ("ABORTED", "STALE_EPOCH")
    assert eventually(lambda: occupancy(stub, pool).held_blocks == 0)


def test_a_message_that_makes_no_sense_ends_the_stream_with_a_sentence(dial, stub, pool):
    stream, epoch = begin(dial, pool)
    stream.tell(step(epoch, 3, orders_of(handles=[8])))
    view = stream.failure()
    assert (view.code, view.sentence) == ("INVALID_ARGUMENT", "no live sequence of this session has handle 8")
    assert eventually(lambda: occupancy(stub, pool).held_blocks == 0)
    assert sound(stub, pool)


def test_bytes_that_are_no_message_end_the_stream(dial, stub, pool):
    stream, _ = begin(dial, pool)
    stream.tell_bytes(b"\xff\xff\xff")
    view = stream.failure()
    assert (view.code, view.sentence) == ("INVALID_ARGUMENT", "a message of the session is not well-formed")
    assert eventually(lambda: occupancy(stub, pool).held_blocks == 0)


def test_a_message_above_the_limit_ends_the_stream_and_no_other(tmp_path, way):
    """It says nothing of the books: a runner with what it holds begins again, and does not give it up."""
    with (
        running_kv_manager(kv_settings(tmp_path, max_request_bytes="1100")) as running,
        kv_stub(running.address) as stub,
    ):
        dial = dial_by(way, running.address)
        stream, epoch = begin(dial, "one")
        other, other_epoch = begin(dial, "other")
        large = step(epoch, 3, admit(2, range(300)))
        assert large.ByteSize() > 1100
        stream.tell(large)
        view = stream.failure()
        assert (view.code, view.reason) == ("RESOURCE_EXHAUSTED", "")
        assert eventually(lambda: occupancy(stub, "one").held_blocks == 0)
        assert other.say(step(other_epoch, 3)).answer.number == 3
        other.finish()


def test_closing_a_pool_ends_its_session(dial, stub, pool):
    stream, _ = begin(dial, pool)
    assert stub.ClosePool(pb.ClosePoolRequest(pool_id=pool)).closed_sequences == 1
    view = stream.failure()
    assert (view.code, view.reason) == ("NOT_FOUND", "UNKNOWN_POOL")


def test_another_runner_that_opens_the_pool_by_the_unary_verb_ends_the_session(dial, stub, pool):
    stream, epoch = begin(dial, pool)
    request = pb.OpenPoolRequest(pool_id=pool, spec=opening().open.spec, runner_id="two")
    assert stub.OpenPool(request).epoch == epoch + 1
    assert stream.failure().reason == "STALE_EPOCH"


def test_silence_ends_a_session_and_a_word_now_and_then_does_not(tmp_path, way):
    with (
        running_kv_manager(kv_settings(tmp_path, session_silence_seconds=1)) as running,
        kv_stub(running.address) as stub,
    ):
        silent, _ = begin(dial_by(way, running.address), "silent")
        talking, epoch = begin(dial_by(way, running.address), "talking")
        last = 2
        while not silent.has_ended():
            last += 1
            talking.say(step(epoch, last))
        view = silent.failure()
        assert (view.code, view.reason) == ("ABORTED", "SESSION_SILENT")
        assert occupancy(stub, "silent").held_blocks == 0
        assert occupancy(stub, "talking").sequences == 1
        samples = scrape(running.metrics_address)
        assert samples["octavo_kv_sessions_ended_total", (("cause", "silence"),)] == 1
        assert samples["octavo_kv_sessions", ()] == 1
        assert samples["octavo_kv_sessions_opened_total", ()] == 2
        assert samples["octavo_kv_session_steps_total", ()] == 2 + last
        assert samples["octavo_kv_session_step_seconds_count", ()] == 2 + last
        assert samples["octavo_kv_leased_blocks", (("pool", "talking"),)] == LEASE


def test_metrics_and_health_tell_of_each_pools_session(tmp_path, way):
    with (
        running_kv_manager(kv_settings(tmp_path)) as running,
        open_channel(running.address) as channel,
        kv_stub(running.address) as stub,
    ):

        def shown() -> tuple[list[str], int | None]:
            """The states whose gauge is 1, and what health says."""
            gauges = {key: value for key, value in scrape(running.metrics_address).items() if value}
            states = [dict(labels)["state"] for name, labels in gauges if name == "octavo_kv_pool_session"]
            return states, session_health(channel, "p")

        assert shown() == ([], None)
        stub.OpenPool(pb.OpenPoolRequest(pool_id="p", spec=opening().open.spec, runner_id="zero"))
        assert shown() == (["none"], NOT_SERVING)
        stream, _ = begin(dial_by(way, running.address), "p")
        assert shown() == (["connected"], SERVING)
        stream.finish()
        assert eventually(lambda: shown() == (["none"], NOT_SERVING))
        restoring = dial_by(way, running.address)()
        restoring.tell(opening("one", "p", restores=True))
        assert eventually(lambda: shown() == (["restoring"], NOT_SERVING))
        restoring.say(pb.SessionRequest(holdings=pb.Holdings(last=True)))
        assert shown() == (["connected"], SERVING)
        # Who takes the pool is connected at once, and the end of the other one's stream changes nothing.
        later, _ = begin(dial_by(way, running.address), "p", "two")
        restoring.failure()
        assert shown() == (["connected"], SERVING)
        assert session_health(channel, "q") is None
        stub.ClosePool(pb.ClosePoolRequest(pool_id="p"))
        later.failure()
        assert shown() == ([], None)


def session_health(channel: grpc.Channel, pool_id: str) -> int | None:
    """What health says of a pool's session; None when it knows of none."""
    request = health_pb2.HealthCheckRequest(service=f"session/{pool_id}")
    try:
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=WAIT_SECONDS).status
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        raise


def test_a_stop_ends_sessions_of_runners_that_stay(tmp_path, way):
    with ExitStack() as server:
        running = server.enter_context(running_kv_manager(kv_settings(tmp_path)))
        stream, _ = begin(dial_by(way, running.address), "default")
        server.close()
        view = stream.failure()
    assert (view.code, view.reason) == ("UNAVAILABLE", "STOPPING")


def shown(stub: Stub) -> tuple[pb.Occupancy, list[pb.GetBlockTableResponse], list[int]]:
    """What an operator sees: occupancy, block tables with counts and names, and what is cached of some prompts."""
    sequences = stub.ListSequences(pb.ListSequencesRequest(page_size=1000)).sequences
    tables = [stub.GetBlockTable(pb.GetBlockTableRequest(sequence_id=each.sequence_id)) for each in sequences]
    for block in [block for table in tables for block in table.blocks if block.stored_tokens < SIZE]:
        # After a rewind the old content can still be hit; this runner does not report it.
        block.block_hash = b""
    prompts = [[7] * 12, [7] * 4 + [8] * 8, list(range(9))]
    hits = [stub.Lookup(pb.LookupRequest(token_ids=tokens)).cached_tokens for tokens in prompts]
    return occupancy(stub), tables, hits


def test_books_are_the_same_after_the_process_was_killed(tmp_path, way):
    """Twenty steps of a random runner, a prompt that is only cached, kill -9, and the holdings at the next process."""
    runner = ScriptedRunner(5)
    with kv_process(tmp_path) as (process, address), kv_stub(address) as stub:
        stream = dial_by(way, address)()
        runner.opened(stream.say(opening()).opened)
        for _ in range(20):
            runner.accept(stream.say(runner.next_step()).answer)
        number = runner.number
        prompt = list(range(8))
        answer = stream.say(step(runner.epoch, number + 1, admit(900, prompt))).answer
        blocks = answer.admitted[0].block_ids
        end = pb.EndOrder(progress=pb.Progress(handles=to_column([900]), computed_tokens=to_column([8])))
        runner.lease += from_column(answer.lease_block_ids, "lease")
        stream.say(step(runner.epoch, number + 2, pb.SessionOrder(end=end)))
        for each in runner.live.values():
            assert not each.asked
        before = shown(stub)
        # What sequences that have ended left in the cache is not in this runner's mirror, but for one prompt.
        stub.RemovePrefix(pb.RemovePrefixRequest(token_ids=[7] * 4))
        stub.RemovePrefix(pb.RemovePrefixRequest(token_ids=[9] * 4))
        before = shown(stub)
        process.send_signal(signal.SIGKILL)
        process.wait(WAIT_SECONDS)
        assert stream.failure().code == "UNAVAILABLE"
    first = from_column(blocks, "blocks")
    cached = pb.CachedBlocks(block_ids=blocks, parent_block_ids=to_column([0, first[0]]), token_ids=to_column(prompt))
    with kv_process(tmp_path) as (process, address), kv_stub(address) as stub:
        stream = dial_by(way, address)()
        stream.tell(opening(restores=True, lease=0))
        runner.lease.sort()
        holdings = runner.holdings()
        stream.tell(pb.SessionRequest(holdings=pb.Holdings(cached=[cached])))
        opened = stream.say(pb.SessionRequest(holdings=holdings)).opened
        assert opened.epoch > runner.epoch
        after = shown(stub)
        assert after[1] == before[1]
        assert after[2] == before[2]
        assert after[0] == before[0]
        assert after[2][2] == 8
        assert sound(stub)
        stream.finish()


def test_two_runners_do_not_see_each_other(dial, stub, pool):
    """Two random runners side by side leave the books that each leaves alone."""
    alone = [run_alone(dial, stub, f"{pool}-{seed}", seed) for seed in (1, 2)]
    streams = [dial() for _ in range(2)]
    runners = [ScriptedRunner(seed) for seed in (1, 2)]
    for number, (stream, runner) in enumerate(zip(streams, runners, strict=True)):
        runner.opened(stream.say(opening(f"r{number}", f"{pool}-both-{number}")).opened)
    for _ in range(30):
        for stream, runner in zip(streams, runners, strict=True):
            runner.accept(stream.say(runner.next_step()).answer)
    for number, stream in enumerate(streams):
        assert occupancy(stub, f"{pool}-both-{number}") == alone[number]
        stream.finish()


def run_alone(dial: Dial, stub: Stub, pool: str, seed: int) -> pb.Occupancy:
    stream, runner = dial(), ScriptedRunner(seed)
    runner.opened(stream.say(opening("alone", pool)).opened)
    for _ in range(30):
        runner.accept(stream.say(runner.next_step()).answer)
    seen = occupancy(stub, pool)
    stream.finish()
    return seen
