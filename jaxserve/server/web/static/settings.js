// The settings beside the conversation, and the fields of a request they stand for. Kept in the browser, the key excepted.

import { apiKey } from "./api.js";
import { byId, el } from "./dom.js";

const STORE = "jaxserve-playground";
const SAMPLING = [
  // field, label, least, most, step
  ["temperature", "Temperature", 0, 5, "any"],
  ["max_tokens", "Most tokens", 1, null, 1],
  ["top_p", "Top p", 0, 1, "any"],
  ["top_k", "Top k", -1, null, 1],
  ["min_p", "Min p", 0, 1, "any"],
  ["seed", "Seed", null, null, 1],
  ["frequency_penalty", "Frequency penalty", -2, 2, "any"],
  ["presence_penalty", "Presence penalty", -2, 2, "any"],
  ["repetition_penalty", "Repetition penalty", 0, 2, "any"],
];

export const EXAMPLE_TOOL = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Get the weather of a city.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};

export const asText = (value) => JSON.stringify(value, null, 2);

/** A setting that cannot be used; `field` is the element to look at. */
export class SettingError extends Error {
  constructor(message, field) {
    super(message);
    this.field = field;
  }
}

export class Settings {
  constructor() {
    this.form = byId("settings");
    byId("sampling").append(...SAMPLING.map(([name, label, min, max, step]) => el("div", {},
      el("label", { for: name }, label),
      el("input", { id: name, name, type: "number", min, max, step, placeholder: "default", inputmode: "decimal" }))));
    this.load();
    byId("key").value = apiKey.get();
    byId("key").addEventListener("input", (event) => apiKey.set(event.target.value.trim()));
    byId("example-tool").addEventListener("click", () => this.set({ tools: asText(EXAMPLE_TOOL) }));
    byId("reset").addEventListener("click", () => { this.form.reset(); byId("key").value = apiKey.get(); this.changed(); });
    this.form.addEventListener("input", () => this.changed());
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.changed();
  }

  get values() {
    return Object.fromEntries(new FormData(this.form)); // the key has no name and is not among them
  }

  set(values) {
    for (const [name, value] of Object.entries(values)) this.form.elements[name].value = value;
    this.changed();
  }

  load() {
    try {
      const kept = JSON.parse(localStorage.getItem(STORE) ?? "{}");
      for (const [name, value] of Object.entries(kept)) if (this.form.elements[name]) this.form.elements[name].value = value;
    } catch { /* a browser that keeps nothing */ }
  }

  changed() {
    const { values } = this;
    byId("schema-part").hidden = values.format !== "json_schema";
    if (values.format === "json_schema" && !values.schema) this.form.elements.schema.value = asText(EXAMPLE_SCHEMA);
    for (const name of ["schema", "tools"]) {
      const field = this.form.elements[name];
      const fault = field.value.trim() && (name === "tools" || values.format === "json_schema") ? faultOf(field.value) : "";
      byId(`${name}-fault`).textContent = fault;
      field.setAttribute("aria-invalid", String(Boolean(fault)));
    }
    try {
      localStorage.setItem(STORE, JSON.stringify(this.values));
    } catch { /* the same */ }
  }

  /** {body: fields of a chat completion, system, schema: what the answer shall obey, or null}. Raises SettingError. */
  request() {
    const { values } = this;
    const body = {};
    for (const [name, label] of SAMPLING) {
      const field = this.form.elements[name];
      if (!field.checkValidity()) throw new SettingError(`${label}: ${field.validationMessage}`, field);
      if (values[name] !== "") body[name] = Number(values[name]);
    }
    if (values.thinking) {
      const on = values.thinking === "on";
      body.chat_template_kwargs = { enable_thinking: on, thinking: on }; // templates use one of the two words
    }
    let schema = null;
    if (values.format === "json_object") {
      schema = { type: "object" };
      body.response_format = { type: "json_object" };
    } else if (values.format === "json_schema") {
      schema = this.parsed("schema", "The JSON schema");
      body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    }
    if (values.tools.trim()) {
      body.tools = this.parsed("tools", "The list of tools");
      body.tool_choice = values.toolChoice;
    }
    if (values.alternatives) {
      body.logprobs = true;
      body.top_logprobs = Number(values.alternatives);
    }
    return { body, system: values.system.trim(), schema };
  }

  parsed(name, label) {
    const field = this.form.elements[name];
    const fault = faultOf(field.value);
    if (fault) throw new SettingError(`${label} is not JSON: ${fault}`, field);
    return JSON.parse(field.value);
  }
}

function faultOf(text) {
  try {
    JSON.parse(text);
    return "";
  } catch (error) {
    return error.message;
  }
}
