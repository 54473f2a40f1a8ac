// A conversation as a tree. Regenerating, editing and branching add a sibling; the selected children are what is shown.
//
// Nodes: {role: "user", content}
//        {role: "assistant", content, reasoning, calls: [{id, name, arguments}], tokens, promptIds, state, ...} (answer.js)
//        {role: "tools", results: [{id, name, content}]}

export class Conversation {
  constructor() {
    this.root = { role: "root", parent: null, children: [], selected: null };
  }

  /** The nodes that are shown, in order. */
  get path() {
    const nodes = [];
    for (let node = this.root.selected; node; node = node.selected) nodes.push(node);
    return nodes;
  }

  get last() {
    return this.path.at(-1) ?? this.root;
  }

  /** Adds a node below `parent` and selects it. */
  add(parent, fields) {
    const node = { ...fields, parent, children: [], selected: null };
    parent.children.push(node);
    parent.selected = node;
    return node;
  }

  /** Shows another version of a node: the one `step` places on. */
  turn(node, step) {
    const { children } = node.parent;
    node.parent.selected = children[children.indexOf(node) + step] ?? node;
  }
}

/** Which version of how many a node is, from 1. */
export const versionOf = (node) => ({ number: node.parent.children.indexOf(node) + 1, count: node.parent.children.length });

/** The messages before a node, as the API takes them. */
export function messagesBefore(node, system) {
  const messages = [];
  for (let above = node.parent; above.parent; above = above.parent) messages.unshift(...asMessages(above));
  return system ? [{ role: "system", content: system }, ...messages] : messages;
}

function asMessages(node) {
  if (node.role === "user") return [{ role: "user", content: node.content }];
  if (node.role === "tools") return node.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
  const calls = node.calls.map((call) => ({
    id: call.id, type: "function", function: { name: call.name, arguments: call.arguments },
  }));
  const message = { role: "assistant", content: node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (calls.length) message.tool_calls = calls;
  return [message];
}
