// One message of the conversation on the page.

import { announce, button, copy, el, textBlocks } from "./dom.js";
import { versionOf } from "./conversation.js";
import { objection } from "./schema.js";
import { asText } from "./settings.js";
import { TokenView } from "./tokens.js";

/** `actions`: what one can do with a message; playground.js has them. */
export function messageView(node, actions) {
  const views = { user: UserView, assistant: AnswerView, tools: ToolResultsView };
  return new views[node.role](node, actions);
}

function versions(node, actions) {
  const { number, count } = versionOf(node);
  if (count < 2) return null;
  const turn = (step) => () => actions.turn(node, step);
  return el("span", { class: "versions", role: "group", "aria-label": "Versions" },
    button("‹", turn(-1), { class: "quiet", "aria-label": "Previous version", disabled: number === 1 }),
    el("span", {}, `${number}/${count}`),
    button("›", turn(1), { class: "quiet", "aria-label": "Next version", disabled: number === count }));
}

class UserView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.body = el("div", { class: "body" });
    this.foot = el("div", { class: "foot" });
    this.element = el("article", { class: "message user", "aria-label": "You" }, this.body, this.foot);
    this.refresh();
  }

  /** What is being edited stays so. */
  refresh() {
    if (this.body.querySelector("textarea")) return;
    const { node, actions } = this;
    const copyButton = button("Copy", () => copy(node.content, copyButton), { class: "quiet" });
    this.body.replaceChildren(el("p", {}, node.content));
    this.foot.replaceChildren(...[versions(node, actions), copyButton,
      button("Edit", () => this.edit(), { class: "quiet when-idle" })].filter(Boolean));
  }

  edit() {
    const field = el("textarea", { rows: "3", "aria-label": "Your message" });
    field.value = this.node.content;
    const close = () => { field.remove(); this.refresh(); this.foot.querySelector(".when-idle").focus(); };
    const done = () => this.actions.edit(this.node, field.value.trim()) && close();
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") close();
      else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
    });
    this.body.replaceChildren(field);
    this.foot.replaceChildren(button("Send", done, { class: "primary when-idle" }), button("Cancel", close));
    field.focus();
  }
}

class ToolResultsView {
  constructor(node, actions) {
    const results = node.results.map(({ name, content }) => el("div", { class: "call" },
      el("p", { class: "call-name" }, "Result of ", el("code", {}, name)), el("pre", { tabindex: "0" }, content)));
    const version = versions(node, actions);
    const foot = version ? [el("div", { class: "foot" }, version)] : [];
    this.element = el("article", { class: "message tool-results", "aria-label": "Results of tools" }, ...results, ...foot);
  }

  refresh() {}
}

class AnswerView {
  constructor(node, actions) {
    this.node = node;
    this.actions = actions;
    this.summary = el("summary", {}, "Thinking");
    this.thought = el("div", { class: "thought" });
    this.thinking = el("details", { class: "thinking", hidden: true }, this.summary, this.thought);
    this.text = el("div", { class: "text" });
    this.calls = el("div", { class: "calls" });
    this.fault = el("p", { class: "fault", role: "alert", hidden: true });
    this.verdict = el("p", { class: "verdict", hidden: true });
    this.stats = el("p", { class: "stats" });
    this.foot = el("div", { class: "foot" });
    this.element = el("article", { class: "message assistant", "aria-label": "The model" },
      this.thinking, this.text, this.calls, this.verdict, this.fault, this.foot, this.stats);
    this.tokens = null;
    this.refresh();
  }

  refresh() {
    const { node } = this;
    const isOver = node.state !== "streaming";
    this.element.setAttribute("aria-busy", String(!isOver));
    this.thinking.hidden = !node.reasoning;
    this.thought.textContent = node.reasoning;
    this.summary.textContent = isOver || node.content || node.calls.length ? "Thought" : "Thinking…";
    this.showText(isOver);
    this.showCalls(isOver);
    this.fault.hidden = node.state !== "failed";
    if (node.state === "failed" && this.fault.textContent !== node.error) this.fault.textContent = node.error;
    this.stats.replaceChildren(...statsOf(node));
    if (isOver) this.showFoot();
  }

