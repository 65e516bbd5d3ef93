// The panels that are words and bars: figures at a glance, ratio and planner, hand-over, shared prefixes.

import { element, keyed, setText } from "./dom.js";
import { clock, count, duration, percent, plural, rate, short } from "./format.js";
import { hasAdminKey } from "./keys.js";

const REASONS = {
  remote: "long enough for the hand-over",
  short_prompt: "a short prompt",
  cached: "already cached there",
  no_prefill_worker: "no prefill worker was ready",
  incompatible: "no prefill worker fits",
  redis_unavailable: "Redis did not answer",
  prefill_busy: "the prefill workers were busy",
  prefill_late: "the prefill worker was late",
  prefill_lost: "the prefill worker was lost",
};

const NUM_STEPS = 6;

/** Show the newest point and snapshot in the row of figures. */
export function showTiles(list, point, { cluster }) {
  const { blocks } = cluster.totals;
  const tiles = [
    { name: "Time to first token", value: duration(point.ttft_p50_ms), note: `p95 ${duration(point.ttft_p95_ms)}` },
    { name: "Inter-token latency", value: duration(point.itl_p50_ms), note: `p95 ${duration(point.itl_p95_ms)}` },
    { name: "Tokens/s", value: rate(point.generation_tokens_per_s), note: `${rate(point.prompt_tokens_per_s)} read` },
    { name: "Batch", value: count(point.running), note: `${count(cluster.totals.waiting)} waiting` },
    { name: "Hit rate", value: percent(point.hit_rate), note: "last minute" },
    {
      name: "KV blocks held",
      value: blocks.total ? percent(blocks.held / blocks.total) : "–",
      note: `of ${plural(blocks.total, "block")}`,
    },
  ];
  keyed(list, tiles, (tile) => tile.name,
    (tile) => element("div", { class: "tile" },
      element("dt", { text: tile.name }), element("dd", { class: "value" }), element("dd", { class: "faint" })),
    (node, tile) => {
      setText(node.children[1], tile.value);
      setText(node.children[2], tile.note);
    });
}

/** Show prefill to decode workers, and what the planner thinks where there is one. */
export function showRatio(box, plannerBox, cluster) {
  const { prefill, decode } = cluster.ratio;
  if (!box.firstChild) {
    box.append(element("p", { class: "ratio-figure" }), element("div", { class: "split", "aria-hidden": "true" },
      element("i", { class: "prefill" }), element("i", { class: "decode" })), element("p", { class: "faint" }));
  }
  const [figure, bar, words] = box.children;
  setText(figure, `${prefill} : ${decode}`);
  grow(bar.children[0], prefill);
  grow(bar.children[1], decode);
  setText(words, `${plural(prefill, "prefill worker")}, ${plural(decode, "decode worker")}`);
  plannerBox.hidden = !cluster.planner;
  if (cluster.planner) showPlanner(plannerBox, cluster.planner, cluster.pressure);
}

function showPlanner(box, planner, pressure) {
  if (!box.firstChild) {
    box.append(element("h3", { text: "Planner" }), element("p", { class: "faint" }), element("dl", { class: "stages" }),
      element("h3", { text: "Last decisions" }), element("ol", { class: "steps" }), element("p", { class: "faint", text: "None yet." }));
  }
  const [, words, pools, , steps, none] = box.children;
  const facts = [`Mode ${planner.mode}`, `prompts up to ${plural(planner.local_prefill_tokens, "token")} stay where they are decoded`];
  if (planner.home) facts.push(`home ${planner.home}`);
  if (!planner.leader && planner.mode !== "off") facts.push("nobody plans now");
  setText(words, facts.join(" · "));
  pools.hidden = !pressure;
  if (pressure) showPressure(pools, pressure);
  const newest = [...planner.steps].reverse().slice(0, NUM_STEPS);
  none.hidden = newest.length > 0;
  keyed(steps, newest, (step) => `${step.at_s} ${step.action} ${step.reason}`, makeStep,
    (row, step) => setText(row.lastChild, [spoken(step.reason), step.outcome && spoken(step.outcome)].filter(Boolean).join(", ")));
}

function makeStep(step) {
  return element("li", {}, element("time", { class: "faint", text: clock(step.at_s) }),
    element("b", { text: spoken(step.action) }), element("span", { class: "faint", text: `at ${step.ratio}` }), element("span"));
}

/** Bars whose full length is one and a half times the pressure at which the target is missed. */
function showPressure(list, pressure) {
  const rows = ["prefill", "decode"].map((role) => ({ role, value: pressure[role] }));
  keyed(list, rows, (row) => row.role,
    (row) => element("div", {}, element("dt", { text: `${row.role === "prefill" ? "Prefill" : "Decode"} pressure` }),
      element("dd", {}, element("i", { class: `stage ${row.role}`, "aria-hidden": "true" }), element("span"))),
    (node, row) => {
      const [bar, words] = node.children[1].children;
      bar.style.width = `${(65 * Math.min(row.value, 1.5)) / 1.5}%`;
      setText(words, row.value.toFixed(2));
    });
}

