// An answer as its tokens, shaded by their probability. One stop of the Tab key: the arrow keys go from token to token, Enter
// into the alternatives, Escape back. Hovering shows the alternatives, too, and a click keeps them open.

import { branchObstacle, isTag } from "./answer.js";
import { button, el } from "./dom.js";

const percent = (logprob) => {
  const p = 100 * Math.exp(logprob);
  return p >= 99.95 ? "100 %" : p >= 10 ? `${p.toFixed(0)} %` : p >= 0.1 ? `${p.toFixed(1)} %` : "< 0.1 %";
};

/** A token's text with what one would not see. */
const visible = (text) => text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
const spoken = (text) => text.replaceAll("\n", " line break ").trim() || (text ? "space" : "nothing");

export class TokenView {
  /** `onBranch(index, alternative)` makes the model go on from another token. */
  constructor(node, onBranch) {
    this.node = node;
    this.onBranch = onBranch;
    this.isPinned = false;
    this.list = el("div", {
      class: "token-list", role: "toolbar", "aria-label": "Tokens; arrow keys move, Enter shows the alternatives",
    });
    this.panel = el("div", { class: "alternatives", role: "group", hidden: true });
    this.element = el("div", { class: "tokens" }, this.list, this.panel);
    this.list.addEventListener("keydown", (event) => this.onKey(event));
    this.list.addEventListener("pointerover", (event) => this.onHover(event));
    this.list.addEventListener("focusin", (event) => this.show(this.indexOf(event.target)));
    this.list.addEventListener("click", (event) => this.onClick(event));
    this.element.addEventListener("pointerleave", () => this.isPinned || this.list.contains(document.activeElement) || this.hide());
    this.element.addEventListener("focusout", (event) => this.element.contains(event.relatedTarget) || this.hide());
    this.panel.addEventListener("keydown", (event) => event.key === "Escape" && this.leavePanel(event));
    this.refresh();
  }

  /** Adds the tokens that have come since. */
  refresh() {
    const { tokens, branchedAt } = this.node;
    for (let i = this.list.childElementCount; i < tokens.length; i += 1) this.list.append(tokenButton(tokens[i], i, branchedAt === i));
  }

  indexOf(target) {
    return [...this.list.children].indexOf(target.closest(".token"));
  }

  onHover(event) {
    if (!this.isPinned && event.pointerType !== "touch" && event.target.closest(".token")) this.show(this.indexOf(event.target));
  }

  onClick(event) {
    const index = event.target.closest(".token") ? this.indexOf(event.target) : -1;
    if (index < 0) return;
    this.show(index);
    this.isPinned = true;
    if (event.detail === 0) this.panel.querySelector("button")?.focus(); // by the keyboard
  }

  onKey(event) {
    const index = this.indexOf(event.target);
    const steps = { ArrowRight: 1, ArrowLeft: -1, Home: -index, End: this.list.childElementCount - 1 - index };
    if (event.key in steps) {
      this.isPinned = false;
      this.list.children[index + steps[event.key]]?.focus();
      event.preventDefault();
    } else if (event.key === "ArrowDown") {
      this.panel.querySelector("button")?.focus();
      event.preventDefault();
    } else if (event.key === "Escape") {
      this.hide();
      event.stopPropagation();
    }
  }

  leavePanel(event) {
    event.stopPropagation();
    this.isPinned = false;
    this.list.children[this.shown].focus();
  }

  hide() {
    this.panel.hidden = true;
    this.isPinned = false;
    this.list.querySelector(".shown")?.classList.remove("shown");
  }

  show(index) {
    if (index < 0 || (index === this.shown && !this.panel.hidden)) return;
    this.list.querySelector(".shown")?.classList.remove("shown");
    this.list.querySelector('[tabindex="0"]')?.setAttribute("tabindex", "-1");
    const tokenElement = this.list.children[index];
    tokenElement.classList.add("shown");
    tokenElement.setAttribute("tabindex", "0");
    this.shown = index;
    this.panel.replaceChildren(...this.panelParts(index));
    this.panel.setAttribute("aria-label", `Alternatives to ${spoken(this.node.tokens[index].text)}`);
    this.panel.hidden = false;
    this.place(tokenElement);
  }

  /** Below the token; above it where only that is in sight. */
  place(tokenElement) {
    const [outer, box] = [this.element.getBoundingClientRect(), tokenElement.getClientRects()[0]];
    const area = this.element.closest("#scroll").getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.panel;
    const isAbove = box.bottom + height > area.bottom && box.top - height >= area.top;
    this.panel.style.left = `${Math.max(0, Math.min(box.left - outer.left, outer.width - width))}px`;
    this.panel.style.top = `${(isAbove ? box.top - height : box.bottom) - outer.top}px`;
  }

  panelParts(index) {
    const token = this.node.tokens[index];
    const obstacle = this.node.state === "streaming" ? "The answer is still coming." : branchObstacle(this.node, index);
    const isDrawn = (one) => one.text === token.text && Math.abs(one.logprob - token.logprob) < 1e-6;
    const rows = token.top.some(isDrawn) ? token.top : [token, ...token.top];
    return [
      el("p", { class: "note" }, obstacle ?? "Go on from another token:"),
      ...rows.map((one) => {
        const bar = el("span", { class: "bar-of" });
        bar.style.setProperty("--p", Math.exp(one.logprob));
        const parts = [el("code", {}, visible(one.text)), bar, el("span", { class: "percent" }, percent(one.logprob))];
        if (isDrawn(one)) return el("p", { class: "alternative drawn" }, ...parts);
        const label = `Go on with ${spoken(one.text)}, ${percent(one.logprob)}`;
        const choose = () => this.onBranch(index, one);
        return button(parts, choose, { class: "alternative", "aria-label": label, disabled: Boolean(obstacle) });
      }),
    ];
  }
}

function tokenButton(token, index, isBranch) {
  const label = `${spoken(token.text)}, ${percent(token.logprob)}${isBranch ? ", branched here" : ""}`;
  const element = button(visible(token.text), null, {
    class: `token${isBranch ? " branch" : ""}${isTag(token.text) ? " special" : ""}`, tabindex: index === 0 ? "0" : "-1", "aria-label": label,
  });
  element.style.setProperty("--p", Math.exp(token.logprob));
  return element;
}
