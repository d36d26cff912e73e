"""The training of train.py in plain torch: what it must equal, bit for bit.

    torchrun --nproc-per-node 4 reference.py --steps 100 --out /tmp/reference --parallel fsdp

Nothing of flashrec is imported here.
"""

import sys
import time
from collections.abc import Iterator

import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

import outcome
import parallelism
import recipe
import text


def batches(loader: recipe.Loader, total: int) -> Iterator[recipe.Batch]:
    """`total` batches, going through the loader as often as that takes."""
    done = epoch = 0
    while done < total:
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for batch in loader:
            yield batch
            done += 1
            if done == total:
                return
        epoch += 1


def main() -> None:
    options = recipe.parse_options(__doc__)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    corpus = text.load_corpus()
    training = parallelism.build(options)
    optimizer = training.optimizer
    scheduler = recipe.build_scheduler(optimizer, options)
    history = outcome.LossHistory()
    log = outcome.StepLog(options.out, rank)

    last = time.perf_counter()
    loader = recipe.loader_factory(options, corpus)(rank, world_size)
    for index, (inputs, targets) in enumerate(batches(loader, options.steps)):
        loss = training.forward_backward(inputs, targets)
        training.clip_gradients(1.0)
        if loss is not None:
            history.record(index, loss.item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        now = time.perf_counter()
        log.committed(index, loss, 1000 * (now - last))
        last = now
        if loss is not None and rank in (0, world_size - 1) and not options.quiet:
            print(f"step {index:4d}  loss {loss.item():.4f}", flush=True)

    outcome.write_outcome(
        options.out,
        rank=rank,
        world_size=world_size,
        corpus_sha256=text.corpus_digest(corpus),
        model=training.plain,
        optimizer=optimizer,
        history=history,
        log=log,
    )
    log.close()
    dist.destroy_process_group()
    if "flashrec" in sys.modules:
        raise SystemExit("the reference imported flashrec: it proves nothing")


if __name__ == "__main__":
    main()
