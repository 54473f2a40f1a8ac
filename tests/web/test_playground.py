"""/playground in a browser, against servers that run."""

from __future__ import annotations

import json
import re
import time

import httpx
import pytest
from live_server import LiveServer
from pages import KEY, SIZES, OpenPage, serious_faults
from playwright.sync_api import Locator, Page, expect
from server_process import Server


@pytest.fixture
def page(open_page: OpenPage, demo: LiveServer) -> Page:
    """The playground of the demo model, greedy."""
    page = open_page(f"{demo.url}/playground")
    page.get_by_label("Temperature").fill("0")
    return page


def ask(page: Page, text: str) -> Locator:
    """Sends a message; the answer once it is whole."""
    num_before = page.locator("article.assistant").count()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")
    answer = page.locator("article.assistant").nth(num_before)
    expect(answer).to_have_attribute("aria-busy", "false")
    return answer


def test_a_chat_goes_on(page: Page) -> None:
    expect(page.locator("#model")).to_have_text("demo")
    first = ask(page, "What is 12 + 30?")
    expect(first.locator(".text")).to_have_text("12 + 30 = 42")
    expect(first.locator(".stats")).to_contain_text(re.compile(r"\d+ ms to the first token\s*\d+ tok/s\s*\d+ tokens"))
    expect(page.get_by_role("status")).to_have_text("12 + 30 = 42")  # what a screen reader is told
    ask(page, "What is 27 + 45?")
    expect(page.locator("article")).to_have_count(4)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_label("Message", exact=True)).to_be_focused()


def test_an_edited_message_and_a_new_answer_are_versions(page: Page) -> None:
    ask(page, "What is 12 + 30?")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Your message").fill("What is 27 + 45?")
    page.keyboard.press("Enter")
    expect(page.locator("article.assistant .text")).to_have_text("27 + 45 = 72")
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator("article.assistant .versions")).to_have_text("‹2/2›")
    page.locator("article.user").get_by_role("button", name="Previous version").click()
    expect(page.locator("article.assistant .text")).to_have_text("12 + 30 = 42")


def test_json_obeys_the_schema(page: Page) -> None:
    page.get_by_label("Format").select_option("json_schema")
    schema = {"type": "object", "properties": {"colour": {"enum": ["red", "green"]}}, "required": ["colour"]}
    page.get_by_label("JSON schema").fill(json.dumps(schema))
    answer = ask(page, "hi")
    assert json.loads(answer.locator("pre.json").inner_text())["colour"] in ("red", "green")
    expect(answer.locator(".verdict")).to_have_text("Valid: the answer obeys the schema.")
    page.get_by_label("Most tokens").fill("3")
    expect(ask(page, "hi").locator(".verdict")).to_have_text("This is not complete JSON.")


def test_settings_that_cannot_be_sent_are_named(page: Page) -> None:
    page.get_by_label("Tools the model may call").fill("[{")
    page.get_by_label("Message", exact=True).fill("hi")
    page.keyboard.press("Enter")
    expect(page.locator("#hint")).to_contain_text("The list of tools is not JSON")
    expect(page.get_by_label("Tools the model may call")).to_be_focused()
    expect(page.locator("article")).to_have_count(0)


def test_a_tool_is_called_and_answered(page: Page) -> None:
    page.get_by_role("button", name="Insert an example").click()
    answer = ask(page, "What is the weather in Paris?")
    expect(answer.locator(".call-name")).to_have_text("Calls get_weather")
    assert json.loads(answer.locator(".call pre").inner_text()) == {"city": "Paris"}
    answer.get_by_label("Result of get_weather").fill('{"temperature": 21, "conditions": "sunny"}')
    answer.get_by_role("button", name="Send the result").click()
    last = page.locator("article.assistant").nth(1)
    expect(last.locator(".text")).to_contain_text("21")
    expect(last).to_have_attribute("aria-busy", "false")


def test_thinking_is_folded_away(page: Page) -> None:
    page.get_by_label("Thinking").select_option("on")
    answer = ask(page, "What is 27 + 45?")
    expect(answer.locator(".text")).to_have_text("27 + 45 = 72")
    thought = answer.get_by_text("7 + 5 = 12")
    expect(thought).to_be_hidden()
    answer.get_by_text("Thought", exact=True).click()
    expect(thought).to_be_visible()
    page.get_by_label("Thinking").select_option("off")
    expect(ask(page, "What is 27 + 45?").locator(".thinking")).to_be_hidden()


def test_tokens_show_alternatives_and_branch(page: Page) -> None:
    """With the mouse."""
    answer = ask(page, "What is a radix cache?")
    whole = answer.locator(".text").inner_text()
    answer.get_by_role("button", name="Tokens").click()
    tokens = answer.locator(".token")
    assert "".join(tokens.all_inner_texts()[:-1]) == whole
    tokens.nth(4).hover()
    panel = answer.get_by_role("group", name=re.compile("Alternatives to"))
    expect(panel.locator(".alternative")).to_have_count(5)
    expect(panel.locator(".drawn .percent")).to_have_text(re.compile(r"\d %"))
    other = panel.get_by_role("button").first
    text = other.locator("code").inner_text()
    other.click()
    branch = page.locator("article.assistant")
    expect(branch.locator(".versions")).to_have_text("‹2/2›")
    expect(branch).to_have_attribute("aria-busy", "false")
    assert branch.locator(".token").all_inner_texts()[:5] == [*tokens.all_inner_texts()[:4], text]
    told = branch.locator(".token").all_inner_texts()[:-1]
    branch.get_by_role("button", name="Text").click()
    assert branch.locator(".text").inner_text() == "".join(told)


