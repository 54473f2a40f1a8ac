"""JSON that was made in blocks: each is sent when the connection has room for it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.responses import Response
from starlette.types import Receive, Scope, Send


class BlockResponse(Response):
    def __init__(self, blocks: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json", headers={"Content-Length": str(sum(map(len, blocks)))})
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        *blocks, last = self._blocks
        for block in blocks:
            await send({"type": "http.response.body", "body": block, "more_body": True})
        await send({"type": "http.response.body", "body": last, "more_body": False})
