// The connection to the gateway's stream of snapshots, with its back-off.

import { viewerHeaders } from "./keys.js";
import { events } from "./sse.js";

const URL_EVENTS = new URL("../v1/dashboard/events", import.meta.url);
const SILENCE_MS = 6000; // a snapshot comes every second
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 15000;

/** Calls `onEvent(event)` for each event and `onState(name, detail)` as the connection changes:
 *  connecting, live, lost ({wait: seconds}), key ({message}). */
export class Stream {
  #onEvent;
  #onState;
  #abort = null;
  #timer = null;
  #wait = FIRST_WAIT_MS;

  constructor(onEvent, onState) {
    this.#onEvent = onEvent;
    this.#onState = onState;
  }

  /** Connect now, whatever was before. */
  restart() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#wait = FIRST_WAIT_MS;
    this.#connect();
  }

  /** Connect now if the stream is waiting to. */
  hurry() {
    if (this.#timer === null) return;
    this.restart();
  }

  async #connect() {
    this.#timer = null;
    const abort = new AbortController();
    this.#abort = abort;
    this.#onState("connecting", {});
    try {
      await this.#read(abort);
    } catch (error) {
      if (abort !== this.#abort) return; // another connection has taken over
      if (error instanceof KeyNeeded) {
        this.#onState("key", { message: error.message });
        return;
      }
    }
    if (abort === this.#abort) this.#later();
  }

  async #read(abort) {
    let silence = setTimeout(() => abort.abort(), SILENCE_MS);
    try {
      const response = await fetch(URL_EVENTS, { headers: viewerHeaders(), signal: abort.signal, cache: "no-store" });
      if (response.status === 401) throw new KeyNeeded((await response.json()).error.message);
      if (!response.ok) throw new Error(`status ${response.status}`);
      for await (const data of events(response)) {
        if (abort !== this.#abort) return;
        clearTimeout(silence);
        silence = setTimeout(() => abort.abort(), SILENCE_MS);
        this.#wait = FIRST_WAIT_MS;
        this.#onState("live", {});
        this.#onEvent(JSON.parse(data));
      }
    } finally {
      clearTimeout(silence);
    }
  }

  #later() {
    const wait = this.#wait * (0.75 + Math.random() / 2);
    this.#wait = Math.min(2 * this.#wait, LONGEST_WAIT_MS);
    this.#onState("lost", { wait: wait / 1000 });
    this.#timer = setTimeout(() => this.#connect(), wait);
  }
}

class KeyNeeded extends Error {}
