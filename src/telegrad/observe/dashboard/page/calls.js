// Calls that have not ended: the oldest first, nested ones below the call that made them.

import { h, keyed, put, setText } from "./dom.js";
import { bytes, count, duration, shortName, shortPath } from "./format.js";
import { store, now } from "./store.js";
import { workerTag } from "./parts.js";

const keyOf = (call) => `${call.caller}\u0000${call.id}`;

// Returns the calls with their depth. Each comes once, also if what peers say of parents is a cycle.
function nested(calls) {
  const children = new Map();
  const known = new Set(calls.map(keyOf));
  const roots = [];
  for (const call of calls) {
    const parent = call.parent ? `${call.parent[0]}\u0000${call.parent[1]}` : null;
    if (parent && known.has(parent) && parent !== keyOf(call)) {
      if (!children.has(parent)) children.set(parent, []);
      children.get(parent).push(call);
    } else roots.push(call);
  }
  const rows = [];
  const seen = new Set();
  const walk = (call, depth) => {
    if (seen.has(keyOf(call))) return;
    seen.add(keyOf(call));
    rows.push({ call, depth: Math.min(depth, 8) });
    for (const child of children.get(keyOf(call)) || []) walk(child, depth + 1);
  };
  for (const call of [...roots, ...calls]) walk(call, 0);
  return rows;
}

// Durations and sizes by function, the one with the most time first.
function statistics() {
  const found = new Map();
  for (const span of store.spans) {
    if (span.kind !== "call") continue;
    if (!found.has(span.what)) found.set(span.what, { name: span.what, times: [], failed: 0, sent: 0, received: 0, total: 0 });
    const each = found.get(span.what);
    each.times.push(span.ended - span.began);
    each.total += span.ended - span.began;
    each.failed += span.outcome ? 1 : 0;
    each.sent += span.size || 0;
    each.received += span.received || 0;
  }
  return [...found.values()].sort((one, other) => other.total - one.total).slice(0, 40);
}

function fillFunction(row, each) {
  const sorted = each.times.sort((one, other) => one - other);
  const at = (part) => duration(sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * part))]);
  const texts = [shortName(each.name), count(sorted.length), each.failed || "", at(0.5), at(0.95), at(1), bytes(each.sent), bytes(each.received)];
  texts.forEach((text, index) => setText(row.children[index], text));
  row.firstChild.title = each.name;
}

export function calls(main) {
  let words = "";
  const filter = h("input", { type: "search", placeholder: "Filter by function, worker or state", "aria-label": "Filter calls",
    oninput: (event) => { words = event.target.value.toLowerCase(); update(); } });
  const total = h("span", { class: "muted" });
  const body = h("tbody");
  const empty = h("p", { class: "empty" }, "No call is waiting. Calls that end within one update appear in the timeline only.");
  put(main, h("section", { class: "panel" },
    h("div", { class: "panel-head" }, h("h1", {}, "Live calls"), total, filter),
    h("div", { class: "scroll" }, h("table", { class: "grid" },
      h("thead", {}, h("tr", {}, ...["Age", "Function", "Call", "State", "Where it is", "Where it was made", "Deadline"].map((name) => h("th", { scope: "col" }, name)))),
      body)), empty));

  const functions = h("tbody");
  main.append(h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Functions"), h("span", { class: "muted" }, "calls that ended in the last minute")),
    h("div", { class: "scroll" }, h("table", { class: "grid" }, h("thead", {}, h("tr", {}, ...["Function", "Calls", "Failed", "Median", "95 %", "Slowest", "Sent", "Received"].map((name, index) =>
      h("th", { scope: "col", class: index ? "number" : "" }, name)))), functions))));

  function make() {
    return h("tr", {}, h("td", { class: "age" }, h("span"), h("i")), h("td", { class: "function" }), h("td", { class: "pair" }), h("td"),
      h("td", { class: "where" }), h("td", { class: "where" }), h("td", { class: "number" }));
  }

  function fill(row, { call, depth }, oldest) {
    const [age, name, pair, state, runs, made, deadline] = row.children;
    const seconds = Math.max(0, now() - call.began);
    setText(age.firstChild, duration(seconds));
    age.lastChild.style.width = `${Math.round(100 * seconds / Math.max(oldest, 0.001))}%`;
    row.classList.toggle("old", seconds > 10);
    name.style.paddingInlineStart = `${12 + depth * 18}px`;
    name.title = call.function;
    setText(name, (depth ? "↳ " : "") + shortName(call.function));
    put(pair, workerTag(call.caller), h("span", { class: "arrow", "aria-label": "calls" }, "→"), workerTag(call.callee), h("span", { class: "muted" }, ` #${call.id}`));
    put(state, h("span", { class: `pill ${call.cancelled ? "bad" : call.state === "running" ? "good" : "wait"}` }, call.cancelled ? `cancelled: ${call.cancelled}` : call.state || "sent"));
    setText(runs, shortPath(call.runs_at) || "–");
    setText(made, shortPath(call.made_at) || "–");
    runs.title = call.runs_at;
    made.title = call.made_at;
    setText(deadline, call.deadline === null ? "none" : `in ${duration(Math.max(0, call.deadline - now()))}`);
  }

  function update() {
    const all = store.snapshot.calls;
    const found = words ? all.filter((call) => `${call.function} ${call.caller} ${call.callee} ${call.state}`.toLowerCase().includes(words)) : all;
    const rows = nested(found);
    const oldest = found.reduce((most, call) => Math.max(most, now() - call.began), 0);
    keyed(body, rows, (row) => keyOf(row.call), make, (row, item) => fill(row, item, oldest));
    empty.hidden = rows.length > 0;
    const inAll = store.snapshot.calls_in_all;
    keyed(functions, statistics(), (each) => each.name, () => h("tr", {}, h("td", { class: "function" }), ...Array.from({ length: 7 }, () => h("td", { class: "number" }))), fillFunction);
    setText(total, found.length < inAll ? `${found.length} of ${inAll}` : `${inAll}`);
  }
  return { update };
}
