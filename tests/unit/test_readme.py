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


def test_ranks_started_by_hand_are_told_what_they_need() -> None:
    needed = {"RANK", "WORLD_SIZE", "FLASHREC_JOB"}
    by_hand = [line for block in readme.snippets("console") for line in block.splitlines() if "RANK=" in line]
    assert len(by_hand) == 3
    for line in by_hand:
        assert needed == set(re.findall(r"\b([A-Z_]+)=", line)), line


@pytest.mark.parametrize("program", ["make", "flashrec", "flashrecd", "torchrun"])
def test_commands_are_found(program: str) -> None:
    """The other tests of this file and of its integration twin would pass on an empty list."""
    assert readme.commands(program)
