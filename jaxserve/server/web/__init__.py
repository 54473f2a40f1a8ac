"""The pages that the server brings along: /playground to talk with the model, /dashboard to watch it work.

Plain HTML, CSS and JavaScript modules under `static/`, served as they are: nothing is built, nothing comes from elsewhere, and
every address in them is relative, so that they work behind any proxy. They use the public API and know nothing else.
"""

from jaxserve.server.web.files import front_page
from jaxserve.server.web.routes import router

__all__ = ["front_page", "router"]
