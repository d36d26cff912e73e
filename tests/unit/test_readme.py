"""README.md names only what exists."""

import re

import pytest

from tests import readme


def test_python_snippets_compile() -> None:
    snippets = readme.snippets("python")
    assert snippets
    for snippet in snippets:
        compile(snippet, "README.md", "exec")


def test_shown_make_targets_exist() -> None:
    targets = [target for arguments in readme.commands("make") for target in arguments]
    assert {"demo", "test"} <= set(targets)
    makefile = (readme.ROOT / "Makefile").read_text()
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_links_lead_somewhere() -> None:
    missing = [link for link in readme.links() if not (readme.ROOT / link).exists()]
    assert not missing


def test_readme_is_finished() -> None:
    assert not re.search(r"TODO|FIXME|TBD|XXX|lorem", readme.TEXT)


@pytest.mark.parametrize("program", ["make", "flashrec"])
def test_commands_are_found(program: str) -> None:
    """The other tests of this file and of its integration twin would pass on an empty list."""
    assert readme.commands(program)
