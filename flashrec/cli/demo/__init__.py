"""`flashrec demo`, in parts.

command.py        the command: runs both trainings, judges, reports
schedule.py       which rank is killed, where and when (pure)
injector.py       the process that kills them
training.py       the run under flashrec
reference_run.py  the run in plain torch
faults.py         what became of each kill (pure)
verdict.py        are both runs the same, bit for bit (pure)
timing.py         how long an undisturbed step takes (pure)
view.py           what is seen meanwhile
report.py         what is said at the end
"""

from flashrec.cli.demo.command import demo

__all__ = ["demo"]
