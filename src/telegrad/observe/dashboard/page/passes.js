// Contexts and their backward passes: a list of what runs and what ran last, and the graph of the chosen one.

import { h, keyed, put, setText } from "./dom.js";
import { duration } from "./format.js";
import { store, now } from "./store.js";
import { GraphView } from "./graph.js";
import { workerTag } from "./parts.js";

const lastPass = (graph) => Object.values(graph.passes).at(-1) || null;
const runs = (graph) => store.snapshot.passes.some((each) => each.context === graph.context);

function order(graphs) {
  // Those that run first, then the latest.
  return [...graphs].sort((one, other) => runs(other) - runs(one) || (other.ended === null) - (one.ended === null) || other.began - one.began);
}

function stateOf(graph) {
  const last = lastPass(graph);
  if (runs(graph)) return ["backward", "wait"];
  if (last && last.outcome) return [last.outcome, "bad"];
  if (last && last.ended !== null) return ["done", "good"];
  return graph.ended === null ? ["recording", "wait"] : ["ended", ""];
}

function summary(graph) {
  const last = lastPass(graph);
  const edges = Object.values(graph.edges);
  const flowed = last ? edges.filter((edge) => edge.flows[last.id]).length : 0;
  const took = last && last.began !== null && last.ended !== null ? ` in ${duration(last.ended - last.began)}` : "";
  return last ? `${flowed} of ${edges.length} edges had gradients${took}` : `${edges.length} edges`;
}

export function passes(main) {
  let selected = "";
  let follow = true;
  const list = h("ul", { class: "contexts", "aria-label": "Contexts" });
  const view = new GraphView();
  const title = h("h1", {}, "No pass yet");
  const pill = h("span", { class: "pill" });
  const note = h("span", { class: "muted" });
  const parts = h("div", { class: "parts" });
  const replay = h("button", { type: "button", onclick: () => view.replay() }, "▶ Replay");
  const newest = h("button", { type: "button", "aria-pressed": "true", onclick: () => {
    follow = !follow;
    update();
  } }, "Follow the newest");
  const empty = h("p", { class: "empty" }, "No autograd context has been seen. One appears when a worker enters telegrad.autograd.context().");
  const body = h("tbody");
  const table = h("section", { class: "panel" }, h("div", { class: "panel-head" }, h("h2", {}, "Messages of this context")),
    h("div", { class: "scroll" }, h("table", { class: "grid" }, h("thead", {}, h("tr", {}, ...["Message", "Tensors", "Gradient", "Left", "Took", "Size"].map((name) =>
      h("th", { scope: "col" }, name)))), body)));
  put(main, h("aside", { class: "panel side" }, h("div", { class: "panel-head" }, h("h2", {}, "Contexts"), newest), list),
    h("div", { class: "column" }, h("section", { class: "panel stage" },
      h("div", { class: "panel-head" }, title, pill, note, replay), empty, view.element, view.slider, parts), table));

  function choose(context) {
    selected = context;
    follow = false;
    update();
  }

  function make(graph) {
    return h("li", {}, h("button", { type: "button", onclick: () => choose(graph.context) },
      h("span", { class: "context-line" }, h("b"), h("span", { class: "pill" })), h("span", { class: "muted" })));
  }

  function fill(item, graph) {
    const button = item.firstChild;
    const [line, text] = button.children;
    const [state, kind] = stateOf(graph);
    setText(line.firstChild, `context ${shortId(graph.context)}`);
    setText(line.lastChild, state);
    line.lastChild.className = `pill ${kind}`;
    const last = lastPass(graph);
    const took = last && last.began !== null && last.ended !== null ? `backward ${duration(last.ended - last.began)} · ` : "";
    setText(text, `${graph.workers.length} workers · ${took}${duration(Math.max(0, now() - graph.began))} ago`);
    button.setAttribute("aria-current", String(graph.context === selected));
  }

  function update() {
    const graphs = order(store.graphs.values());
    if ((follow || !store.graphs.has(selected)) && graphs.length) {
      const drawn = graphs.find((graph) => Object.keys(graph.edges).length) || graphs[0];
      // A newer pass does not interrupt one that is being replayed.
      if (!view.playing) selected = drawn.context;
    }
    newest.setAttribute("aria-pressed", String(follow));
    keyed(list, graphs.slice(0, 40), (graph) => graph.context, make, fill);
    const graph = store.graphs.get(selected);
    empty.hidden = Boolean(graph);
    replay.hidden = !graph || !lastPass(graph);
    pill.hidden = !graph;
    table.hidden = !graph;
    if (!graph) return;
    const [state, kind] = stateOf(graph);
    setText(title, `Context ${shortId(graph.context)}`);
    title.title = graph.context;
    setText(pill, state);
    pill.className = `pill ${kind}`;
    setText(note, summary(graph) + (graph.left_out ? `; ${graph.left_out} edges are not drawn` : ""));
    view.show(graph, runs(graph));
    keyed(body, view.rows(), ({ edge }) => edge.message, () => h("tr", {}, ...Array.from({ length: 6 }, () => h("td"))), fillMessage);
    const row = store.snapshot.passes.find((each) => each.context === selected);
    put(parts, row ? row.parts.map(part) : []);
  }

  function fillMessage(row, { edge, state, left, took, size }) {
    const cells = row.children;
    put(cells[0], workerTag(edge.source), h("span", { class: "arrow", "aria-label": "to" }, "→"), workerTag(edge.target));
    setText(cells[1], edge.shapes.join(", ") || edge.tensors || "");
    put(cells[2], h("span", { class: `pill ${state === "arrived" ? "good" : state === "waits" ? "wait" : ""}` }, state));
    [left, took, size].forEach((text, index) => setText(cells[3 + index], text));
  }

  function part(each) {
    const waits = [...each.gates, ...(each.waits_for.length ? [`replies of ${each.waits_for.join(", ")}`] : [])];
    return h("div", { class: "part" }, workerTag(each.worker), h("span", { class: "pill wait" }, each.state || "runs"),
      h("span", { class: "muted" }, `islands: ${each.islands_run} run, ${each.islands_left} left`),
      waits.length ? h("span", {}, `waits for ${waits.join("; ")}`) : null);
  }
  return { update, close: () => view.close() };
}

// An id has 16 bits of its worker and a counter.
function shortId(text) {
  const value = BigInt(text || "0");
  return `${value >> 48n}·${(value & 0xffffffffffffn).toString(16).slice(-6)}`;
}
