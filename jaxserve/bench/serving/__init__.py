"""`jaxserve bench serving`: load against a server of OpenAI's or SGLang's APIs, and how well it bore that.

    options -> datasets -> tasks -> clients (processes: client, sending, apis) -> outcomes -> metrics -> record -> report

`run` goes through it once, for the command line and for a sweep. Nothing here imports JAX, or the server's code: what is
measured may be any server, and the processes that measure are small.
"""
