"""Writes docs/options.md from the fields of ServerArgs: `python scripts/document_options.py > docs/options.md`."""

from __future__ import annotations

import dataclasses
import inspect
import re

from jaxserve.cli.options import spellings
from jaxserve.config import ServerArgs


def sections() -> dict[str, str]:
    """Field name -> the heading it stands under: the `# --- heading` comments of the class."""
    headings, heading = {}, ""
    for line in inspect.getsource(ServerArgs).splitlines():
        if match := re.match(r"\s+# --- (.*)", line):
            heading = match[1]
        elif match := re.match(r"    (\w+): ", line):
            headings[match[1]] = heading
    return headings


def options_page() -> str:
    lines = [
        "# Options",
        "",
        "Of `jaxserve serve`, and as keyword arguments of `jaxserve.Engine` (`--page-size` is `page_size`). Names and defaults",
        "are SGLang's where SGLang has the option. Made from `jaxserve/config` by `scripts/document_options.py`.",
    ]
    headings, last = sections(), ""
    for field in dataclasses.fields(ServerArgs):
        if headings[field.name] != last:
            last = headings[field.name]
            lines += ["", f"## {last[0].upper()}{last[1:]}", "", "| option | default | |", "|---|---|---|"]
        choices = field.metadata["choices"]
        help_text = field.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
        default = "" if field.default in (None, "") else f"`{field.default}`"
        names = ", ".join(f"`{name}`" for name in spellings(field.name))
        lines.append(f"| {names} | {default} | {help_text.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(options_page())