const spoken = (code) => code.replaceAll("_", " ");

/** Show where prompts are computed and why, and where an answer's time goes. */
export function showHandOver(box, { routes, stages, hand_overs: handOvers }) {
  if (!box.firstChild) buildHandOver(box);
  const [splitWords, splitBar, reasons, , stageList, pulls] = box.children;
  const sum = (plan) => routes.filter((route) => route.plan === plan).reduce((total, route) => total + route.total, 0);
  const [remote, local] = [sum("remote"), sum("local")];
  setText(splitWords, remote + local
    ? `${percent(remote / (remote + local))} of ${plural(remote + local, "prompt")} handed over`
    : "No prompt yet");
  grow(splitBar.children[0], remote);
  grow(splitBar.children[1], local);
  keyed(reasons.tBodies[0], routes, (route) => `${route.plan} ${route.reason}`, makeRoute, (row, route) => {
    setText(row.children[1], count(route.recent));
    setText(row.children[2], count(route.total));
  });
  reasons.hidden = routes.length === 0;
  showStages(stageList, stages);
  setText(pulls, `${plural(handOvers.pulls, "hand-over")}, ${short(handOvers.tokens)} tokens of KV moved, ${
    count(handOvers.failed)} failed`);
}

function buildHandOver(box) {
  const head = ["Prompts computed", "Last min", "All"].map((name, index) =>
    element("th", { scope: "col", class: index ? "number" : null, text: name }));
  box.append(
    element("p", { class: "lead" }),
    element("div", { class: "split", "aria-hidden": "true" }, element("i", { class: "prefill" }), element("i", { class: "decode" })),
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody")),
    element("h3", { text: "Time of an answer, last minute" }),
    element("dl", { class: "stages" }),
    element("p", { class: "faint" }));
}

function makeRoute(route) {
  const where = route.plan === "remote" ? "prefill" : "decode";
  return element("tr", {},
    element("th", { scope: "row" }, element("i", { class: `swatch ${where}` }),
      `${where === "prefill" ? "Handed over" : "Where decoded"}: ${REASONS[route.reason] ?? route.reason}`),
    element("td", { class: "number" }), element("td", { class: "number" }));
}

function showStages(list, stages) {
  const rows = [
    { name: "Queue", ms: stages.queue_ms, role: "queue" },
    { name: "Prefill and hand-over", ms: stages.prefill_ms, role: "prefill" },
    { name: "Decode", ms: stages.decode_ms, role: "decode" },
  ];
  const longest = Math.max(...rows.map((row) => row.ms ?? 0), 1);
  keyed(list, rows, (row) => row.name,
    (row) => element("div", {}, element("dt", { text: row.name }),
      element("dd", {}, element("i", { class: `stage ${row.role}`, "aria-hidden": "true" }), element("span"))),
    (node, row) => {
      const [bar, words] = node.children[1].children;
      bar.style.width = `${(65 * (row.ms ?? 0)) / longest}%`;
      setText(words, duration(row.ms));
    });
}

/** Show the shared prefixes, or why they are not shown. */
export function showPrefixes(box, prefixes, openKeys) {
  const kind = prefixes === null ? "locked" : prefixes.length ? "table" : "none";
  if (box.dataset.kind !== kind) {
    box.dataset.kind = kind;
    box.replaceChildren(...BUILD_PREFIXES[kind](openKeys));
  }
  if (kind !== "table") return;
  const most = prefixes[0].saved_tokens || 1;
  keyed(box.querySelector("tbody"), prefixes, (prefix) => prefix.hash, makePrefix, (row, prefix) => {
    const [, tokens, requests, hits, saved] = row.children;
    setText(tokens, count(prefix.tokens));
    setText(requests, count(prefix.requests));
    setText(hits, percent(prefix.hit_rate));
    setText(saved.lastChild, short(prefix.saved_tokens));
    saved.firstChild.style.width = `${(100 * prefix.saved_tokens) / most}%`;
  });
}

const BUILD_PREFIXES = {
  none: () => [element("p", { class: "empty", text: "No prompt has shared its beginning with another one yet." })],
  locked: (openKeys) => {
    const button = element("button", { type: "button", text: hasAdminKey() ? "Change the keys" : "Enter the admin key" });
    button.addEventListener("click", () => openKeys());
    return [element("p", { class: "empty", text: "What others have asked is shown with the admin key only." }), button];
  },
  table: () => {
    const columns = ["Begins with", "Tokens", "Prompts", "Hit rate", "Tokens saved"];
    const head = columns.map((name, index) => element("th", { scope: "col", class: index ? "number" : null, text: name }));
    const table = element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody"));
    return [element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of prefixes" }, table)];
  },
};

function makePrefix(prefix) {
  return element("tr", {},
    element("th", { scope: "row", class: "words", text: prefix.first_words || prefix.hash.slice(0, 12), title: prefix.hash }),
    ...[0, 1, 2].map(() => element("td", { class: "number" })),
    element("td", { class: "number saved" }, element("i", { "aria-hidden": "true" }), element("span")));
}

function grow(node, value) {
  node.style.flexGrow = String(value);
}
