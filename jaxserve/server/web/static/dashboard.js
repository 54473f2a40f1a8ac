// The dashboard: every second /metrics, and the time lines of the newest requests.

import { ApiError, apiKey, getJson, getText } from "./api.js";
import { LineChart } from "./chart.js";
import { announce, byId, el } from "./dom.js";
import { Metrics, count, duration, increase, percent, quantile, short } from "./metrics.js";
import { PARTS, rows } from "./waterfall.js";

const PERIOD_MS = 1000;
const WINDOW_S = 120;
const LATENCY_S = 60;
const STAGES_S = 10;
const MAX_REQUESTS = 40;

const history = []; // {timeS, metrics}, the newest last
let isPaused = false;

// ---- what is shown

const perS = (value) => `${short(value)}/s`;
const TILES = [
  ["Running", (now) => count(now.sum("num_running_reqs"))],
  ["Waiting", (now) => count(now.sum("num_queue_reqs"))],
  ["Output tokens", (now, last) => rateText(last, now, "realtime_tokens_total", { mode: "decode" })],
  ["Prompt tokens", (now, last) => rateText(last, now, "realtime_tokens_total", { mode: "prefill_compute" })],
  ["KV cache usage", (now) => percent(now.max("token_usage"))],
  ["Cache hit rate", (now) => percent(now.max("cache_hit_rate"))],
  ["Requests ended", (now) => count(now.sum("num_requests_total"))],
  ["Retractions", (now) => count(now.sum("num_retracted_requests_total"))],
];
const CACHE = [
  ["Tokens in the prefix cache", "num_cached_tokens"],
  ["Tokens evicted", "evicted_tokens_total"],
  ["Prompt tokens from the cache", "cached_tokens_total"],
  ["Requests aborted", "num_aborted_requests_total"],
];
const LATENCIES = [
  ["To the first token", "time_to_first_token_seconds"],
  ["Between tokens", "inter_token_latency_seconds"],
  ["Whole request", "e2e_request_latency_seconds"],
  ["In the queue", "queue_time_seconds"],
];
const STAGES = [
  ["receive", "Take in messages"], ["schedule", "Plan a step"], ["launch", "Launch it"], ["wait", "Wait for the device"],
  ["process", "Take in results"], ["idle", "Nothing to do"],
];
const POOLS = [["kv", "Layers that keep all tokens"], ["swa", "Layers with a sliding window"]];

const rate = (last, now, name, wanted) => (last ? increase(last.metrics, now.metrics, name, wanted) / (now.timeS - last.timeS) : null);
const rateText = (last, now, name, wanted) => {
  const value = rate(last, { metrics: now, timeS: history.at(-1).timeS }, name, wanted);
  return value === null ? "–" : perS(value);
};

const chart = (id, title, lines, options) => new LineChart(byId(id), title, lines, { windowS: WINDOW_S, ...options });
const labels = (...names) => names.map((label) => ({ label }));
const charts = {
  requests: chart("chart-requests", "Requests", labels("running", "waiting"), { least: 4, format: short }),
  throughput: chart("chart-throughput", "Tokens per second", labels("output", "prompt, computed", "prompt, from the cache"), { least: 10, format: short }),
  usage: chart("chart-usage", "KV cache", labels("KV cache usage", "cache hit rate"), { format: percent, scaleFormat: (share) => `${Math.round(100 * share)} %` }),
  latency: chart("chart-latency", "Latency, of the last 10 seconds", labels("first token P50", "first token P99", "between tokens P50", "between tokens P99"), { least: 0.01, format: duration }),
  steps: chart("chart-steps", "Steps per second", labels("decode", "prefill", "mixed"), { least: 4, format: short }),
};
byId("parts").append(...PARTS.map(([kind, text]) => el("li", {}, el("span", { class: `swatch part ${kind}` }), text)),
  el("li", {}, el("span", { class: "swatch retraction" }), "retracted"));

/** The sample of about `ageS` seconds ago. */
const ago = (ageS) => history.find(({ timeS }) => timeS >= history.at(-1).timeS - ageS - 0.5);

function showMetrics() {
  const now = history.at(-1);
  const last = history.at(-2);
  const { metrics } = now;
  byId("tiles").replaceChildren(...TILES.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value(metrics, last)))));
  byId("cache").replaceChildren(...CACHE.map(([name, metric]) =>
    el("div", {}, el("dt", {}, name), el("dd", {}, count(metrics.sum(metric))))));
  byId("pools").replaceChildren(...POOLS.map((pool) => poolView(metrics, ...pool)).filter(Boolean));
  const tokens = (mode) => rate(last, now, "realtime_tokens_total", { mode });
  charts.requests.add(now.timeS, [metrics.sum("num_running_reqs"), metrics.sum("num_queue_reqs")]);
  charts.throughput.add(now.timeS, [tokens("decode"), tokens("prefill_compute"), tokens("prefill_cache")]);
  charts.usage.add(now.timeS, [metrics.max("token_usage"), metrics.max("cache_hit_rate")]);
  charts.steps.add(now.timeS, ["decode", "prefill", "mixed"].map((kind) => rate(last, now, "num_steps_total", { kind })));
  showLatency(metrics);
  showStages(now);
}

