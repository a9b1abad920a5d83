"""What the documents say that must be so: the command lines in their code, and their links."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"(?ms)^ *```[a-z]*\n(.*?)^ *```$")
_INLINE = re.compile(r"`([^`\n]+)`")
_HEADING = re.compile(r"(?m)^#+ (.+)$")
_LINK = re.compile(r"\]\(([^)]+)\)")


@dataclass(frozen=True, slots=True)
class Command:
    """An `octavo` command line: its words after `octavo`."""

    document: str
    words: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.words[0]

    @property
    def flags(self) -> tuple[str, ...]:
        return tuple(word.split("=")[0] for word in self.words if re.match(r"--[a-z]", word))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def code_lines(text: str) -> list[str]:
    """Each line of a block of shell, continued lines joined, and each piece of inline code."""
    blocks = [each.replace("\\\n", " ") for each in _FENCED.findall(text)]
    lines = [line.strip() for block in blocks for line in block.splitlines()]
    return lines + _INLINE.findall(_FENCED.sub("", text))


def commands(document: str) -> list[Command]:
    """The `octavo` command lines of a document, those inside of `kubectl exec ... --` and `podman exec` too."""
    return [Command(document, words) for line in code_lines(read(document)) for words in _words_after_octavo(line)]


def _words_after_octavo(line: str) -> list[tuple[str, ...]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:
        return []
    starts_it = words[:1] == ["octavo"] or (words[:1] in (["kubectl"], ["podman"]) and "exec" in words)
    if not starts_it or "octavo" not in words:
        return []
    after = words[words.index("octavo") + 1 :]
    ends = [place for place, word in enumerate(after) if word in ("|", ">", "&", ";", "&&")]
    said = tuple(after[: ends[0]] if ends else after)
    return [said] if said and re.fullmatch("[a-z][a-z-]*", said[0]) else []


def anchors(document: str) -> set[str]:
    """The anchors of the headings, as GitHub makes them."""
    plain = (re.sub(r"[^a-z0-9 _-]", "", each.lower()) for each in _HEADING.findall(_FENCED.sub("", read(document))))
    return {each.strip().replace(" ", "-") for each in plain}


def links(document: str) -> list[str]:
    return _LINK.findall(_FENCED.sub("", read(document)))


def section(document: str, heading: str) -> str:
    """The text under a heading, up to the next of its level or above."""
    level = re.search(rf"(?m)^(#+) {re.escape(heading)}$", read(document))
    assert level, heading
    rest = read(document)[level.end() :]
    following = re.search(rf"(?m)^#{{1,{len(level[1])}}} ", rest)
    return rest[: following.start()] if following else rest
