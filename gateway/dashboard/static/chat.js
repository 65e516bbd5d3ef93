// A chat with the model, streamed, with how each answer was served.

import { byId, element, setText } from "./dom.js";
import { count, duration, rate } from "./format.js";
import { clientHeaders } from "./keys.js";
import { events } from "./sse.js";

const URL_CHAT = new URL("../v1/chat/completions", import.meta.url);

/** Wire the chat panel; `openKeys(message)` asks for a key. */
export function setUpChat(openKeys) {
  const chat = new Chat(openKeys);
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    chat.send();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    chat.send();
  });
  byId("chat-stop").addEventListener("click", () => chat.stop());
  byId("chat-clear").addEventListener("click", () => chat.clear());
}

class Chat {
  #messages = [];
  #abort = null;
  #openKeys;

  constructor(openKeys) {
    this.#openKeys = openKeys;
  }

  async send() {
    const field = byId("chat-text");
    const text = field.value.trim();
    if (!text || this.#abort) return;
    field.value = "";
    this.#show("user", text);
    this.#messages.push({ role: "user", content: text });
    const abort = new AbortController();
    this.#abort = abort;
    this.#busy(true);
    const answer = new Answer(this.#show("assistant", ""));
    try {
      await this.#stream(answer, abort);
    } catch (error) {
      if (abort.signal.aborted) answer.stopped();
      else answer.failed(error.message);
    }
    if (this.#abort !== abort) return; // cleared meanwhile
    if (answer.text) this.#messages.push({ role: "assistant", content: answer.text });
    else this.#messages.pop();
    this.#abort = null;
    this.#busy(false);
    setText(byId("chat-status"), answer.spoken);
  }

  stop() {
    this.#abort?.abort();
  }

  clear() {
    this.stop();
    this.#abort = null;
    this.#messages = [];
    this.#busy(false);
    byId("chat-log").querySelectorAll(".turn").forEach((turn) => turn.remove());
    byId("chat-empty").hidden = false;
    byId("chat-text").focus();
  }

  async #stream(answer, abort) {
    const system = byId("chat-system").value.trim();
    const response = await fetch(URL_CHAT, {
      method: "POST",
      headers: { "Content-Type": "application/json", ...clientHeaders() },
      signal: abort.signal,
      body: JSON.stringify({
        messages: [...(system ? [{ role: "system", content: system }] : []), ...this.#messages],
        max_tokens: Number(byId("chat-max").value) || undefined,
        temperature: Number(byId("chat-temperature").value),
        stream: true,
        stream_options: { include_usage: true },
      }),
    });
    if (!response.ok) {
      const { message } = (await response.json()).error;
      if (response.status === 401) this.#openKeys(message);
      throw new Error(message);
    }
    answer.route(response.headers.get("X-Baton-Route"));
    for await (const data of events(response)) {
      if (data === "[DONE]") return answer.done();
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      answer.take(event);
      this.#follow();
    }
    throw new Error("the stream broke off");
  }

  #show(role, text) {
    byId("chat-empty").hidden = true;
    const turn = element("article", { class: `turn ${role}` },
      element("h3", { class: "visually-hidden", text: role === "user" ? "You" : "Model" }),
      element("p", { class: "said", text }));
    byId("chat-log").append(turn);
    this.#follow(true);
    return turn;
  }

  /** Keep the newest line in sight, unless the reader has scrolled up. */
  #follow(always = false) {
    const log = byId("chat-log");
    if (always || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }

  #busy(isBusy) {
    byId("chat-log").setAttribute("aria-busy", String(isBusy)); // read out once, when it is complete
    byId("chat-send").disabled = isBusy;
    byId("chat-stop").disabled = !isBusy;
    setText(byId("chat-status"), isBusy ? "The model is answering." : "");
  }
}

/** One answer on the page: its text, and what is known about how it was served. */
class Answer {
  text = "";
  #said;
  #facts;
  #began = performance.now();
  #firstAt = null;
  #lastAt = null;
  #usage = null;
  #route = null;
  #end = "";

  constructor(turn) {
    this.#said = turn.querySelector(".said");
    this.#said.classList.add("writing");
    this.#facts = turn.appendChild(element("ul", { class: "facts", "aria-label": "How this was served" }));
  }

  get spoken() {
    return `The answer ${this.#end || "is complete"}. ${[...this.#facts.children].map((fact) => fact.textContent).join(", ")}`;
  }

  route(header) {
    this.#route = header;
    this.#showFacts();
  }

  take(event) {
    const content = event.choices[0]?.delta?.content;
    if (event.usage) this.#usage = event.usage;
    if (!content) return;
    this.#lastAt = performance.now();
    this.#firstAt ??= this.#lastAt;
    this.text += content;
    this.#said.append(content); // a string: always text
    this.#showFacts();
  }

  done() {
    this.#finish("");
  }

  stopped() {
    this.#finish("was stopped");
  }

  failed(message) {
    this.#finish("failed");
    this.#said.after(element("p", { class: "error", text: message }));
  }

  #finish(end) {
    this.#end = end;
    this.#said.classList.remove("writing");
    if (!this.text) this.#said.classList.add("nothing");
    this.#showFacts();
  }

  #showFacts() {
    const facts = [];
    const route = Object.fromEntries((this.#route ?? "").split("; ").map((part, index) => (index ? part.split("=") : ["plan", part])));
    if (this.#firstAt) facts.push(`TTFT ${duration(this.#firstAt - this.#began)}`);
    if (this.#usage) facts.push(...this.#usageFacts());
    if (route.plan === "remote") facts.push(`${route.prefill} → ${route.decode}`);
    if (route.plan === "local") facts.push(`${route.decode}, ${route.reason.replaceAll("_", " ")}`);
    if (this.#end) facts.push(this.#end);
    this.#facts.replaceChildren(...facts.map((text) => element("li", { text })));
  }

  #usageFacts() {
    const { prompt_tokens: prompt, completion_tokens: written, prompt_tokens_details: details } = this.#usage;
    const seconds = (this.#lastAt - this.#firstAt) / 1000;
    const speed = written > 1 && seconds > 0 ? [`${rate((written - 1) / seconds)} tokens/s`] : [];
    return [...speed, `${count(written)} tokens`, `${count(details?.cached_tokens ?? 0)} of ${count(prompt)} cached`];
  }
}
