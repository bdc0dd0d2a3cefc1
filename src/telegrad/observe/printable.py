"""Makes text of other workers safe to print: names of functions and files, and errors, may contain anything.

A terminal obeys escape sequences, and an SVG picture with a control character in it is no XML. So whatever is printed
or drawn goes through `printable` first.
"""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, but not tab and newline
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # these change the direction or the line of what follows
    "\ud800-\udfff\ufffe\uffff]"  # these are no characters
)


def printable(text: str) -> str:
    r"""Return a text with its control characters escaped, except for tabs and newlines.

    >>> printable("f\x1b]0;title\x07"), printable("two\nlines")
    ('f\\x1b]0;title\\x07', 'two\nlines')
    """
    return _UNSAFE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    return found[0].encode("unicode_escape", "surrogatepass").decode("ascii")


def one_line(text: str) -> str:
    r"""Return a text as one line, with everything escaped that is not printed as itself.

    >>> one_line("two\nlines")
    'two\\nlines'
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def escape_xml(text: str) -> str:
    r"""Return a text for the content of an XML element.

    >>> escape_xml("<lambda> \x1b")
    '&lt;lambda&gt; \\x1b'
    """
    return escape(printable(text))
