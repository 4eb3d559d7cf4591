# SPDX-License-Identifier: GPL-2.0 OR BSD-2-Clause
#
# Draws what a terminal shows: terminal.py TEXT SVG. The first line of the text
# is the title; heads ("== ...") and commands ("$ ...") are set off.

import sys

from rich.console import Console
from rich.text import Text

source, target = sys.argv[1:]
with open(source, encoding="utf-8") as file:
    title, *lines = file.read().rstrip("\n").split("\n")
with open("/dev/null", "w", encoding="utf-8") as nowhere:
    console = Console(record=True, width=max(map(len, lines)) + 1, file=nowhere, force_terminal=True)
    for line in lines:
        style = "bold cyan" if line.startswith("== ") else "bold" if line.startswith("$ ") else ""
        console.print(Text(line, style=style), no_wrap=True, overflow="ignore", crop=False)
    console.save_svg(target, title=title, unique_id="umad")
