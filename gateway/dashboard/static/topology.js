// Gateway, prefill and decode workers as cards, and the lines along which prompts, blocks and tokens go.

import { byId, element, keyed, setText, svg } from "./dom.js";
import { count, plural } from "./format.js";

const STATES = ["held", "cached", "quarantined", "free"];
const STUCK_S = 3;
const MAX_WIRES = 60;

/** Owns the topology panel. */
export class Topology {
  #map = byId("map");
  #wires = byId("wires");

  constructor() {
    new ResizeObserver(() => this.#drawWires()).observe(this.#map);
  }

  /** Show the cluster of one snapshot. */
  show({ cluster, requests_in_flight: inFlight }) {
    const workers = cluster.workers;
    byId("no-workers").hidden = workers.length > 0;
    this.#map.hidden = workers.length === 0;
    this.#showGateway(inFlight, cluster);
    for (const role of ["prefill", "decode"]) {
      const ofRole = workers.filter((worker) => worker.role === role);
      setText(byId(`num-${role}`), String(ofRole.length));
      keyed(byId(`${role}-workers`), ofRole, (worker) => worker.id, makeWorker, updateWorker);
    }
    this.#drawWires();
  }

  #showGateway(inFlight, cluster) {
    const card = byId("gateway-card");
    if (!card.firstChild) {
      card.append(
        element("p", { class: "figure" }, element("b", { "data-part": "flight" }), " in flight"),
        element("p", { class: "faint", "data-part": "redis" }));
    }
    setText(part(card, "flight"), count(inFlight));
    setText(part(card, "redis"), cluster.redis === "up" ? "Redis up" : "Redis down");
  }

  /** Lines from the gateway to each prefill worker, from each of those to each decode worker, by way of one point. */
  #drawWires() {
    const box = this.#map.getBoundingClientRect();
    if (!box.width || getComputedStyle(this.#wires).display === "none") return;
    this.#wires.setAttribute("viewBox", `0 0 ${box.width} ${box.height}`);
    const edges = (selector) => [...this.#map.querySelectorAll(selector)].slice(0, MAX_WIRES).map((card) => {
      const at = card.getBoundingClientRect();
      return { left: at.left - box.left, right: at.right - box.left, y: at.top - box.top + at.height / 2 };
    });
    const [gateway] = edges("#gateway-card");
    const prefills = edges("#prefill-workers > li");
    const decodes = edges("#decode-workers > li");
    const paths = prefills.map((to) => ["to-prefill", curve(gateway.right, gateway.y, to.left, to.y)]);
    if (prefills.length && decodes.length) {
      const middle = { x: (prefills[0].right + decodes[0].left) / 2, y: mean([...prefills, ...decodes].map((one) => one.y)) };
      paths.push(...prefills.map((from) => ["to-decode", curve(from.right, from.y, middle.x, middle.y)]));
      paths.push(...decodes.map((to) => ["to-decode", curve(middle.x, middle.y, to.left, to.y)]));
    } else {
      paths.push(...decodes.map((to) => ["to-prefill", curve(gateway.right, gateway.y, to.left, to.y)]));
    }
    keyed(this.#wires, paths.map(([kind, d], index) => ({ kind, d, index })), (one) => one.index,
      () => svg("path", { fill: "none" }),
      (path, one) => {
        path.setAttribute("class", one.kind);
        path.setAttribute("d", one.d);
      });
  }
}

function makeWorker(worker) {
  return element("li", { class: `card worker ${worker.role}` },
    element("div", { class: "worker-head" },
      element("h4", { text: worker.id }),
      element("span", { class: "state", "data-part": "state" })),
    element("p", { class: "figure", "data-part": "batch" },
      element("b", { "data-part": "running" }), " running ",
      element("span", { class: "faint" }, "· ", element("b", { "data-part": "waiting" }), " waiting")),
    element("div", { class: "blocks", role: "img", "data-part": "bar" }, ...STATES.map((state) => svgBar(state))),
    element("p", { class: "faint numbers", "data-part": "blocks" }));
}

const svgBar = (state) => element("i", { class: state });

function updateWorker(card, worker) {
  const state = stateOf(worker);
  card.dataset.state = state.kind;
  setText(part(card, "state"), state.text);
  setText(part(card, "running"), count(worker.running));
  setText(part(card, "waiting"), count(worker.waiting));
  const { held, cached, free, total } = worker.blocks;
  setText(part(card, "blocks"), `${count(held)} held · ${count(cached)} cached · ${count(free)} free`);
  const bar = part(card, "bar");
  bar.setAttribute("aria-label", `${plural(total, "block")}: ${STATES.map((name) => `${worker.blocks[name]} ${name}`).join(", ")}`);
  [...bar.children].forEach((segment, index) => {
    segment.style.flexGrow = String(worker.blocks[STATES[index]]);
  });
}

function stateOf(worker) {
  if (!worker.connected) return { kind: "lost", text: "no session" };
  if (worker.tick_age_s > STUCK_S) return { kind: "lost", text: `no step for ${Math.round(worker.tick_age_s)} s` };
  return { kind: worker.state, text: worker.state };
}

const part = (card, name) => card.querySelector(`[data-part="${name}"]`);
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function curve(fromX, fromY, toX, toY) {
  const middle = (fromX + toX) / 2;
  return `M${fromX} ${fromY} C${middle} ${fromY} ${middle} ${toY} ${toX} ${toY}`;
}