  showText(isOver) {
    const { node } = this;
    if (this.tokens) {
      this.tokens.refresh();
      return;
    }
    const value = isOver && node.schema && node.content ? parsed(node.content) : undefined;
    if (value !== undefined) this.text.replaceChildren(el("pre", { class: "json", tabindex: "0" }, asText(value)));
    else this.text.replaceChildren(...textBlocks(node.content));
    this.text.classList.toggle("waits", !isOver && !node.content && !node.reasoning && !node.calls.length);
    if (isOver && node.schema && node.content) this.showVerdict(value);
  }

  showVerdict(value) {
    const against = value === undefined ? "This is not complete JSON." : objection(value, this.node.schema);
    this.verdict.textContent = against ?? "Valid: the answer obeys the schema.";
    this.verdict.classList.toggle("bad", against !== null);
    this.verdict.hidden = false;
  }

  showCalls(isOver) {
    const { node } = this;
    const fields = [];
    const parts = node.calls.map((call) => {
      const parts = [el("p", { class: "call-name" }, "Calls ", el("code", {}, call.name)),
        el("pre", { tabindex: "0" }, pretty(call.arguments))];
      if (isOver && node.state === "done" && !node.selected) {
        const field = el("textarea", { rows: "2", "aria-label": `Result of ${call.name}`, placeholder: "What does it return?" });
        fields.push(field);
        parts.push(field);
      }
      return el("div", { class: "call" }, ...parts);
    });
    const send = () => this.actions.answerCalls(node, fields.map((field) => field.value));
    if (fields.length) parts.push(button(fields.length > 1 ? "Send the results" : "Send the result", send, { class: "primary when-idle" }));
    this.calls.replaceChildren(...parts);
  }

  showFoot() {
    const { node, actions } = this;
    const copyButton = button("Copy", () => copy(node.content || asText(node.calls), copyButton), { class: "quiet" });
    const tokenButton = node.tokens.length > 0 && button(this.tokens ? "Text" : "Tokens", () => this.toggleTokens(), {
      class: "quiet", title: this.tokens ? "Show the text" : "Show each token with its probability",
    });
    this.foot.replaceChildren(...[versions(node, actions), copyButton, tokenButton,
      button(node.state === "failed" ? "Try again" : "Regenerate", () => actions.regenerate(node), { class: "quiet when-idle" }),
    ].filter(Boolean));
  }

  toggleTokens() {
    this.tokens = this.tokens ? null : new TokenView(this.node, (index, one) => this.actions.branch(this.node, index, one));
    this.element.classList.toggle("as-tokens", Boolean(this.tokens));
    if (this.tokens) {
      this.text.replaceChildren(this.tokens.element);
      announce("Tokens are shown.");
    }
    this.refresh();
    this.foot.querySelector("button[title]")?.focus();
  }
}

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

const pretty = (json) => {
  const value = parsed(json);
  return value === undefined ? json : asText(value);
};

const FINISHES = { length: "cut off at the most tokens", tool_calls: "calls tools", abort: "aborted by the server" };

function statsOf(node) {
  const { stats, state, finish } = node;
  const parts = [];
  if (stats?.ttftMs != null) parts.push([`${Math.round(stats.ttftMs)} ms`, "to the first token"]);
  if (stats?.tokensPerS != null) parts.push([`${stats.tokensPerS.toFixed(stats.tokensPerS < 10 ? 1 : 0)} tok/s`, ""]);
  if (stats?.tokens) parts.push([`${stats.tokens} ${stats.tokens === 1 ? "token" : "tokens"}`, ""]);
  if (state === "stopped") parts.push(["stopped", ""]);
  else if (FINISHES[finish]) parts.push([FINISHES[finish], ""]);
  return parts.map(([value, what]) => el("span", {}, el("b", {}, value), what && ` ${what}`));
}
