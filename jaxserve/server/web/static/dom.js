// Elements without HTML strings: what a model or a server says is text and stays text.

/** An element with attributes, `on...` listeners, and children: elements, or texts. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export const byId = (id) => document.getElementById(id);

/** A button that does not submit. */
export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

/** Says something to screen readers, once. */
export function announce(text) {
  const region = byId("announcer");
  region.textContent = "";
  // A change within one turn of the event loop is not always noticed.
  setTimeout(() => { region.textContent = text; }, 50);
}

export async function copy(text, copyButton) {
  const label = copyButton.textContent;
  try {
    await navigator.clipboard.writeText(text);
    copyButton.textContent = "Copied";
  } catch {
    copyButton.textContent = "The browser forbids it";
  }
  announce(copyButton.textContent);
  setTimeout(() => { copyButton.textContent = label; }, 1500);
}

/** Runs `work` at most once per frame. */
export function perFrame(work) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; work(); });
  };
}

/** Text with ``` fences as blocks of code; all else as it stands. */
export function textBlocks(text) {
  return text.split(/^```/m).map((part, i) => {
    if (i % 2 === 0) return part.trim() ? el("p", {}, part.replace(/^\n+|\n+$/g, "")) : null;
    const [, language, code] = /^([^\n]*)\n?([^]*)$/.exec(part);
    const copyButton = button("Copy", () => copy(code, copyButton), { class: "quiet" });
    const head = el("figcaption", {}, el("span", {}, language.trim() || "code"), copyButton);
    const body = code.replace(/\n$/, "");
    return el("figure", { class: "code" }, head, el("pre", { tabindex: "0" }, el("code", {}, body)));
  }).filter(Boolean);
}
