"""A verdict as one page of HTML that needs nothing else."""

from collections.abc import Sequence
from html import escape

from parity_tests.verdict import Verdict

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .2em .8em; border-bottom: 1px solid #ddd; }
td.number { text-align: right; font-variant-numeric: tabular-nums; } tr.fails { background: #fdd; }
"""


def page(verdict: Verdict, lines: Sequence[str]) -> str:
    """The first line as the title, the others as paragraphs, and all checks as a table."""
    title, *rest = map(escape, lines)
    paragraphs = "".join(f"<p>{line}</p>\n" for line in rest)
    rows = "".join(
        f'<tr class="{"holds" if check.holds else "fails"}"><td>{escape(check.level)}</td><td>{escape(check.name)}</td>'
        f'<td class="number">{check.value:.3g}</td><td class="number">{check.bound:.3g}</td>'
        f"<td>{'holds' if check.holds else 'fails'}</td><td>{escape(check.why)}</td></tr>\n"
        for check in verdict.checks
    )
    head = "".join(
        f"<th>{name}</th>" for name in ("level", "check", "value", "bound", "", "where the bound comes from")
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{verdict.word}</title>'
        f"<style>{STYLE}</style></head>\n<body><h1>{title}</h1>\n{paragraphs}<table><tr>{head}</tr>\n{rows}</table>"
        "</body></html>\n"
    )
