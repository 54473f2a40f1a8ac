"""Takes docs/images/ of the web pages from a running server: `python scripts/web_pictures.py http://127.0.0.1:30000`, best with
the demo model and under load, which the dashboard watches for two minutes. Needs chromium."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "images"
WATCHED_MS = 120_000


def playground(page: Page) -> None:
    page.get_by_label("Thinking").select_option("on")
    ask(page, "What is 27 + 45?")
    page.get_by_text("Thought", exact=True).click()
    page.get_by_label("Temperature").fill("1")
    answer = page.locator("article.assistant").nth(1)
    ask(page, "What is a radix cache?")
    answer.get_by_role("button", name="Tokens").click()
    tokens = answer.locator(".token")
    chances = tokens.evaluate_all("all => all.map(one => Number(one.style.getPropertyValue('--p')))")
    tokens.nth(chances.index(min(chances))).hover()  # what is likeliest to have other ways


def ask(page: Page, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    page.wait_for_selector("body:not(.busy) article.assistant:last-child[aria-busy=false]")


def take(browser: Browser, url: str) -> None:
    talk = browser.new_page(viewport={"width": 1100, "height": 620}, color_scheme="light")
    talk.goto(f"{url}/playground")
    playground(talk)
    talk.screenshot(path=FOLDER / "playground.png")
    watch = browser.new_page(viewport={"width": 1160, "height": 700}, color_scheme="dark")
    watch.goto(f"{url}/dashboard")
    watch.wait_for_timeout(WATCHED_MS)
    watch.screenshot(path=FOLDER / "dashboard.png")
    watch.locator("section", has=watch.locator("#requests")).screenshot(path=FOLDER / "requests.png")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        take(browser, sys.argv[1])
