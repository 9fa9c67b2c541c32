// Functions that send requests to the server. Any failure becomes an Error whose message is one sentence.

import { say } from "./words.js";

export async function ask(path, { body, signal, method } = {}) {
  const options = { signal, method: method ?? (body === undefined ? "GET" : "POST") };
  if (body instanceof Blob) {
    options.headers = { "content-type": "application/octet-stream" };
    options.body = body;
  } else if (body !== undefined) {
    options.headers = { "content-type": "application/json" };
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error(say("offline"));
  }
  if (!answer.ok) throw new Error(await reason(answer));
  return answer;
}

export async function json(path, options) {
  return (await ask(path, options)).json();
}

async function reason(answer) {
  try {
    return (await answer.json()).error ?? `${answer.status}`;
  } catch {
    return `${answer.status} ${answer.statusText}`;
  }
}

// Returns a function that calls `work(signal)` after a delay. A new call restarts the delay and aborts work that is
// still running.
export function delayed(milliseconds, work) {
  let timer;
  let running = null;
  return (wait = milliseconds) => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      running?.abort();
      running = new AbortController();
      work(running.signal).catch((error) => {
        if (error.name !== "AbortError") throw error;
      });
    }, wait);
  };
}
