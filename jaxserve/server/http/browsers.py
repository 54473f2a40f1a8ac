"""Which web pages may use the server. Browsers send a page's requests to any address, also to a server on the user's own
machine that nobody else can reach; CORS only keeps the replies from the page. So requests of foreign pages are refused before
they run.

    Origin          the page's address: this machine's pages, apps, pages of this server, and those of --allowed-origins may
    Sec-Fetch-Site  what a browser sends without an Origin (<img src>, links): of other sites' pages, only links to pages
    Host            what the browser thinks it talks to: on a server without a key that listens on this machine only, a foreign
                    name means a foreign page whose name now points here (DNS rebinding)

Clients that are no browsers send none of this but Host, and notice nothing.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxserve.server.http.body import shown
from jaxserve.server.http.errors import error_response
from jaxserve.server.requests import RequestError

# Origins that no web page can have: of applications which show their pages in a browser of their own, and of files.
_APP_SCHEMES = frozenset(("app", "file", "tauri", "vscode-file", "vscode-webview"))
# Names that cannot belong to a web site.
_PRIVATE_SUFFIXES = (".localhost", ".internal")


class BrowserPolicy:
    """What the options say about pages and names. It sees header values, never a request."""

    def __init__(self, host: str, allowed_origins: str | None, has_key: bool) -> None:
        named = allowed_origins.split(",") if allowed_origins else ()
        self._origins = frozenset(origin.strip().lower() for origin in named)
        self.allows_everything = "*" in self._origins
        self._checks_host = _is_this_machine(host) and not has_key and not self.allows_everything
        self._hosts = {host.lower(), *(_host_of(origin) for origin in self._origins)}

    def allows_origin(self, origin: str, hosts: Collection[str]) -> bool:
        """`hosts` are the values of the request's Host header."""
        origin = origin.lower()
        if self.allows_everything or origin in self._origins:
            return True
        scheme, _, address = origin.partition("://")
        if scheme in _APP_SCHEMES:
            return True
        return scheme in ("http", "https") and (_is_this_machine(_host_of(origin)) or [address] == [h.lower() for h in hosts])

    def allows_host(self, value: str) -> bool:
        host = _host_of(f"//{value}").rstrip(".")
        if not self._checks_host or not value or host in self._hosts or host == "localhost" or host.endswith(_PRIVATE_SUFFIXES):
            return True
        return _ip(host) is not None  # rebinding takes a name


def _is_this_machine(host: str) -> bool:
    address = _ip(host)
    if address is None:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _host_of(url: str) -> str:
    """In small letters, without port and brackets; what is no address has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


class BrowserGuard:
    """Refuses what the policy does not allow. `control_paths` change something, whatever the method."""

    def __init__(self, app: ASGIApp, policy: BrowserPolicy, control_paths: Collection[str]) -> None:
        self._app = app
        self._policy = policy
        self._control_paths = frozenset(control_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reason = self._objection(scope) if scope["type"] == "http" else None
        if reason is None:
            await self._app(scope, receive, send)
            return
        error = RequestError(reason, 403, "PermissionDeniedError", code="forbidden")
        await error_response(scope["path"], error)(scope, receive, send)

    def _objection(self, scope: Scope) -> str | None:
        headers, policy = Headers(scope=scope), self._policy
        hosts = headers.getlist("host")
        for host in hosts:
            if not policy.allows_host(host):
                return (
                    f"This server serves its own machine and does not answer to the name {shown(host)}: use http://127.0.0.1, "
                    "set an API key, or add the address under which it is reached to --allowed-origins."
                )
        for origin in headers.getlist("origin"):
            if not policy.allows_origin(origin, hosts):
                return f"Web pages of {shown(origin)} may not use this server; --allowed-origins names those that may."
        if "origin" in headers or headers.get("sec-fetch-site") != "cross-site" or policy.allows_everything:
            return None
        is_link = headers.get("sec-fetch-mode") == "navigate" and scope["method"] == "GET"
        if is_link and scope["path"].rstrip("/") not in self._control_paths:
            return None
        return "Web pages of other sites may not use this server; --allowed-origins names those that may."
