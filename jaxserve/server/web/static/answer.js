// One answer of the model: asked for, streamed into a node, timed; and branches from one of its tokens.

import { postJson, streamed } from "./api.js";
import { messagesBefore } from "./conversation.js";

export const newAnswer = () => ({
  role: "assistant", content: "", reasoning: "", calls: [], tokens: [], promptIds: [], schema: null,
  state: "streaming", // then done, stopped or failed
  finish: null, error: null, stats: null,
});

/** Streams the answer of a node. `onChange` is called after each event. */
export async function fill(node, settings, signal, onChange) {
  const body = { ...settings.body, messages: messagesBefore(node, settings.system) };
  node.schema = settings.schema;
  await stream(node, body, signal, onChange);
}

/** Streams on behind the beginning that `node` already has, whose ids are given. */
export async function continueFrom(node, settings, inputIds, signal, onChange) {
  const { response_format: _, ...body } = settings.body; // a grammar would begin anew, here and where a call is required
  if (body.tool_choice === "required") body.tool_choice = "auto";
  // The ids say what is computed; the messages only that the last one goes on.
  const beginning = { role: "assistant", content: node.content };
  body.messages = [...messagesBefore(node, settings.system), beginning];
  await stream(node, { ...body, continue_final_message: true, input_ids: inputIds }, signal, onChange);
}

async function stream(node, body, signal, onChange) {
  const begun = performance.now();
  let first = null;
  const stats = (usage) => {
    const now = performance.now();
    node.stats = {
      ttftMs: first === null ? null : first - begun,
      tokens: usage?.completion_tokens ?? node.tokens.length,
      promptTokens: usage?.prompt_tokens,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens,
      tokensPerS: first !== null && usage?.completion_tokens > 1 ? ((usage.completion_tokens - 1) * 1000) / (now - first) : null,
    };
  };
  const numCallsBefore = node.calls.length;
  try {
    const options = { stream_options: { include_usage: true, continuous_usage_stats: true } };
    const ids = body.logprobs ? { return_token_ids: true, return_prompt_token_ids: true } : {};
    for await (const event of streamed("v1/chat/completions", { ...body, ...options, ...ids }, signal)) {
      const choice = event.choices[0];
      if (choice) {
        first ??= performance.now();
        take(node, choice, numCallsBefore);
      }
      if (event.usage) stats(event.usage);
      onChange();
    }
    node.state = "done";
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") {
      node.error = error.message;
      node.status = error.status;
    }
  }
  onChange();
}

function take(node, choice, numCallsBefore) {
  if (choice.prompt_token_ids) node.promptIds = choice.prompt_token_ids;
  if (choice.logprobs) addTokens(node, choice.logprobs.content, choice.token_ids ?? []);
  const delta = choice.delta;
  node.content += delta.content ?? "";
  node.reasoning += delta.reasoning_content ?? "";
  for (const part of delta.tool_calls ?? []) {
    const call = (node.calls[numCallsBefore + part.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= part.id ?? "";
    call.name ||= part.function.name ?? "";
    call.arguments += part.function.arguments ?? "";
  }
  node.finish = choice.finish_reason ?? node.finish;
}

/** Tokens come before the text they make: so each knows what the message was before it. */
function addTokens(node, entries, ids) {
  const before = { content: node.content.length, reasoning: node.reasoning.length, calls: node.calls.length };
  let extra = ""; // of tokens that came in one event
  entries.forEach((entry, i) => {
    const top = entry.top_logprobs.map(({ token, logprob }) => ({ text: token, logprob }));
    node.tokens.push({ id: ids[i], text: entry.token, logprob: entry.logprob, top, before: { ...before, extra } });
    extra += entry.token;
  });
}

// ---- branches

/** Whether a token belongs to a format, not to the message. */
export const isTag = (text) => /^\s*<[|/]?[\w|]+>\s*$/.test(text);

/** Why one cannot branch at a token, or null. */
export function branchObstacle(node, index) {
  if (node.tokens[index].before.calls > 0) return "Within a call of a tool there is no branching.";
  if (node.tokens[index].id === undefined) return "The server did not say which token this is.";
  return null;
}

/** The fields of a node that begins like `node` and has another token at `index`, and the ids up to there. */
export async function branched(node, index, alternative, signal) {
  const token = node.tokens[index];
  const idsBefore = [...node.promptIds, ...node.tokens.slice(0, index).map(({ id }) => id)];
  const id = await idOf(alternative, idsBefore, token.top.length, signal);
  const { text } = await postJson("detokenize", { tokens: [id] }, signal);
  const fields = newAnswer();
  fields.reasoning = node.reasoning.slice(0, token.before.reasoning);
  fields.content = node.content.slice(0, token.before.content);
  const isThinking = !fields.content && node.reasoning.length > token.before.reasoning;
  const more = token.before.extra + (isTag(alternative.text) ? "" : text);
  fields[isThinking ? "reasoning" : "content"] += more;
  fields.promptIds = node.promptIds;
  fields.tokens = [...node.tokens.slice(0, index), { ...token, id, ...alternative }];
  fields.branchedAt = index;
  fields.schema = node.schema;
  // Special tokens have no text: with one of them, such as the end of a turn, the answer is over.
  return { fields, inputIds: [...idsBefore, id], endsHere: text === "" };
}

/** OpenAI's replies give alternatives as text, which need not say which token it is; the native route gives the id. */
async function idOf(alternative, idsBefore, num, signal) {
  const reply = await postJson("generate", {
    input_ids: idsBefore, return_logprob: true, top_logprobs_num: num, return_text_in_logprobs: true,
    sampling_params: { max_new_tokens: 1, temperature: 0, ignore_eos: true },
  }, signal);
  const near = ([logprob]) => Math.abs(logprob - alternative.logprob);
  const same = reply.meta_info.output_top_logprobs[0].filter(([, , text]) => text === alternative.text);
  same.sort((a, b) => near(a) - near(b));
  if (!same.length) throw new Error("This alternative is no longer among the likeliest.");
  return same[0][1];
}
