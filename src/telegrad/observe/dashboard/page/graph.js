// Draws the graph of a context: workers are lanes, messages with tensors are edges, and gradients light them up.

import { h, put, s } from "./dom.js";
import { bytes, duration, workerColor } from "./format.js";
import { now, workerIndex } from "./store.js";
import { showTip } from "./parts.js";

const LABEL = 138, LANE = 92, TOP = 46, STEP_MOST = 110, STEP_LEAST = 40;
const REPLAY = 4;

// The order in which messages left, as far as it is known: by their place among their sender's, then by lane.
function columns(graph) {
  const lanes = new Map(graph.workers.map((name, index) => [name, index]));
  const byId = (one, other) => (BigInt(one.message) < BigInt(other.message) ? -1 : 1);
  const rank = new Map();
  const seen = new Map();
  for (const edge of Object.values(graph.edges).sort(byId)) {
    rank.set(edge.message, seen.get(edge.source) || 0);
    seen.set(edge.source, rank.get(edge.message) + 1);
  }
  const edges = Object.values(graph.edges);
  // Gradients flow in the reverse order: where a pass has shown it, it is known exactly.
  const pass = Object.values(graph.passes).at(-1);
  const sent = (edge) => (pass && edge.flows[pass.id] ? edge.flows[pass.id].sent ?? edge.flows[pass.id].arrived : null);
  edges.sort((one, other) => rank.get(one.message) - rank.get(other.message) || lanes.get(one.source) - lanes.get(other.source) || byId(one, other));
  const known = edges.filter((edge) => sent(edge) !== null).sort((one, other) => sent(other) - sent(one));
  if (known.length < 2) return edges;
  let next = 0;
  return edges.map((edge) => (sent(edge) === null ? edge : known[next++]));
}

export class GraphView {
  constructor() {
    this.element = h("div", { class: "graph scroll", tabindex: "0", role: "group", "aria-label": "Graph of the context" });
    this.slider = h("input", { type: "range", class: "time", min: "0", max: "1000", value: "1000", "aria-label": "Time within the pass",
      oninput: () => {
        this.playing = false;
        this.scrub = Number(this.slider.value) / 1000;
        this.light();
      } });
    Object.assign(this, { playing: false, scrub: 1, drawn: "", frame: 0, graph: null, live: false, paths: new Map(), lanes: new Map() });
  }

  close() {
    cancelAnimationFrame(this.frame);
    showTip(null, null);
  }

  show(graph, live) {
    const other = !this.graph || this.graph.context !== graph.context;
    if (other) this.scrub = 1;
    const wasLive = this.live;
    Object.assign(this, { graph, live });
    const drawn = `${graph.context} ${graph.workers.length} ${Object.keys(graph.edges).length} ${this.element.clientWidth} ${document.documentElement.dataset.theme} ${columns(graph).map((edge) => edge.message).join()}`;
    if (drawn !== this.drawn) {
      this.drawn = drawn;
      this.draw();
    }
    // A pass that ended while it was watched is shown once more, slowly enough to be seen.
    if ((other || wasLive) && !live && this.times() && !this.playing && this.endedJustNow()) this.replay();
    else if (!this.playing) this.light();
  }

  endedJustNow() {
    const [, ended] = this.times();
    return now() - ended < 3;
  }

  times() {
    const pass = Object.values(this.graph.passes).at(-1);
    if (!pass) return null;
    const flows = Object.values(this.graph.edges).map((edge) => edge.flows[pass.id]).filter(Boolean);
    const all = [pass.began, pass.ended, ...flows.flatMap((flow) => [flow.sent, flow.arrived])].filter((time) => time !== null);
    if (!all.length) return null;
    return [Math.min(...all), this.live ? now() : Math.max(...all)];
  }

  replay() {
    if (matchMedia("(prefers-reduced-motion: reduce)").matches || !this.times()) return;
    cancelAnimationFrame(this.frame);
    this.playing = true;
    const began = performance.now();
    const step = () => {
      if (!this.playing) return;
      this.scrub = Math.min(1, (performance.now() - began) / (REPLAY * 1000));
      this.slider.value = String(Math.round(this.scrub * 1000));
      this.light();
      if (this.scrub < 1) this.frame = requestAnimationFrame(step);
      else this.playing = false;
    };
    this.frame = requestAnimationFrame(step);
  }

