"""Train a small GPT on the standard library's source files, under flashrec.

    flashrec run --nproc-per-node 4 --standby 1 train.py --steps 100 --out /tmp/with-faults --parallel fsdp

Kill any rank while it runs: the outcome equals, bit for bit, that of reference.py. Whatever the parallelism
(parallelism.py), flashrec is asked for the same few things.
"""

import time

import flashrec
import outcome
import parallelism
import recipe
import text


def main() -> None:
    options = recipe.parse_options(__doc__, with_standby=True)
    flashrec.init(standby=options.standby)
    corpus = text.load_corpus()
    training = parallelism.build(options)
    optimizer = training.optimizer
    scheduler = recipe.build_scheduler(optimizer, options)
    history = outcome.LossHistory()
    flashrec.protect(
        model=training.model,
        optimizer=optimizer,
        scheduler=scheduler,
        private=history,
        replicated_over=training.replicated_over,
        survive=options.survive,
    )

    log: outcome.StepLog | None = None
    last = time.perf_counter()
    for step in flashrec.steps(recipe.loader_factory(options, corpus), total=options.steps):
        with step:
            inputs, targets = step.batch
            loss = training.forward_backward(inputs, targets)
            training.clip_gradients(1.0)
            if loss is not None:  # in a pipeline the last stage has it
                history.record(step.index, loss.item())
                flashrec.report_loss(loss.item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if step.committed:
            now = time.perf_counter()
            log = log or outcome.StepLog(options.out, flashrec.rank())
            log.committed(step.index, loss, 1000 * (now - last), step.attempt)
            last = now
            if loss is not None and flashrec.rank() in (0, flashrec.world_size() - 1) and not options.quiet:
                print(f"step {step.index:4d}  loss {loss.item():.4f}", flush=True)

    log = log or outcome.StepLog(options.out, flashrec.rank())
    outcome.write_outcome(
        options.out,
        rank=flashrec.rank(),
        world_size=flashrec.world_size(),
        corpus_sha256=text.corpus_digest(corpus),
        model=training.plain,
        optimizer=optimizer,
        history=history,
        log=log,
    )
    log.close()


if __name__ == "__main__":
    main()
