"""Frames of a session: any way to cut the bytes gives the same ones, and what is none is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.session_frames import CONTRACT, GREETING, MESSAGE, STATUS, FrameFault, FrameReader, FrameTooLong, frame


def test_the_bytes_of_a_frame() -> None:
    assert frame(MESSAGE, b"ab") == bytes([0, 0, 0, 0, 2]) + b"ab"
    assert frame(STATUS, b"") == bytes([128, 0, 0, 0, 0])
    assert frame(GREETING, b"c" * 258) == bytes([64, 0, 0, 1, 2]) + b"c" * 258
    assert CONTRACT == b"octavo.kv.v1.KvManagerService/Session"


FRAMES = st.lists(st.tuples(st.sampled_from([MESSAGE, GREETING, STATUS]), st.binary(max_size=300)), max_size=8)


@given(FRAMES, st.data())
def test_any_cut_gives_the_same_frames(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    bytes_left = b"".join(frame(*each) for each in frames)
    reader = FrameReader(300)
    found = []
    while bytes_left:
        count = data.draw(st.integers(1, len(bytes_left)))
        reader.feed(bytes_left[:count])
        bytes_left = bytes_left[count:]
        while reader.has_next:
            found.append(reader.next())
        assert reader.next() is None
    assert found == frames


def test_a_frame_that_is_too_long_is_refused_before_it_comes() -> None:
    reader = FrameReader(300)
    reader.feed(bytes([0, 0, 0, 1, 45]))
    assert reader.has_next
    with pytest.raises(FrameTooLong, match="301 bytes, and 300 are taken at most"):
        reader.next()


def test_bytes_of_another_protocol_are_refused() -> None:
    reader = FrameReader(300)
    reader.feed(b"PRI ")
    assert not reader.has_next
    reader.feed(b"* HTTP/2.0")
    assert reader.has_next
    with pytest.raises(FrameFault, match="unknown kind 0x50"):
        reader.next()
