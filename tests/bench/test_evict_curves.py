"""The curves: one point for each policy and capacity, and a picture."""

from pathlib import Path

from bench.evict_curves import curves, draw


def test_curves_and_picture(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # Two prompts of two blocks in turn: room for one, for one and the other's first block, or for both. Whoever knows
    # the future keeps two or three blocks all the time, and need not hold what runs: 4 x 2, 4 x 2 + 4 x 1, 8 x 2.
    trace.write_text("".join(f'{{"hash_ids": {ids}}}\n' for ids in [[1, 2], [3, 4]] * 5))
    found = curves(trace, [2, 3, 4])
    assert found == {"lru": [0, 8, 16], "default": [0, 8, 16], "Belady": [8, 12, 16]}
    draw(found, [2, 3, 4], 20, "a trace", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
