// Prometheus' text, read: /metrics is where all of the dashboard's numbers come from.

const PREFIX = "jaxserve:";
const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

const number = (text) => ({ "+Inf": Infinity, "-Inf": -Infinity })[text] ?? Number(text);

const unescaped = (text) => text.replace(/\\(.)/g, (_, one) => (one === "n" ? "\n" : one));

export class Metrics {
  constructor(text) {
    this.samples = new Map(); // name -> [{labels, value}]
    for (const line of text.split("\n")) {
      const found = line.startsWith(PREFIX) && SAMPLE.exec(line.slice(PREFIX.length));
      if (!found) continue;
      const [, name, labelText = "", value] = found;
      const labels = Object.fromEntries([...labelText.matchAll(LABEL)].map(([, key, text]) => [key, unescaped(text)]));
      if (!this.samples.has(name)) this.samples.set(name, []);
      this.samples.get(name).push({ labels, value: number(value) });
    }
  }

  of(name, wanted = {}) {
    const all = this.samples.get(name) ?? [];
    return all.filter(({ labels }) => Object.entries(wanted).every(([key, value]) => labels[key] === value));
  }

  /** Of all replicas together. */
  sum(name, wanted) {
    return this.of(name, wanted).reduce((total, { value }) => total + value, 0);
  }

  /** Of the replica that has most; of shares, whose sum says nothing. */
  max(name, wanted) {
    return Math.max(0, ...this.of(name, wanted).map(({ value }) => value));
  }

  /** A histogram's cumulative counts by upper bound, all series together. */
  buckets(name, wanted) {
    const counts = new Map();
    for (const { labels, value } of this.of(`${name}_bucket`, wanted)) {
      const bound = number(labels.le);
      counts.set(bound, (counts.get(bound) ?? 0) + value);
    }
    return counts;
  }
}

/** What has come to counter `name` from `before` to `now`. */
export const increase = (before, now, name, wanted) => Math.max(0, now.sum(name, wanted) - before.sum(name, wanted));

/** The quantile of what a histogram observed from `before` (null: its start) to `now`, as Prometheus' histogram_quantile reckons;
 * null if that was nothing. */
export function quantile(before, now, name, q, wanted) {
  const old = before?.buckets(name, wanted);
  const counts = [...now.buckets(name, wanted)].map(([bound, count]) => [bound, count - (old?.get(bound) ?? 0)]);
  counts.sort(([a], [b]) => a - b);
  const total = counts.at(-1)?.[1] ?? 0;
  if (total <= 0) return null;
  const rank = q * total;
  const index = counts.findIndex(([, count]) => count >= rank);
  const [lower, below] = index > 0 ? counts[index - 1] : [0, 0];
  const [upper, upTo] = counts[index];
  if (upper === Infinity) return lower;
  return lower + ((upper - lower) * (rank - below)) / (upTo - below);
}

// ---- numbers for people

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (value) => whole.format(value);
export const short = (value) => (value >= 10_000 ? compact.format(value) : value >= 100 || Number.isInteger(value) ? whole.format(value) : value.toFixed(1));
export const percent = (share) => `${(100 * share).toFixed(1)} %`;

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const ms = seconds * 1000;
  if (ms < 1) return `${Math.round(ms * 1000)} µs`;
  if (ms < 1000) return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
  return seconds < 60 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${(seconds / 60).toFixed(1)} min`;
}
