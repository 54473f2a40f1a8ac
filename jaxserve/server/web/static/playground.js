// The playground: what happens when somebody types, clicks or presses a key.

import { announce, button, byId, perFrame } from "./dom.js";
import { getJson } from "./api.js";
import { branched, continueFrom, fill, newAnswer } from "./answer.js";
import { Conversation } from "./conversation.js";
import { messageView } from "./message.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOL, SettingError, Settings, asText } from "./settings.js";

const EXAMPLES = [
  ["Ask something", "What is a radix cache?", {}],
  ["Let it think first", "What is 27 + 45?", { thinking: "on" }],
  ["Ask for JSON", "Extract the person: Ada, 36, lives in Paris.", { format: "json_schema", schema: asText(EXAMPLE_SCHEMA) }],
  ["Let it call a tool", "What is the weather in Paris?", { tools: asText(EXAMPLE_TOOL), toolChoice: "auto" }],
];
const SAID_CHARS = 600; // of an answer, to screen readers

const settings = new Settings();
const prompt = byId("prompt");
let conversation = new Conversation();
let views = new Map(); // node -> its view
let running = null; // the AbortController of the answer that comes

// ---- the conversation on the page

function show() {
  const old = views;
  views = new Map(conversation.path.map((node) => [node, old.get(node) ?? messageView(node, actions)]));
  byId("messages").replaceChildren(...[...views.values()].map((view) => view.element));
  for (const view of views.values()) view.refresh();
  byId("welcome").hidden = views.size > 0;
  document.body.classList.toggle("busy", running !== null);
}

function setRunning(controller) {
  running = controller;
  document.body.classList.toggle("busy", controller !== null);
  byId("send").hidden = controller !== null;
  byId("stop").hidden = controller === null;
}

function scrollToEnd(always = false) {
  const area = byId("scroll");
  if (always || area.scrollHeight - area.scrollTop - area.clientHeight < 120) area.scrollTop = area.scrollHeight;
}

// ---- answers

/** Adds an answer below `parent` and lets `work(node, request, signal, onChange)` fill it. */
async function answer(parent, work, fields = newAnswer()) {
  const request = chosenSettings();
  if (running || !request) return;
  const controller = new AbortController();
  const node = conversation.add(parent, fields);
  setRunning(controller);
  show();
  scrollToEnd(true);
  announce("The model is answering.");
  const refresh = perFrame(() => { views.get(node)?.refresh(); scrollToEnd(); });
  await work(node, request, controller.signal, refresh);
  setRunning(null);
  show();
  scrollToEnd();
  if (node.status === 401) openKey();
  else if (node.state !== "failed") announce(spokenAnswer(node));
}

function spokenAnswer(node) {
  if (node.state === "stopped") return "Stopped.";
  const calls = node.calls.map((call) => `The model calls ${call.name}.`).join(" ");
  const text = node.content.length > SAID_CHARS ? `${node.content.slice(0, SAID_CHARS)} and so on.` : node.content;
  return [text, calls].filter(Boolean).join(" ") || "The answer is empty.";
}

/** As a request needs them, or null: the field at fault is shown. */
function chosenSettings() {
  try {
    return settings.request();
  } catch (error) {
    if (!(error instanceof SettingError)) throw error;
    openSettings(true);
    error.field.focus();
    byId("hint").textContent = error.message;
    announce(error.message);
    return null;
  }
}

/** What one can do with a message. */
const actions = {
  turn(node, step) {
    if (running) return;
    conversation.turn(node, step);
    show();
  },
  /** Whether it could be. */
  edit(node, content) {
    if (!content || running || !chosenSettings()) return false;
    answer(conversation.add(node.parent, { role: "user", content }), fill);
    return true;
  },
  regenerate: (node) => answer(node.parent, fill),
  answerCalls(node, texts) {
    if (running || !chosenSettings()) return;
    const results = node.calls.map(({ id, name }, i) => ({ id, name, content: texts[i] }));
    answer(conversation.add(node, { role: "tools", results }), fill);
  },
  async branch(node, index, alternative) {
    if (running) return;
    const asked = new AbortController();
    setRunning(asked);
    try {
      const branch = await branched(node, index, alternative, asked.signal);
      setRunning(null);
      const goOn = branch.endsHere
        ? (added, _request, _signal) => { added.state = "done"; added.finish = "stop"; }
        : (added, request, signal, refresh) => continueFrom(added, request, branch.inputIds, signal, refresh);
      const done = answer(node.parent, goOn, branch.fields);
      const view = views.get(conversation.last);
      if (view?.node === conversation.last && conversation.last.branchedAt === index) view.toggleTokens();
      await done;
    } catch (error) {
      setRunning(null);
      if (error.name !== "AbortError") byId("hint").textContent = error.message;
    }
  },
};

// ---- the message field

function send() {
  const content = prompt.value.trim();
  if (!content || running || !chosenSettings()) return;
  prompt.value = "";
  fitPrompt();
  byId("hint").textContent = "";
  answer(conversation.add(conversation.last, { role: "user", content }), fill);
}

function fitPrompt() {
  prompt.style.height = "auto";
  prompt.style.height = `${Math.min(prompt.scrollHeight + 2, 240)}px`;
}

byId("composer").addEventListener("submit", (event) => { event.preventDefault(); send(); });
prompt.addEventListener("input", fitPrompt);
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
const stop = () => { running?.abort(); prompt.focus(); };
byId("stop").addEventListener("click", stop);
document.addEventListener("keydown", (event) => { if (event.key === "Escape" && running) stop(); });

byId("new-chat").addEventListener("click", () => {
  running?.abort();
  conversation = new Conversation();
  show();
  prompt.focus();
});

// ---- the settings

const isWide = matchMedia("(min-width: 900px)");

function openSettings(open) {
  document.body.classList.toggle("settings-open", open);
  byId("toggle-settings").setAttribute("aria-expanded", String(open));
  document.querySelector("main").inert = open && !isWide.matches; // it lies behind them
}

function openKey() {
  openSettings(true);
  byId("key").focus();
}

openSettings(isWide.matches);
isWide.addEventListener("change", () => openSettings(isWide.matches));
byId("toggle-settings").addEventListener("click", () => {
  const open = !document.body.classList.contains("settings-open");
  openSettings(open);
  if (open && !isWide.matches) byId("close-settings").focus();
});
const closeSettings = () => { openSettings(false); byId("toggle-settings").focus(); };
byId("close-settings").addEventListener("click", closeSettings);
byId("settings").addEventListener("keydown", (event) => { if (event.key === "Escape" && !isWide.matches) closeSettings(); });

for (const [title, text, values] of EXAMPLES) {
  const use = () => {
    settings.set({ thinking: "", format: "", tools: "", ...values });
    prompt.value = text;
    send();
  };
  const example = button(title, use, { class: "example" });
  example.append(Object.assign(document.createElement("span"), { textContent: text }));
  byId("examples").append(example);
}

// ---- the model's name

async function showModel() {
  const place = byId("model");
  try {
    const [model] = (await getJson("v1/models")).data;
    const name = model.id.split("/").at(-1);
    place.textContent = name;
    place.title = `${model.id}, ${model.max_model_len} tokens of context`;
  } catch (error) {
    const hasKey = byId("key").value !== "";
    place.textContent = error.status !== 401 ? "not reachable" : hasKey ? "wrong API key" : "needs an API key";
    place.title = error.message;
    if (error.status === 401 && !hasKey) openKey();
  }
}

byId("key").addEventListener("change", showModel);
show();
showModel();
if (!byId("welcome").hidden && isWide.matches && document.activeElement === document.body) prompt.focus();