def test_alternatives_are_in_sight(open_page: OpenPage, demo: LiveServer) -> None:
    """Also those of a token at the lower end."""
    page = open_page(f"{demo.url}/playground", viewport={"width": 400, "height": 560})
    ask(page, "What is 12 + 30?")
    answer = ask(page, "What is a radix cache?")
    answer.get_by_role("button", name="Tokens").click()
    for index in (0, -1):
        answer.locator(".token").nth(index).hover()
        panel, area = answer.locator(".alternatives").bounding_box(), page.locator("#scroll").bounding_box()
        assert panel is not None and area is not None
        assert area["y"] <= panel["y"] and panel["y"] + panel["height"] <= area["y"] + area["height"]
        assert area["x"] <= panel["x"] and panel["x"] + panel["width"] <= area["x"] + area["width"]


def test_tokens_by_keyboard(page: Page) -> None:
    answer = ask(page, "What is 12 + 30?")
    answer.get_by_role("button", name="Tokens").press("Enter")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    expect(answer.locator(".token").first).to_be_focused()
    page.keyboard.press("End")
    expect(answer.locator(".token").last).to_be_focused()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    other = answer.get_by_role("button", name=re.compile("^Go on with")).first
    expect(other).to_be_focused()
    page.keyboard.press("Escape")
    expect(answer.locator(".token").nth(-2)).to_be_focused()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.locator(".versions")).to_have_text("‹2/2›")


def test_a_branch_within_thinking_still_thinks(page: Page) -> None:
    page.get_by_label("Thinking").select_option("on")
    answer = ask(page, "What is 27 + 45?")
    answer.get_by_role("button", name="Tokens").click()
    answer.locator(".token").nth(3).click()
    answer.get_by_role("button", name=re.compile("^Go on with")).first.click()
    branch = page.locator("article.assistant")
    expect(branch.locator(".versions")).to_have_text("‹2/2›")
    expect(branch).to_have_attribute("aria-busy", "false")
    expect(branch.locator(".thinking")).to_be_visible()
    branch.get_by_role("button", name="Text").click()
    expect(branch.locator(".text")).to_contain_text("27 + 45")
    expect(branch.locator(".text")).not_to_contain_text("think")


def test_what_the_model_says_is_text(page: Page) -> None:
    evil = "<img src=x onerror=alert(1)><script>alert(2)</script>"
    page.evaluate("text => import('./web/dom.js').then(({textBlocks, byId}) => byId('welcome').append(...textBlocks(text)))",
                  f"{evil}\n```html\n{evil}\n```")  # fmt: skip
    assert page.locator("#welcome img, #welcome script").count() == 0
    expect(page.locator("#welcome figure.code code")).to_have_text(evil)


def num_running(server: Server) -> int:
    reply = httpx.get(f"{server.url}/server_info", headers={"x-api-key": KEY.encode()})
    return reply.json()["internal_states"][0]["num_running_reqs"]


def test_a_key_is_asked_for_and_stop_stops_the_server(open_page: OpenPage, slow: Server) -> None:
    page = open_page(f"{slow.url}/llm/playground/", allowed="401")
    expect(page.locator("#model")).to_have_text("needs an API key")
    expect(page.get_by_label("API key")).to_be_focused()
    page.get_by_label("API key").fill("wrong")
    page.get_by_label("Message", exact=True).fill("hello")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_have_text("The API key is wrong.")
    page.get_by_label("API key").fill(KEY)
    page.get_by_label("API key").blur()
    expect(page.locator("#model")).to_have_text("model")
    assert KEY not in json.dumps(page.evaluate("() => Object.values(localStorage)"))
    page.get_by_label("Most tokens").fill("480")  # 9.6 s
    page.get_by_label("Token probabilities").select_option("Off")  # the fake has none
    page.get_by_role("button", name="Try again").click()
    expect(page.locator("article.assistant .text")).not_to_be_empty()
    assert num_running(slow) == 1
    begun_s = time.monotonic()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("article.assistant .stats")).to_contain_text("stopped")
    while num_running(slow):
        assert time.monotonic() - begun_s < 5
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_server_that_has_gone_is_named(open_page: OpenPage, demo: LiveServer) -> None:
    page = open_page(f"{demo.url}/playground", allowed="net::ERR_FAILED")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    answer = ask(page, "hi")
    expect(answer.get_by_role("alert")).to_have_text("The server cannot be reached. Does it still run?")
    page.unroute("**/v1/chat/completions")
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".versions")).to_have_text("‹2/2›")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(open_page: OpenPage, demo: LiveServer, scheme: str, size: str) -> None:
    page = open_page(f"{demo.url}/playground", color_scheme=scheme, viewport=SIZES[size], bypass_csp=True)
    assert serious_faults(page) == []
    page.get_by_role("button", name="Let it call a tool").click()
    expect(page.locator("article.assistant")).to_have_attribute("aria-busy", "false")
    ask(page, "What is 12 + 30?").get_by_role("button", name="Tokens").click()
    page.locator(".token").nth(2).click()
    # The darkest there can be.
    page.evaluate("document.querySelectorAll('.token').forEach(token => token.style.setProperty('--p', 0))")
    assert serious_faults(page) == []
    if size == "phone":
        page.get_by_role("button", name="Settings").click()
        assert serious_faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
