"""Chunks that go out as fewer: nothing is lost, and what ends a choice or the request still ends it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from model_runner.request import Chunk, FinishReason, PositionLogprobs, Usage
from services.chunk_merge import entries, merged

USAGE = Usage(1, 0, 1, 0, 0.0, 0.0, 0.0)


def position(token: int) -> PositionLogprobs:
    return PositionLogprobs(token, -1.0 * token, ((token, -0.5),))


@st.composite
def streams(draw: st.DrawFn) -> list[Chunk]:
    """All chunks of a request: choices that go on side by side, each with an end, the last of them with the usage."""
    turns = draw(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    last_of = {choice: place for place, choice in enumerate(turns)}
    chunks = []
    for place, choice in enumerate(turns):
        ends = last_of[choice] == place
        chunks.append(
            Chunk(
                "r",
                choice,
                (place,) if draw(st.booleans()) else (),
                draw(st.sampled_from(["", "a", "é", "字"])),
                logprobs=(position(place),),
                finish_reason=FinishReason.STOP if ends else None,
                stop_token_id=7 if ends and choice == 1 else None,
                stop_string="x" if ends and choice == 2 else None,
                usage=USAGE if place == len(turns) - 1 else None,
                prompt_logprobs=(position(99),) if place == 0 else (),
                score=float(choice) if ends else None,
            )
        )
    return chunks


@given(streams())
def test_each_choice_reads_the_same(chunks: list[Chunk]) -> None:
    fewer = merged(chunks)
    assert sorted(each.choice_index for each in fewer) == sorted({each.choice_index for each in chunks})
    assert [each.usage for each in fewer] == [None] * (len(fewer) - 1) + [USAGE]
    for each in fewer:
        own = [chunk for chunk in chunks if chunk.choice_index == each.choice_index]
        assert each.token_ids == sum((chunk.token_ids for chunk in own), ())
        assert each.text == "".join(chunk.text for chunk in own)
        assert each.logprobs == sum((chunk.logprobs for chunk in own), ())
        assert each.prompt_logprobs == sum((chunk.prompt_logprobs for chunk in own), ())
        end = own[-1]
        assert (each.finish_reason, each.stop_token_id, each.stop_string, each.score) == (
            end.finish_reason,
            end.stop_token_id,
            end.stop_string,
            end.score,
        )


def test_how_large_a_chunk_is() -> None:
    assert entries(Chunk("r", 0, (), "")) == 1
    assert entries(Chunk("r", 0, (5, 6), "ab")) == 2
    assert entries(Chunk("r", 0, (5,), "a", logprobs=(position(5),))) == 3
    assert entries(Chunk("r", 0, (5,), "a", prompt_logprobs=(position(1), position(2)))) == 5
