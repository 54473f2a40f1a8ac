"""Front processes (--tokenizer-worker-num): several processes with HTTP and a TokenizerManager that share one port.

    client ──► main process (accepts) ──connection──► front 0, 1, ... ──► schedulers ──► detokenizers ──► the front
                  │   ▲                                 │   ▲
                  │   └── HTTP that is about the whole ─┘   │      (jaxserve.server.http.pass_on)
                  └── state, control requests ──────────────┘

A request is served by the front that got its connection, without the main process. What there is only one of stays there:
worker processes, control requests, sessions, metrics as a whole. Fronts learn from it what holds for all (`main_state`), and
tell it, and each other, what they have to do through shared memory (`board`).
"""
