"""The only worker of a host that follows: builds the same runner as host 0 and runs what host 0 runs, until host 0 ends."""

from __future__ import annotations

import os

from jaxserve.hosts import Replay
from jaxserve.messages import HOST, TOKENIZER, WorkerAddress, WorkerReady
from jaxserve.server.garbage import importing, settle_garbage_collector
from jaxserve.server.worker_process import WorkerContext, exit_now, run_worker


def work(context: WorkerContext) -> None:
    # Here and not above: signals and the parent's death are taken care of before the seconds that importing JAX takes.
    with importing():
        from jaxserve.server.building import build
        from jaxserve.server.hosts import following

    args = context.args
    with following(args, os.environ, lambda reason: _end(context, reason)) as follower:
        built = build(context)
        context.channels.send_once(WorkerAddress(TOKENIZER), WorkerReady(worker=context.address))
        settle_garbage_collector()
        follower.start_steps()
        Replay(built.runner, follower, args.node_rank, model_path=args.model_path, load_format=args.load_format).run()


def _end(context: WorkerContext, reason: str) -> None:
    """Called in a thread, while the main one may wait for devices that are gone."""
    if reason:
        context.last_words(reason)
    exit_now(1 if reason else 0)


if __name__ == "__main__":
    exit_now(run_worker(HOST, work))
