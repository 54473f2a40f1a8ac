"""/dashboard in a browser: its numbers are those of /metrics, whoever runs and waits is seen, and nobody is shut out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import re
import threading
from collections.abc import Iterator

import pytest
from live_server import LiveServer
from pages import KEY, SIZES, OpenPage, serious_faults
from playwright.sync_api import Page, expect
from server_process import Server

SAMPLE = re.compile(r"^jaxserve:(\w+)(?:\{.*\})? (\S+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def worked(demo: LiveServer) -> LiveServer:
    """The demo's server, idle, after six requests whose prompts are cached in part."""
    work(demo, 6)
    demo.wait_idle()
    return demo


def work(server: LiveServer, num: int, tokens: int = 40) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        bodies = [{"text": "What is a radix cache? " * 9 + str(i % 3), "sampling_params": sampling(tokens)} for i in range(num)]
        assert all(pool.map(lambda body: server.generate(**body), bodies))


@contextlib.contextmanager
def keeping_busy(server: LiveServer) -> Iterator[None]:
    is_enough = threading.Event()

    def keep_on() -> None:
        while not is_enough.is_set():
            work(server, 8, 200)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        busy = pool.submit(keep_on)
        try:
            yield
        finally:
            is_enough.set()
        busy.result()


def sampling(tokens: int) -> dict[str, object]:
    return {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0}


def totals(server: LiveServer) -> dict[str, float]:
    """/metrics, read in another way than the page does."""
    found: dict[str, float] = {}
    for name, value in SAMPLE.findall(server.get("/metrics").text):
        found[name] = found.get(name, 0.0) + float(value)
    return found


def number(page: Page, label: str) -> str:
    return page.locator("dl > div", has=page.get_by_text(label, exact=True)).locator("dd").inner_text()


def test_its_numbers_are_those_of_metrics(open_page: OpenPage, worked: LiveServer) -> None:
    page = open_page(f"{worked.url}/dashboard")
    expect(page.locator("#state")).to_have_text("live")
    page.get_by_role("button", name="Pause").click()
    now = totals(worked)
    for label, metric in {
        "Running": "num_running_reqs",
        "Waiting": "num_queue_reqs",
        "Requests ended": "num_requests_total",
        "Retractions": "num_retracted_requests_total",
        "Tokens in the prefix cache": "num_cached_tokens",
        "Tokens evicted": "evicted_tokens_total",
        "Prompt tokens from the cache": "cached_tokens_total",
        "Requests aborted": "num_aborted_requests_total",
    }.items():
        assert number(page, label) == f"{now.get(metric, 0):,.0f}", label
    assert now["num_requests_total"] >= 6 and now["cached_tokens_total"] > 0
    for label, metric in {"KV cache usage": "token_usage", "Cache hit rate": "cache_hit_rate"}.items():
        assert number(page, label) == f"{100 * now[metric]:.1f} %"
    pool = page.locator(".pool .legend b").all_inner_texts()
    assert pool == [f"{now[f'kv_{part}_tokens']:,.0f}" for part in ("used", "evictable", "available")]
    first_token = page.get_by_role("row", name="To the first token").get_by_role("cell").first
    expect(first_token).to_have_text(re.compile(r"^[\d.]+ (µs|ms|s)$"))


def test_it_shows_who_runs_and_how_requests_went(open_page: OpenPage, worked: LiveServer) -> None:
    page = open_page(f"{worked.url}/dashboard")
    rows = page.locator("#requests tbody tr")
    expect(rows.nth(5)).to_be_visible()
    expect(rows.first).to_contain_text("length")
    assert rows.first.locator(".part.prefill").count() >= 1 and rows.first.locator(".part.decode").count() == 1
    with keeping_busy(worked):
        expect(page.locator(".tiles dd").first).not_to_have_text("0")
        expect(page.locator("#chart-requests .legend b").first).not_to_have_text("0")
        expect(rows.filter(has_text="runs").first).to_be_visible()
    expect(page.locator("#stage-table tbody tr")).to_have_count(6)
    page.get_by_label("Bars").select_option("own")
    expect(page.locator(".tiles dd").first).to_have_text("0")


COUNTS = """
jaxserve:wait_seconds_bucket{le="0.1",stage="a \\"b\\", }"} 2.0
jaxserve:wait_seconds_bucket{le="1.0",stage="a \\"b\\", }"} 8.0
jaxserve:wait_seconds_bucket{le="+Inf",stage="a \\"b\\", }"} 10.0
other:wait_seconds_bucket{le="0.1"} 99
jaxserve:steps_total 1e+03
"""


def test_percentiles_are_as_prometheus_reckons(open_page: OpenPage, worked: LiveServer) -> None:
    page = open_page(f"{worked.url}/dashboard")
    found = page.evaluate(
        """async (text) => {
            const { Metrics, quantile } = await import("./web/metrics.js");
            const now = new Metrics(text);
            const one = (q) => quantile(null, now, "wait_seconds", q, { stage: 'a "b", }' });
            return [one(0.5), one(0.1), one(0.99), quantile(now, now, "wait_seconds", 0.5), now.sum("steps_total")];
        }""",
        COUNTS,
    )
    # 5 of 10: half of the way through the bucket of 6 above 0.1; 9.9 of 10: the last bound.
    assert found == [pytest.approx(0.1 + 0.9 * 0.5), pytest.approx(0.05), 1, None, 1000]


def test_a_request_that_was_retracted(open_page: OpenPage, worked: LiveServer) -> None:
    """Its prompt is computed twice; that one does not see on a server with enough memory."""
    times = {
        "queue_entry_s": 1.0, "first_scheduled_s": 2.0, "first_token_s": 3.0, "finished_s": 10.0,
        "chunks": [[2.0, 2.5, 64], [2.5, 3.0, 16], [6.0, 7.0, 90]], "retractions_s": [5.0], "num_retractions": 1,
    }  # fmt: skip
    request = {"rid": "r", "received_s": 0.5, "answered_s": 10.5, "prompt_tokens": 80, "finish": "stop", "scheduler": times}
    page = open_page(f"{worked.url}/dashboard")
    page.route("**/recent_requests?*", lambda route: route.fulfill(json={"now_s": 12.0, "requests": [request]}))
    row = page.locator("#requests tbody tr", has_text="stop, 1 × retracted")
    expect(row).to_have_count(1)
    assert row.locator(".part.prefill").count() == 3
    lines = row.locator(".retraction, .part.queue").evaluate_all("all => all.map(one => [one.style.left, one.style.width])")
    assert lines == [["5%", "10%"], ["45%", ""]]
    expect(row.get_by_role("cell").nth(2)).to_have_text("1.00 s")  # in the queue


def test_without_metrics_it_says_how_to_have_them(open_page: OpenPage, slow: Server) -> None:
    page = open_page(f"{slow.url}/llm/dashboard", allowed="Failed to load resource")
    expect(page.locator("#state")).to_have_text("needs an API key")
    page.get_by_label("This server asks for an API key").fill(KEY)
    page.keyboard.press("Enter")
    expect(page.get_by_text("--no-enable-metrics")).to_be_visible()
    expect(page.locator("#numbers")).to_be_hidden()
    expect(page.locator("#state")).to_have_text("live")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(open_page: OpenPage, worked: LiveServer, scheme: str, size: str) -> None:
    page = open_page(f"{worked.url}/dashboard", color_scheme=scheme, viewport=SIZES[size], bypass_csp=True)
    expect(page.locator("#requests tbody tr").first).to_be_visible()
    expect(page.locator("#stage-table tbody tr").first).to_be_visible()
    assert serious_faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= SIZES[size]["width"]
