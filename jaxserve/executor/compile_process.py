"""A process that compiles programs of a server on CPU, at low priority, into the cache of executables.

`python -m jaxserve.executor.compile_process` reads an Order from its standard input and prints the name of each program
that it has put into the cache. It ends with its work, or when its standard input does: then nobody wants it any more.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import IO

import msgspec

from jaxserve.executor.background import Order

_LOWEST_PRIORITY = 19


def main() -> None:
    os.nice(_LOWEST_PRIORITY)  # before JAX starts threads, which inherit it
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    compile_order(order, sys.stdout)
    sys.stdout.flush()
    os._exit(0)  # nothing is worth the time that taking down JAX takes


def compile_order(order: Order, out: IO[str]) -> None:
    """Writes a line to `out` for each program as it is cached, here or by another such process."""
    from jaxserve.executor.build import draw_blueprints
    from jaxserve.executor.compilation import ProgramCompiler
    from jaxserve.executor.programs import ProgramKey, program_name
    from jaxserve.executor.warmup import cache_folder

    args = order.args.replace(device="cpu")
    (blueprint,) = draw_blueprints(args)  # a pipeline has all its programs from the start
    compiler = ProgramCompiler.of(blueprint, order.num_pages, cache_folder(args.compilation_cache_dir))
    keys = {program_name(key): key for key in blueprint.program_set.all}
    printing = threading.Lock()  # else lines of two threads run into each other

    def on_result(key: ProgramKey, program: object) -> None:
        with printing:
            print(program_name(key), file=out, flush=True)

    compiler.work(keys[name] for name in order.names).run(on_result)


def _end_with(stream: IO[bytes]) -> None:
    stream.read()
    os._exit(1)


if __name__ == "__main__":
    main()
