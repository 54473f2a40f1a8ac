"""What the tests of both pages share."""

from __future__ import annotations

from collections.abc import Callable

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

KEY = "open sésame"
SIZES = {"wide": {"width": 1280, "height": 860}, "phone": {"width": 400, "height": 800}}

OpenPage = Callable[..., Page]

_axe = Axe()


def serious_faults(page: Page) -> list[str]:
    """What axe-core calls serious or critical on a page, each with the element."""
    found = _axe.run(page).response["violations"]
    grave = [fault for fault in found if fault["impact"] in ("serious", "critical")]
    return [f"{fault['id']}: {node['target']}: {node['failureSummary']}" for fault in grave for node in fault["nodes"]]
