#!/usr/bin/env python3
"""Print one of the README's commands, so that CI runs exactly what a reader would."""

import re
import sys
from pathlib import Path


def command(name: str) -> str:
    """Return the shell block that follows the comment `<!-- command: name -->`."""
    text = (Path(__file__).parents[1] / "README.md").read_text()
    match = re.search(rf"<!-- command: {re.escape(name)} -->\s*```sh\n(.*?)```", text, re.S)
    if match is None:
        known = ", ".join(re.findall(r"<!-- command: (.*?) -->", text))
        raise SystemExit(
            f"readme_command: expected the name of a command that the README marks: {known}. "
            f"Received {name!r}. Pass one of them, or mark the block."
        )
    return match[1].strip()


if __name__ == "__main__":
    print(command(" ".join(sys.argv[1:])))
