"""A Griffe extension: the docstrings are plain text, made to be read in a terminal; here they become Markdown that says the same.

Outside code, the characters that Markdown would take for markup (`" b *d"`, `<v - v_old, target - v>`) are escaped; examples
that start with >>> become blocks; a paragraph with hanging indents becomes a list.
"""

import re
from typing import Any

import griffe

MARKUP = re.compile(r"([\\*_<>\[\]#])")
CODE = re.compile(r"(`[^`]+`)")
ENTRY = re.compile(r"^[A-Za-z_\"/][^.:]{0,60}:(\s|$)")


def escaped(line: str) -> str:
    """The line with Markdown's own characters escaped, but for what stands in backticks."""
    parts = CODE.split(line)
    plain = [MARKUP.sub(lambda m: "&lt;" if m[0] == "<" else "&gt;" if m[0] == ">" else "\\" + m[0], p) for p in parts]
    return "".join(p if i % 2 else plain[i] for i, p in enumerate(parts))


def paragraph(lines: list[str]) -> list[str]:
    """One paragraph: a list where some lines hang below others and those begin with a name and a colon."""
    heads = [line for line in lines if not line.startswith("    ")]
    hanging = len(heads) < len(lines) and all(ENTRY.match(line) for line in heads[1:])
    entries = sum(bool(ENTRY.match(line)) for line in heads)
    if not (hanging and entries >= 2) and not (len(heads) == len(lines) and entries == len(lines) > 1):
        return [escaped(line.strip()) for line in lines]
    found = [""]
    for line in lines:
        head = ENTRY.match(line)
        found.append(("- " if head else "    ") + escaped(line.strip()))
    return [*found, ""]


def markdown(text: str) -> str:
    """A docstring as Markdown."""
    out: list[str] = []
    for block in re.split(r"\n[ \t]*\n", text.strip("\n")):
        lines = block.split("\n")
        if lines[0].lstrip().startswith(">>>"):
            out += [
                "```pycon",
                *(line.removeprefix(" " * (len(lines[0]) - len(lines[0].lstrip()))) for line in lines),
                "```",
            ]
        elif all(line.startswith("    ") for line in lines):
            out += lines  # an equation, or a table: as it stands
        else:
            out += paragraph(lines)
        out.append("")
    return "\n".join(out)


class PlainDocstrings(griffe.Extension):
    """Rewrites every docstring once, when its object has been read."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
