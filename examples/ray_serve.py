"""A Ray Serve application: `python examples/ray_serve.py [--model MODEL] [--replicas 2] [--gpus 1 | --tpus 4]`, until Ctrl-C.

POST / takes what jaxserve's /generate takes, {"text": ..., "sampling_params": {...}, "stream": true}, and answers as it does.
Serve routes requests to replicas, each with an Engine of its own, and replaces those that fail.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jaxserve import Engine
from jaxserve.server.requests import RequestError

AT_ONCE = 256  # requests of a replica: its engine batches them; Serve's default, 5, would leave it idle


@serve.deployment(max_ongoing_requests=AT_ONCE, health_check_period_s=2)
class Generate:
    def __init__(self, **options: Any) -> None:
        self._engine = Engine(**options)

    async def __call__(self, request: Request) -> Response:
        try:
            body = json.loads(await request.body())
            if not isinstance(body, dict):
                return refusal("The body must be a JSON object.", 400)
            result = await self._engine.async_generate(body.pop("text", None), **body)
        except RequestError as error:
            return refusal(error.message, error.status_code)
        except (ValueError, TypeError) as error:  # no JSON, or a field with the name of a parameter
            return refusal(str(error), 400)
        if isinstance(result, AsyncIterator):
            return StreamingResponse(events(result), media_type="text/event-stream")
        return JSONResponse(result)

    async def check_health(self) -> None:
        """Serve asks every few seconds, and starts another replica in place of one that raises."""
        await asyncio.to_thread(self._engine.get_server_info)

    def __del__(self) -> None:
        self._engine.shutdown()


async def events(replies: AsyncIterator[dict[str, Any]]) -> AsyncIterator[str]:
    """A client that goes away ends this iterator, and so aborts its request."""
    try:
        async for reply in replies:
            yield f"data: {json.dumps(reply)}\n\n"
    except RequestError as error:  # the status has been sent
        yield f"data: {json.dumps(error_body(error.message, error.status_code))}\n\n"
    yield "data: [DONE]\n\n"


def refusal(message: str, status_code: int) -> Response:
    return JSONResponse(error_body(message, status_code), status_code)


def error_body(message: str, status_code: int) -> dict[str, Any]:
    return {"error": {"message": message, "code": status_code}}


def application(options: argparse.Namespace) -> serve.Application:
    resources = {"num_cpus": options.cpus, "num_gpus": options.gpus}
    if options.tpus:
        resources["resources"] = {"TPU": options.tpus}
    deployment = Generate.options(num_replicas=options.replicas, ray_actor_options=resources)
    return deployment.bind(model_path=options.model, tp_size=options.gpus or options.tpus or 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="A folder on all nodes, a name on the Hugging Face Hub, or demo.")
    parser.add_argument("--address", help="Of a running cluster, or auto; default: one of this machine, for this program.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--cpus", type=int, default=1, help="Of each replica.")
    parser.add_argument("--gpus", type=int, default=0, help="Of each replica, over which the model is sharded.")
    parser.add_argument("--tpus", type=int, default=0, help="Of each replica: chips of one host.")
    options = parser.parse_args()
    ray.init(address=options.address)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    with contextlib.suppress(KeyboardInterrupt):
        serve.run(application(options), blocking=True)


if __name__ == "__main__":
    main()
