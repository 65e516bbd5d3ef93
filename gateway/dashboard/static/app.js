// The dashboard: one stream of snapshots in, every panel out.

import { Charts } from "./charts.js";
import { setUpChat } from "./chat.js";
import { byId, setText } from "./dom.js";
import { setUpKeys } from "./keys.js";
import { showHandOver, showPrefixes, showRatio, showTiles } from "./panels.js";
import { Stream } from "./stream.js";
import { Topology } from "./topology.js";

const charts = new Charts(byId("charts"));
const topology = new Topology();
let lastSeen = null;
let lastState = "";
let keyWasGiven = false;

function onEvent(event) {
  lastSeen = Date.now();
  if (event.type === "history") {
    setText(byId("model"), event.model);
    byId("model").title = `Baton ${event.version}`;
    document.title = `${event.model} · Baton`;
    charts.load(event.fields, event.points);
    return;
  }
  const point = charts.add(event.point);
  byId("notice-redis").hidden = event.cluster.redis === "up";
  showTiles(byId("tiles"), point, event);
  topology.show(event);
  showRatio(byId("ratio"), byId("planner"), event.cluster);
  showHandOver(byId("handover"), event);
  showPrefixes(byId("prefixes"), event.prefixes, openKeys);
}

const LABELS = { connecting: "Connecting…", live: "Live", lost: "Reconnecting…", key: "Key needed" };

function onState(state, detail) {
  if (state === "key") openKeys(keyWasGiven ? detail.message : "");
  if (state === "live") keyWasGiven = false;
  if (state === "connecting" && lastState === "lost") return; // still lost, for the reader
  if (state !== lastState) {
    document.body.dataset.state = state;
    setText(byId("link-text"), LABELS[state]);
    byId("notice-lost").hidden = state !== "lost" || lastSeen === null;
    byId("notice-key").hidden = state !== "key";
  }
  lastState = state;
}

function showAge() {
  if (lastSeen === null || document.body.dataset.state !== "lost") return;
  const seconds = Math.round((Date.now() - lastSeen) / 1000);
  setText(byId("lost-age"), seconds < 120 ? `${seconds} s` : `${Math.round(seconds / 60)} min`);
}

const stream = new Stream(onEvent, onState);
const openKeys = setUpKeys(() => {
  keyWasGiven = true;
  stream.restart();
});

byId("open-keys").addEventListener("click", () => openKeys());
byId("give-key").addEventListener("click", () => openKeys());
byId("retry").addEventListener("click", () => stream.hurry());
addEventListener("online", () => stream.hurry());
addEventListener("visibilitychange", () => document.visibilityState === "visible" && stream.hurry());
addEventListener("themechange", () => charts.repaint());
setInterval(showAge, 1000);
setUpChat(openKeys);
stream.restart();
