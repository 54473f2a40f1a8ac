"""Whether a chat template has a place for messages of the role system amid the others. Claude Code sends such."""

from __future__ import annotations

from jaxserve.server.http.service import GenerationService
from jaxserve.server.requests import RequestError

_MARKER = "inlinesystem"
_TRIAL = [{"role": "user", "content": "a"}, {"role": "system", "content": _MARKER}]


class InlineSystem:
    """Found out by trying, once: some templates refuse it, some leave the text out."""

    def __init__(self, service: GenerationService) -> None:
        self._service = service
        self._is_rendered: bool | None = None

    def is_rendered(self) -> bool:
        """Raises RequestError while the server is starting."""
        if self._is_rendered is None:
            try:
                ids = self._service.apply_chat_template(_TRIAL)
            except RequestError as error:
                if error.status_code != 400:
                    raise
                self._is_rendered = False
            else:
                self._is_rendered = _MARKER in self._service.decode(ids, False)
        return self._is_rendered
