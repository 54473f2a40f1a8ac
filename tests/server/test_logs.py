"""Log lines: whatever stands in a record, it begins no line of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap

import pytest

from jaxserve.server.logs import escaped, escaped_output

FORGED = "[2026-01-01 00:00:00] ERROR forged"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ü 😀\ttab", "plain ü 😀\ttab"),
        ("a\r\nb", r"a\r\nb"),
        ("\x00\x1b[31m\x7f\x85\x9b", r"\x00\x1b[31m\x7f\x85\x9b"),
        ("\x0b\x0c\x1c\u2028\u2029", r"\x0b\x0c\x1c\u2028\u2029"),
        ("\u202egnp\u2066", r"\u202egnp\u2066"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_characters_are_escaped(text: str, shown: str) -> None:
    assert escaped(text) == shown
    assert len(escaped(text).splitlines()) == 1


def test_output_keeps_its_lines() -> None:
    assert escaped_output("10 %\r20 %\r\n\tdone\n\x1b[2J\u2028") == "10 %\r20 %\r\n\tdone\n\\x1b[2J\\u2028"


CASES = {
    "an argument": "logging.getLogger('any').warning('request %s', FORGED)",
    "a message": "logging.getLogger('any').warning(FORGED)",
    "an exception's message": """
        try:
            raise ValueError(FORGED)
        except ValueError:
            logging.getLogger('any').exception('failed')
    """,
    "a chain of exceptions": """
        try:
            try:
                raise ValueError(FORGED)
            except ValueError as error:
                raise KeyError(FORGED) from error
        except KeyError:
            logging.getLogger('any').exception('failed')
    """,
    "a note": """
        error = ValueError('a')
        error.add_note(FORGED)
        logging.getLogger('any').error('failed', exc_info=error)
    """,
    "a warning": "warnings.warn(FORGED)",
    "an uncaught exception": "raise ValueError(FORGED)",
    "an uncaught exception of a thread": """
        def work():
            raise ValueError(FORGED)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    """,
    "an exception that Python cannot raise": """
        class Thing:
            def __repr__(self):
                return FORGED
            def __del__(self):
                raise ValueError(FORGED)
        Thing()
    """,
    "a task's exception": """
        async def work():
            raise ValueError(FORGED)
        async def main():
            asyncio.create_task(work())
            await asyncio.sleep(0.01)
            gc.collect()
        asyncio.run(main())
    """,
    "a library with a handler of its own": """
        library = logging.getLogger('library')
        library.addHandler(logging.StreamHandler())
        library.propagate = False
        library.warning('text: %s', FORGED)
    """,
    "a stack": "logging.getLogger('any').warning('request %s', FORGED, stack_info=True)",
}


@pytest.mark.parametrize("case", CASES)
def test_no_line_is_forged(case: str) -> None:
    script = f"""
import asyncio, gc, logging, threading, warnings
from jaxserve.server.logs import configure_logging
configure_logging("info", "scheduler")
FORGED = "a\\r\\n{FORGED}\\r{FORGED}\\u2028{FORGED}\\x1b[2J"
{textwrap.dedent(CASES[case])}
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False)
    log = ended.stderr.decode()
    assert "forged" in log, log
    assert re.search(r"[\r\x1b\u2028]", log) is None, log
    lines = log.removesuffix("\n").split("\n")
    if "library" in case:
        assert len(lines) == 1
    else:
        assert all(re.match(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d scheduler\] |    ", line) for line in lines), log
