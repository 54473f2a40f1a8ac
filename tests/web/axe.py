"""What axe-core finds on a page."""

from __future__ import annotations

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page

_axe = Axe()


def serious_faults(page: Page) -> list[str]:
    """Those it calls serious or critical, each with the element."""
    found = _axe.run(page).response["violations"]
    grave = [fault for fault in found if fault["impact"] in ("serious", "critical")]
    return [f"{fault['id']}: {node['target']}: {node['failureSummary']}" for fault in grave for node in fault["nodes"]]
