"""`jaxserve serve` with the fake scheduler: a script of server_process.py, with ServerArgs as one JSON argument."""

from __future__ import annotations

import json
import sys

import fake_scheduler

from jaxserve.config import ServerArgs
from jaxserve.server.launch import launch_server

if __name__ == "__main__":
    args = ServerArgs(**json.loads(sys.argv[1]))
    sys.exit(launch_server(args, fake_scheduler.commands(args.dp_size, args.detokenizer_worker_num)))
