"""Train a small GPT on the standard library's source files, under flashrec.

    flashrec run --nproc-per-node 4 --standby 1 train.py --steps 100 --out /tmp/with-faults

Kill any rank while it runs: the outcome equals, bit for bit, that of reference.py.
"""

import time

import torch
from torch.nn.parallel import DistributedDataParallel

import flashrec
import outcome
import recipe
import text
from gpt import loss_of


def main() -> None:
    options = recipe.parse_options(__doc__, with_standby=True)
    flashrec.init(standby=options.standby)
    corpus = text.load_corpus()
    model = DistributedDataParallel(recipe.build_model(options))
    optimizer = recipe.build_optimizer(model)
    scheduler = recipe.build_scheduler(optimizer, options)
    history = outcome.LossHistory()
    flashrec.protect(model=model, optimizer=optimizer, scheduler=scheduler, private=history)

    log: outcome.StepLog | None = None
    last = time.perf_counter()
    for step in flashrec.steps(recipe.loader_factory(options, corpus), total=options.steps):
        with step:
            inputs, targets = step.batch
            loss = loss_of(model(inputs), targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            history.record(step.index, loss.item())
            flashrec.report_loss(loss.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed:
            now = time.perf_counter()
            log = log or outcome.StepLog(options.out, flashrec.rank())
            log.committed(step.index, loss.item(), 1000 * (now - last), step.attempt)
            last = now
            if flashrec.rank() == 0 and not options.quiet:
                print(f"step {step.index:4d}  loss {loss.item():.4f}", flush=True)

    log = log or outcome.StepLog(options.out, flashrec.rank())
    outcome.write_outcome(
        options.out,
        rank=flashrec.rank(),
        world_size=flashrec.world_size(),
        corpus_sha256=text.corpus_digest(corpus),
        model=model.module,
        optimizer=optimizer,
        history=history,
        log=log,
    )
    log.close()


if __name__ == "__main__":
    main()