  draw() {
    const edges = columns(this.graph);
    const room = Math.max(320, this.element.clientWidth - 8);
    const step = Math.max(STEP_LEAST, Math.min(STEP_MOST, (room - LABEL - 60) / Math.max(1, edges.length)));
    const width = Math.max(room, LABEL + 60 + step * edges.length);
    const height = TOP + LANE * this.graph.workers.length;
    const y = (name) => TOP + LANE * this.graph.workers.indexOf(name) + LANE / 2 - 16;
    this.paths.clear();
    this.lanes.clear();
    const svg = s("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${edges.length} messages between ${this.graph.workers.join(", ")}` });
    svg.append(s("defs", {}, ...["edge", "lit"].map((kind) => s("marker", { id: `arrow-${kind}`, viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" },
      s("path", { d: "M0 0.8 7 4 0 7.2z", class: `head-${kind}` })))));
    svg.append(s("text", { x: LABEL + 24, y: 20, class: "axis" }, "forward →"), s("text", { x: width - 12, y: 20, class: "axis", "text-anchor": "end" }, "← gradients"));
    for (const name of this.graph.workers) svg.append(this.lane(name, y(name), width, edges, step));
    for (const [index, edge] of edges.entries()) svg.append(this.edge(edge, LABEL + 40 + index * step, step, y(edge.source), y(edge.target)));
    put(this.element, svg);
  }

  lane(name, y, width, edges, step) {
    const color = workerColor(workerIndex(name));
    const label = s("text", { x: 30, y: y + 4, class: "lane-name" }, name.length > 15 ? `${name.slice(0, 14)}…` : name, s("title", {}, name));
    const glow = s("rect", { x: LABEL, y: y - 13, width: width - LABEL - 8, height: 26, rx: 13, class: "lane-glow" });
    glow.style.fill = color;
    const dot = s("circle", { cx: 17, cy: y, r: 5 });
    dot.style.fill = color;
    this.lanes.set(name, glow);
    return s("g", { class: "lane" }, glow, s("line", { x1: LABEL, x2: width - 8, y1: y, y2: y, class: "lane-line" }), dot, label);
  }

  edge(edge, x, step, from, to) {
    const end = x + Math.min(step * 0.78, 70);
    const bend = (end - x) * 0.55;
    const path = from === to ? `M${x} ${from} C${x} ${from - 46} ${end} ${from - 46} ${end} ${to}` : `M${x} ${from} C${x + bend} ${from} ${end - bend} ${to} ${end} ${to}`;
    const line = s("path", { d: path, class: "edge", "marker-end": "url(#arrow-edge)" });
    const flow = s("path", { d: path, class: "flow" });
    flow.style.stroke = workerColor(workerIndex(edge.target));
    const shape = edge.shapes.length && step >= 96 && from !== to
      ? s("text", { x: (x + end) / 2 + 9, y: (from + to) / 2 + (to > from ? -4 : 12), class: "shape" }, edge.shapes[0].replace(/^float32/, "f32").slice(0, 14)) : null;
    const hit = s("path", { d: path, class: "hit", tabindex: "0", role: "img", "aria-label": this.describe(edge).join(", "),
      onpointermove: (event) => showTip(event, this.describe(edge)), onpointerleave: () => showTip(null, null) });
    const group = s("g", { class: "edge-group" }, line, flow, s("circle", { cx: x, cy: from, r: 4, class: "end" }), s("circle", { cx: end, cy: to, r: 4, class: "end" }), shape, hit);
    this.paths.set(edge.message, group);
    return group;
  }

  describe(edge) {
    const pass = Object.values(this.graph.passes).at(-1);
    const flow = pass ? edge.flows[pass.id] : null;
    const lines = [`${edge.source} → ${edge.target}`, edge.shapes.join(", ") || (edge.tensors ? `${edge.tensors} tensors` : "")];
    if (flow && flow.sent !== null && pass.began !== null) lines.push(`gradient left ${edge.target} ${duration(flow.sent - pass.began)} after the pass began`);
    if (flow && flow.arrived !== null && flow.sent !== null) lines.push(`and took ${duration(Math.max(0, flow.arrived - flow.sent))}${flow.size ? ` for ${bytes(flow.size)}` : ""}`);
    if (!flow && pass && !this.live) lines.push("no gradient: what it carried was not used");
    return lines.filter(Boolean);
  }

  // The messages as a table, in the order in which they are drawn.
  rows() {
    const pass = Object.values(this.graph.passes).at(-1);
    return columns(this.graph).map((edge) => {
      const flow = (pass && edge.flows[pass.id]) || null;
      const sent = flow ? flow.sent ?? flow.arrived : null;
      return { edge, took: flow && flow.sent !== null && flow.arrived !== null ? duration(Math.max(0, flow.arrived - flow.sent)) : "",
        left: sent !== null && pass.began !== null ? `+${duration(Math.max(0, sent - pass.began))}` : "", size: flow && flow.size ? bytes(flow.size) : "",
        state: sent !== null ? "arrived" : !pass ? "recorded" : this.live ? "waits" : "unused" };
    });
  }

  // Colours edges and lanes for the moment that is shown.
  light() {
    const pass = Object.values(this.graph.passes).at(-1);
    const times = this.times();
    this.slider.hidden = !times || this.live;
    const at = times ? times[0] + (this.live ? 1 : this.scrub) * (times[1] - times[0]) : 0;
    // Long enough to be seen, however fast it was.
    const shown = times ? Math.max(this.live ? 0.6 : 0.0, this.playing ? (times[1] - times[0]) * 0.14 : 0) : 0;
    const over = times && !this.live && this.scrub >= 1;
    for (const edge of Object.values(this.graph.edges)) {
      const group = this.paths.get(edge.message);
      if (!group) continue;
      const flow = pass ? edge.flows[pass.id] : null;
      const sent = flow ? flow.sent ?? flow.arrived : null;
      let state = "idle";
      if (sent !== null && sent <= at) state = !over && at - Math.max(sent, flow.arrived ?? at) <= shown ? "flowing" : "done";
      else if (over && pass.ended !== null && !flow) state = "unused";
      group.setAttribute("class", `edge-group ${state}`);
    }
    for (const [name, glow] of this.lanes) {
      const busy = pass && !over && pass.spans.some(([worker, began, ended, kind]) => worker === name && kind !== "pass" && began <= at && at <= Math.max(ended, began + shown));
      glow.classList.toggle("busy", Boolean(busy));
    }
  }
}
