"""A Python-Markdown extension: LaTeX becomes MathML while the site is built, so that a page needs no script and no network.

Arithmatex marks the mathematics (`$...$` in a line, `$$...$$` alone) as \\(...\\) and \\[...\\] in elements of class
arithmatex; each is replaced here. latex2mathml would print a command that it does not know as it stands: that is logged as a
warning, which a strict build makes an error.
"""

import logging
import re
from html import unescape
from typing import Any

from latex2mathml.converter import convert
from markdown import Extension, Markdown
from markdown.postprocessors import Postprocessor

log = logging.getLogger("mkdocs.mathml")

PRIME = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")
BAR = "<mo>&#x0007C;</mo>"

MARKED = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)


def to_mathml(latex: str, *, display: str) -> str:
    """MathML of a formula, display "inline" or "block". ValueError: a command that the converter does not know."""
    found = convert(latex, display=display)
    unknown = sorted(set(re.findall(r"\\[a-zA-Z]+", found)))
    if unknown:
        raise ValueError(f"unknown commands {', '.join(unknown)} in {latex!r:.120}")
    found = PRIME.sub(
        r'<mrow>\1<mo lspace="0" rspace="0">&#x02032;</mo></mrow>', found
    )  # raised already: no superscript
    return found.replace(BAR, BAR.replace("<mo>", '<mo lspace="0" rspace="0" stretchy="false">'))  # no relation


def replaced(match: re.Match) -> str:
    """The formula of one marked element as MathML; left alone, with a warning, where that fails."""
    tag, kind, latex = match.groups()
    try:
        mathml = to_mathml(unescape(latex).strip(), display="inline" if kind == "(" else "block")
    except Exception as error:
        log.warning("formula %r: %s", latex[:120], error)
        return match[0]
    return f'<{tag} class="formula">{mathml}</{tag}>'


class Formulas(Postprocessor):
    """Runs on the finished HTML of a page."""

    def run(self, text: str) -> str:
        return MARKED.sub(replaced, text)


class MathML(Extension):
    """`markdown_extensions: [docs.tools.mathml]`, beside pymdownx.arithmatex with `generic: true`."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.postprocessors.register(Formulas(md), "mathml", 0)


def makeExtension(**options: Any) -> MathML:
    return MathML(**options)
