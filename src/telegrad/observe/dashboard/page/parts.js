// Small pieces that several views use.

import { h } from "./dom.js";
import { workerColor } from "./format.js";
import { workerIndex } from "./store.js";

// A worker's name with its colour.
export function workerTag(name) {
  const dot = h("i", { class: "dot", "aria-hidden": "true" });
  dot.style.background = workerColor(workerIndex(name));
  return h("span", { class: "worker" }, dot, name);
}

const tip = h("div", { class: "tip", hidden: true, role: "tooltip" });
document.body.append(tip);

// Shows lines of text, or nodes, near the pointer. None: hides it.
export function showTip(event, lines) {
  if (!lines) {
    tip.hidden = true;
    return;
  }
  tip.replaceChildren(...lines.map((line) => (line instanceof Node ? line : h("div", {}, line))));
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = event.clientX + 14 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 14;
  const top = Math.min(event.clientY + 14, innerHeight - box.height - 8);
  tip.style.left = `${Math.max(4, left)}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

// Sizes a canvas to its box in device pixels, and returns its context scaled to CSS pixels.
export function canvasContext(canvas) {
  const box = canvas.getBoundingClientRect();
  const ratio = devicePixelRatio || 1;
  const width = Math.round(box.width * ratio);
  const height = Math.round(box.height * ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, box.width, box.height);
  return [context, box.width, box.height];
}
