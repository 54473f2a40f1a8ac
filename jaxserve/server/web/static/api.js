// The server's API: the key, errors as sentences, streams of events. Addresses are relative to the page.

const KEY = "jaxserve-api-key";

export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

async function failure(response) {
  let said = "";
  try {
    const body = await response.json();
    said = typeof body.error === "string" ? body.error : body.error.message;
  } catch {
    said = `The server answered ${response.status} without a reason.`;
  }
  if (response.status === 401) {
    said = apiKey.get() ? "The API key is wrong." : "This server asks for an API key: write it into the settings.";
  }
  return new ApiError(said, response.status);
}

async function ask(path, options = {}) {
  // UTF-8 as a string of bytes: what a header can hold.
  const key = String.fromCharCode(...new TextEncoder().encode(apiKey.get()));
  const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
  let response;
  try {
    response = await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached. Does it still run?");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

const json = (body) => ({ method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" } });

export const getText = async (path) => (await ask(path)).text();
export const getJson = async (path) => (await ask(path)).json();
export const postJson = async (path, body, signal) => (await ask(path, { ...json(body), signal })).json();

/** The JSON events of a streamed reply. Closing the stream, by the signal, ends the request on the server, too. */
export async function* streamed(path, body, signal) {
  const response = await ask(path, { ...json({ ...body, stream: true }), signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError("The connection to the server broke.");
    }
    if (part.done) throw new ApiError("The stream ended too early: the server may have stopped.");
    const events = (rest + part.value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (!event.startsWith("data: ")) continue;
      if (event === "data: [DONE]") return;
      const data = JSON.parse(event.slice(6));
      if (data.error) throw new ApiError(data.error.message);
      yield data;
    }
  }
}