function poolView(metrics, prefix, label) {
  const [used, evictable, available] = ["used", "evictable", "available"].map((part) => metrics.sum(`${prefix}_${part}_tokens`));
  const total = used + evictable + available;
  if (!total) return null; // the model has no such layers
  const part = (kind, tokens) => {
    const element = el("span", { class: kind });
    element.style.width = `${(100 * tokens) / total}%`;
    return element;
  };
  const told = [["used", used], ["cached", evictable], ["free", available]];
  return el("div", { class: "pool" }, el("h3", {}, `${label}: ${count(total)} tokens`),
    el("div", { class: "stacked", "aria-hidden": "true" }, told.map(([kind, tokens]) => part(kind, tokens))),
    el("ul", { class: "legend" }, told.map(([kind, tokens]) =>
      el("li", {}, el("span", { class: `swatch ${kind}` }), `${kind} `, el("b", {}, count(tokens))))));
}

function showLatency(metrics) {
  const since = ago(LATENCY_S);
  const isOver = history.at(-1).timeS - since.timeS >= LATENCY_S - 1;
  const before = isOver ? since.metrics : null;
  byId("latency-note").textContent = isOver ? "Of the last minute" : "Since the server's start";
  const cells = (name) => [0.5, 0.9, 0.99].map((q) => el("td", {}, duration(quantile(before, metrics, name, q))));
  byId("latency").tBodies[0].replaceChildren(...LATENCIES.map(([label, name]) =>
    el("tr", {}, el("th", { scope: "row" }, label), ...cells(name))));
  const recent = ago(10).metrics;
  const values = ["time_to_first_token_seconds", "inter_token_latency_seconds"].flatMap((name) =>
    [0.5, 0.99].map((q) => (history.length < 2 ? null : quantile(recent, metrics, name, q))));
  charts.latency.add(history.at(-1).timeS, values);
}

function showStages(now) {
  const since = ago(STAGES_S);
  const spent = STAGES.map(([stage]) => increase(since.metrics, now.metrics, "scheduler_stage_seconds_total", { stage }));
  const total = spent.reduce((sum, value) => sum + value, 0);
  const steps = increase(since.metrics, now.metrics, "num_steps_total");
  byId("stages").replaceChildren(...STAGES.map(([stage], i) => {
    const element = el("span", { class: `stage-${stage}` });
    element.style.width = `${total ? (100 * spent[i]) / total : 0}%`;
    return element;
  }));
  byId("stage-table").tBodies[0].replaceChildren(...STAGES.map(([stage, label], i) => el("tr", {},
    el("th", { scope: "row" }, el("span", { class: `swatch stage-${stage}` }), label),
    el("td", {}, total ? percent(spent[i] / total) : "–"),
    el("td", {}, steps && stage !== "idle" ? duration(spent[i] / steps) : "–"))));
}

function showRequests({ requests, now_s: nowS }) {
  const newest = requests.slice(-MAX_REQUESTS);
  byId("no-requests").hidden = newest.length > 0;
  byId("requests").tBodies[0].replaceChildren(...(newest.length ? rows(newest, nowS, byId("clock").value === "own") : []));
}

// ---- once a second

async function tick() {
  if (!isPaused && !document.hidden) {
    try {
      const [hasMetrics, recent] = await Promise.all([takeMetrics(), getJson(`recent_requests?limit=${MAX_REQUESTS}`)]);
      showRequests(recent);
      byId("no-metrics").hidden = hasMetrics;
      byId("numbers").hidden = !hasMetrics;
      byId("ask-key").hidden = true;
      if (!isPaused) say("live");
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      if (error.status === 401) askKey();
      say(error.status === 401 ? "needs an API key" : error.message);
    }
  }
  setTimeout(tick, PERIOD_MS);
}

/** Whether the server has any. */
async function takeMetrics() {
  let text;
  try {
    text = await getText("metrics");
  } catch (error) {
    if (error.status !== 404) throw error;
    return false;
  }
  const timeS = performance.now() / 1000;
  const metrics = new Metrics(text);
  // A server that has started anew counts from 0.
  const before = history.at(-1)?.metrics;
  if (before && metrics.sum("num_steps_total") < before.sum("num_steps_total")) history.length = 0;
  history.push({ timeS, metrics });
  while (history[0].timeS < timeS - LATENCY_S - 2) history.shift();
  showMetrics();
  return true;
}

function say(text) {
  const place = byId("state");
  if (place.textContent !== text) place.textContent = text; // screen readers hear of changes only
}

function askKey() {
  const form = byId("ask-key");
  if (!form.hidden) return;
  form.hidden = false;
  byId("key").focus();
}

byId("ask-key").addEventListener("submit", (event) => {
  event.preventDefault();
  apiKey.set(byId("key").value.trim());
  byId("ask-key").hidden = true;
});
byId("pause").addEventListener("click", (event) => {
  isPaused = !isPaused;
  event.target.setAttribute("aria-pressed", String(isPaused));
  say(isPaused ? "paused" : "live");
  announce(isPaused ? "Paused." : "Live.");
});
tick();
