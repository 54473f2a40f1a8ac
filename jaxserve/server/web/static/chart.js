// A time line of a few values, as SVG. The legend has the numbers as text; the picture is for the eyes.

import { el } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const LEFT = 46;
const BOTTOM = 18;
const TOP = 8;

function svg(name, attributes, ...children) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

/** A round number that is at least `value`. */
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 4, 5, 10].map((step) => step * power).find((step) => step >= value * (1 - 1e-9));
}

export class LineChart {
  /** `lines`: [{label}]; `least`: what the scale goes up to at least; `format`: of numbers, `scaleFormat`: of those beside the lines. */
  constructor(place, title, lines, { windowS, least = 1, format, scaleFormat = format }) {
    Object.assign(this, { lines, windowS, least, format, scaleFormat, points: [], height: 0 });
    this.values = lines.map(() => el("b", {}, "–"));
    const legend = el("ul", { class: "legend" }, lines.map(({ label }, i) =>
      el("li", { class: `series-${i + 1}` }, el("span", { class: "swatch" }), `${label} `, this.values[i])));
    this.picture = svg("svg", { class: "chart", "aria-hidden": "true" });
    place.append(el("h2", {}, title), legend, this.picture);
    this.pointer = null;
    this.picture.addEventListener("pointermove", (event) => { this.pointer = event.offsetX; this.draw(); });
    this.picture.addEventListener("pointerleave", () => { this.pointer = null; this.draw(); });
    new ResizeObserver(() => this.draw()).observe(this.picture);
  }

  /** `values`: one for each line, null where there is none. */
  add(timeS, values) {
    this.points.push({ timeS, values });
    while (this.points[0].timeS < timeS - this.windowS - 2) this.points.shift();
    this.draw();
  }

  draw() {
    const width = this.picture.clientWidth;
    if (!width || !this.points.length) return;
    this.height = this.picture.clientHeight;
    const now = this.points.at(-1).timeS;
    const top = roundUp(Math.max(this.least, ...this.points.flatMap(({ values }) => values.map((value) => value ?? 0))));
    const x = (timeS) => LEFT + ((width - LEFT) * (timeS - now + this.windowS)) / this.windowS;
    const y = (value) => this.height - BOTTOM - ((this.height - BOTTOM - TOP) * value) / top;
    this.picture.replaceChildren(...this.scale(width, top, y), ...this.lines.map((_, i) => this.line(i, x, y)), ...this.cursor(x, now));
  }

  scale(width, top, y) {
    const horizontal = [0, 0.5, 1].flatMap((share) => {
      const text = svg("text", { x: LEFT - 6, y: y(share * top) + 4, "text-anchor": "end" });
      text.textContent = share ? this.scaleFormat(share * top) : "0";
      return [svg("line", { x1: LEFT, x2: width, y1: y(share * top), y2: y(share * top) }), text];
    });
    const times = [[this.windowS, "start", LEFT], [this.windowS / 2, "middle", (width + LEFT) / 2], [0, "end", width]];
    return [...horizontal, ...times.map(([ago, anchor, x]) => {
      const text = svg("text", { x, y: this.height - 3, "text-anchor": anchor });
      text.textContent = ago ? `${ago} s ago` : "now";
      return text;
    })];
  }

  line(i, x, y) {
    let path = "";
    let isDown = false;
    for (const { timeS, values } of this.points) {
      const value = values[i];
      if (value === null || value === undefined) isDown = false;
      else {
        path += `${isDown ? "L" : "M"}${Math.max(LEFT, x(timeS)).toFixed(1)} ${y(value).toFixed(1)}`;
        isDown = true;
      }
    }
    return svg("path", { d: path || "M0 0", class: `series-${i + 1}` });
  }

  /** The numbers under the pointer, else the newest. */
  cursor(x, now) {
    let point = this.points.at(-1);
    const marks = [];
    if (this.pointer !== null) {
      point = this.points.reduce((best, one) =>
        (Math.abs(x(one.timeS) - this.pointer) < Math.abs(x(best.timeS) - this.pointer) ? one : best));
      marks.push(svg("line", { class: "cursor", x1: x(point.timeS), x2: x(point.timeS), y1: TOP, y2: this.height - BOTTOM }));
    }
    point.values.forEach((value, i) => {
      this.values[i].textContent = value === null ? "–" : this.format(value);
    });
    return marks;
  }
}
