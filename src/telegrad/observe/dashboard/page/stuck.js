// What has waited for long, as a tree over workers, with its cycles.

import { h, put } from "./dom.js";
import { duration, shortPath } from "./format.js";
import { store } from "./store.js";
import { workerTag } from "./parts.js";

export function stuckCount() {
  const found = store.snapshot && store.snapshot.stuck;
  return found ? found.cycles.length || found.roots.filter((item) => !item.expected).length : 0;
}

function frames(stack) {
  if (!stack.length) return null;
  return h("details", { class: "stack" }, h("summary", {}, stack.length === 1 ? "the frame of its thread" : `the ${stack.length} frames of its thread`),
    h("ol", {}, ...stack.map((frame) => h("li", {}, h("span", { class: "muted", title: frame.file }, shortPath(`${frame.file}:${frame.line}`)), " ", h("b", {}, frame.function),
      frame.text ? h("code", {}, frame.text) : null))));
}

function node(item, level) {
  const body = h("div", { class: "stuck-body" },
    h("div", { class: "stuck-line" }, workerTag(item.worker), h("span", { class: "pill" }, item.kind),
      h("b", { class: "stuck-title" }, item.title), h("span", { class: "age-tag" }, duration(item.age)),
      item.in_cycle ? h("span", { class: "pill bad" }, "in a cycle") : item.expected ? h("span", { class: "pill" }, "in shutdown") : null),
    item.text ? h("div", { class: "stuck-text" }, item.text) : null,
    item.where ? h("div", { class: "where", title: item.where }, shortPath(item.where)) : null,
    frames(item.stack));
  return h("li", { role: "treeitem", "aria-level": level, "aria-expanded": item.children.length ? "true" : undefined, tabindex: level === 1 ? "0" : "-1", class: item.in_cycle ? "cycle" : "" },
    body, item.children.length ? h("ul", { role: "group" }, ...item.children.map((child) => node(child, level + 1))) : null);
}

function moves(event) {
  const items = [...event.currentTarget.querySelectorAll("[role=treeitem]")];
  const at = items.indexOf(event.target.closest("[role=treeitem]"));
  const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: items.length - 1 }[event.key];
  if (to === undefined || !items[to] || event.target.matches("summary")) return;
  items[to].focus();
  event.preventDefault();
}

export function stuck(main) {
  const banner = h("div");
  const tree = h("ul", { class: "stuck-tree", role: "tree", "aria-label": "What waits for what", onkeydown: moves });
  const empty = h("p", { class: "empty" });
  let drawn = "";
  put(main, banner, h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h1", {}, "Stuck"),
    h("span", { class: "muted" }, "calls and passes that have waited for long, and what they wait for")), empty, tree));

  function update() {
    const found = store.snapshot.stuck || { cycles: [], roots: [], seconds: 10 };
    empty.hidden = found.roots.length > 0;
    empty.textContent = `Nothing has waited for more than ${duration(found.seconds)}.`;
    // Open stacks and focus survive, unless what is stuck changes.
    const shape = JSON.stringify(found, (key, value) => (key === "age" ? undefined : value));
    if (shape === drawn) {
      const ages = [];
      const collect = (items) => items.forEach((item) => {
        ages.push(item.age);
        collect(item.children);
      });
      collect(found.roots);
      tree.querySelectorAll(".age-tag").forEach((tag, index) => { tag.textContent = duration(ages[index]); });
      return;
    }
    drawn = shape;
    put(banner, found.cycles.map((cycle) => h("section", { class: "panel cycle-panel", role: "alert" },
      h("div", { class: "panel-head" }, h("h2", {}, "A cycle: these wait for each other, and none can go on")),
      h("ol", { class: "cycle-steps" }, ...cycle.steps.map((step) => h("li", {}, workerTag(step.worker),
        h("div", {}, h("b", { class: "stuck-title" }, step.function), " ", h("span", {}, step.text), step.where ? h("div", { class: "where", title: step.where }, shortPath(step.where)) : null)))))));
    put(tree, found.roots.map((item) => node(item, 1)), found.left_out ? h("li", { class: "muted" }, `and ${found.left_out} more`) : null);
  }
  return { update };
}
