"""What the tests need to know of README.md, and of the pages it leads to: their snippets, commands and links."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
NODES = (ROOT / "docs" / "nodes.md").read_text()


def snippets(language: str, text: str = TEXT) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)


def commands(program: str, text: str = TEXT) -> list[list[str]]:
    """Arguments of every shown call of a program, without its name."""
    lines = [
        line[2:]
        for block in snippets("console", text)
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    words = [shlex.split(line, comments=True) for line in lines]
    return [arguments for name, *arguments in words if name == program]


def links() -> list[str]:
    """Targets of links into the repository."""
    return [target for target in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in target]
