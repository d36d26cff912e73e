"""A job from the text of a script."""

from pathlib import Path

from chaos.cues import Cue, write_cues
from chaos.job import Job


def started(
    folder: Path, text: str, *arguments: str, world_size: int, standbys: int, cues: list[Cue] | None = None
) -> Job:
    script = folder / "script.py"
    script.write_text(text)
    write_cues(folder, cues or [])
    return Job(folder, script, arguments, world_size=world_size, standbys=standbys)
