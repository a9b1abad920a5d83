"""What the guard takes for evidence against the policy: prompts, not blocks."""

from kvmanager.recency_guard import RecencyGuard


def judged(leads: list[int]) -> bool:
    """Whether the policy is trusted after prompts whose blocks, each by so many, only one side had."""
    guard = RecencyGuard()
    guard.room = 1_000_000
    for time, lead in enumerate(leads):
        guard.released(time, abs(lead))
        for _ in range(abs(lead)):
            # LRU would have all of them; of these, the policy has none.
            guard.used(time if lead < 0 else -1, lead > 0)
        guard.released(time, 0)
    guard.judge(1_000)
    return guard.trusted


def test_one_long_prompt_is_no_evidence() -> None:
    assert judged([-500])
    assert judged([-500] + 10 * [1])


def test_as_many_blocks_in_many_prompts_are() -> None:
    assert not judged(500 * [-1])
    # Prompts of 20 blocks say as much as prompts of one.
    assert judged(15 * [-20])
    assert not judged(16 * [-20])


def test_behind_by_less_than_two_deviations_is_chance() -> None:
    # 36 prompts, deviation 6 prompts: 12 behind is the limit.
    assert judged(12 * [3] + 24 * [-3])
    assert not judged(11 * [3] + 25 * [-3])


def test_after_four_times_the_evidence_the_policy_must_be_ahead() -> None:
    # 64 prompts, deviation 8 prompts.
    assert judged(36 * [3] + 28 * [-3])
    assert not judged(35 * [3] + 29 * [-3])
    # One fewer, and it need not be.
    assert judged(32 * [3] + 31 * [-3])


def test_each_lost_trial_is_followed_by_twice_the_pause() -> None:
    guard = RecencyGuard()
    guard.room = 1_000
    now = 0
    for pause in (1, 2, 4):
        began, now = now, now + 100
        for _ in range(20):
            guard.released(now, 1)
            guard.used(now, False)
            guard.released(now, 0)
        guard.judge(now)
        assert not guard.trusted
        until = now + pause * (now - began)
        guard.judge(until - 1)
        assert not guard.trusted
        guard.judge(until)
        assert guard.trusted
        now = until
