"""The performance model: what a training step, and a failure, costs. Never imports torch, but to measure.

    from flashrec.sim.config import load                # TOML or JSON -> Config (model, cluster, strategy, batch)
    from flashrec.sim.report import simulate            # Config -> Report: batch_s, tokens_per_s, mfu, timeline, memory
    from flashrec.sim.search import search              # model, cluster, global_batch -> Outcome: best, losers
    from flashrec.sim.explain import compare            # two Reports' breakdowns -> where their difference comes from
    from flashrec.sim.trace import chrome_trace         # Report.timeline -> a trace for Perfetto
    from flashrec.sim.picture import svg                # Report.timeline -> a picture

Reading order: `model`, `cluster`, `strategy` describe; `events` and `bill` break a strategy into distinct events;
`analytic`, `collectives` and `profile` say how long one takes; `costs` composes them; `schedules` and `engine` lay the
step out; `report`, `explain`, `search` answer. `failures` is what failures cost. docs/simulator.md shows it at work.
"""
