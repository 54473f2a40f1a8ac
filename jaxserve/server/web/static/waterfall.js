// Requests as rows: when each waited, had its prompt computed, answered, and had to give way.

import { el } from "./dom.js";
import { count, duration } from "./metrics.js";

export const PARTS = [
  ["before", "tokenizing, sending"], ["grammar", "waiting for its grammar"], ["queue", "in the queue"],
  ["prefill", "prompt"], ["decode", "answer"], ["live", "no token yet"],
];

/** The parts of a request's life: [{kind, fromS, toS}], and when it was over. */
export function partsOf(request, nowS) {
  const times = request.scheduler;
  const end = request.answered_s ?? nowS;
  if (!request.answered_s || !times?.queue_entry_s) {
    const kind = request.answered_s ? "before" : "live";
    const begun = request.first_text_s;
    const parts = [{ kind, fromS: request.received_s, toS: kind === "live" && begun ? begun : end }];
    if (kind === "live" && begun) parts.push({ kind: "decode", fromS: begun, toS: nowS });
    return { parts, endS: end, retractionsS: [] };
  }
  const parts = [{ kind: "before", fromS: request.received_s, toS: times.queue_entry_s }];
  const queued = times.grammar_ready_s ?? times.queue_entry_s;
  if (times.grammar_ready_s) parts.push({ kind: "grammar", fromS: times.queue_entry_s, toS: queued });
  const scheduled = times.first_scheduled_s ?? times.finished_s ?? end;
  parts.push({ kind: "queue", fromS: queued, toS: scheduled });
  const first = times.first_token_s ?? times.finished_s ?? end;
  if (times.first_token_s) parts.push({ kind: "decode", fromS: first, toS: times.finished_s ?? end });
  // Chunks behind the first token are of a prompt that was computed again; they lie over the answer.
  for (const [fromS, toS] of times.chunks ?? []) parts.push({ kind: "prefill", fromS, toS: toS || first });
  return { parts, endS: end, retractionsS: times.retractions_s ?? [] };
}

const seconds = (from, to) => (from && to ? duration(Math.max(0, to - from)) : "–");

/** The rows of the table; `isAligned`: each bar begins at its own arrival. */
export function rows(requests, nowS, isAligned) {
  const shapes = requests.map((request) => ({ request, ...partsOf(request, nowS) }));
  const first = Math.min(...requests.map(({ received_s }) => received_s));
  const last = Math.max(...shapes.map(({ endS }) => endS));
  const longest = Math.max(...shapes.map(({ request, endS }) => endS - request.received_s), 1e-3);
  return shapes.reverse().map((shape) => {
    const zero = isAligned ? shape.request.received_s : first;
    return row(shape, zero, isAligned ? longest : Math.max(last - first, 1e-3));
  });
}

function row({ request, parts, endS, retractionsS }, zeroS, spanS) {
  const times = request.scheduler ?? {};
  const retractions = times.num_retractions ?? 0;
  const how = request.answered_s ? request.finish || "–" : "runs";
  const cached = request.cached_tokens ? ` (${count(request.cached_tokens)} cached)` : "";
  const prompt = request.prompt_tokens ? `${count(request.prompt_tokens)}${cached}` : "–"; // live ones do not say
  return el("tr", {},
    el("th", { scope: "row", title: request.rid }, request.rid),
    el("td", {}, prompt),
    el("td", {}, count(request.completion_tokens ?? 0)),
    el("td", {}, seconds(times.queue_entry_s, times.first_scheduled_s)),
    el("td", {}, seconds(request.received_s, times.first_token_s ?? request.first_text_s)),
    el("td", {}, seconds(request.received_s, endS)),
    el("td", {}, retractions ? `${how}, ${retractions} × retracted` : how),
    el("td", { class: "line", "aria-hidden": "true" }, bar(parts, retractionsS, zeroS, spanS)));
}

function bar(parts, retractionsS, zeroS, spanS) {
  const place = (element, fromS, toS) => {
    element.style.left = `${(100 * (fromS - zeroS)) / spanS}%`;
    if (toS !== undefined) element.style.width = `${(100 * Math.max(0, toS - fromS)) / spanS}%`;
    return element;
  };
  const bars = parts.map(({ kind, fromS, toS }) => place(el("span", { class: `part ${kind}` }), fromS, toS));
  const marks = retractionsS.map((timeS) => place(el("span", { class: "retraction" }), timeS));
  return el("div", { class: "track" }, ...bars, ...marks);
}
