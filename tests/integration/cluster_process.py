"""One node of a cluster as a process of its own: `python -m tests.integration.cluster_process OPTION=VALUE ...`.

Says what it is told as lines of JSON; each line on its standard input is a message to send, or "check" (for a leader)
to find out who reaches whom. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flashrec.errors import FlashrecError
from flashrec.protocol import agents as ag
from flashrecd.cluster import Cluster
from flashrecd.cluster.options import cluster_options


def say(*what: Any) -> None:
    print(json.dumps(what), flush=True)


async def main(given: dict[str, str]) -> None:
    key_file = given.pop("key_file", None)
    options = cluster_options(
        **{"listen": None, "join": None, **given}, key_file=Path(key_file) if key_file else None
    )
    assert options is not None
    cluster = Cluster(
        options.node_info(memory_bytes=1 << 30),
        listen=options.listen,
        join=options.join,
        key=options.key,
        log=lambda event, reason: say("log", event, reason),
        on_message=lambda node, message: say("message", node, message.data.decode()),
        on_joined=lambda node: say("joined", node.name, node.data_address),
        on_heard=lambda node: None,
        on_closed=lambda node, why: say("closed", node, why),
        suspect_after_s=1.5,
    )
    serving = asyncio.create_task(cluster.serve())
    await cluster.listening()
    say("started", cluster.address)
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.strip() == "check":
            reports = await cluster.check([options.name, *cluster.members])
            say("reports", [{**asdict(report), "warning": report.warning} for report in reports])
        else:
            node, _, text = line.strip().partition(" ")
            cluster.send("" if node == "leader" else node, ag.Envelope("part", 1, 0, text.encode()))
    serving.cancel()
    await asyncio.gather(serving, return_exceptions=True)


if __name__ == "__main__":
    try:
        asyncio.run(main(dict(argument.split("=", 1) for argument in sys.argv[1:])))
    except FlashrecError as error:
        say("refused", str(error))
