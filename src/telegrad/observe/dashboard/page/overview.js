// The group at a glance: figures of the whole group, every worker, and plots of the last minutes.

import { h, keyed, put, setText } from "./dom.js";
import { bytes, count, css, duration, replaced, workerColor } from "./format.js";
import { Chart, sparkline } from "./charts.js";
import { store, now, workerIndex } from "./store.js";
import { workerTag } from "./parts.js";

const sum = (rates, value) => Object.values(rates).reduce((total, each) => total + value(each), 0);
const recent = (value) => store.points.slice(-60).map((point) => sum(point.workers, value));
const total = (value) => store.snapshot.workers.reduce((all, worker) => all + value(worker), 0);

const TILES = [
  ["Workers", () => {
    const workers = store.snapshot.workers;
    const alive = workers.filter((worker) => worker.state === "alive").length;
    return alive === workers.length ? `${alive}` : `${alive} of ${workers.length}`;
  }, () => {
    const hosts = new Set(store.snapshot.workers.map((worker) => worker.host).filter(Boolean)).size;
    return hosts === 1 ? "on one host" : `on ${hosts} hosts`;
  }, null],
  ["Calls", () => `${count(total((worker) => worker.rates.calls))}/s`, () => `${count(total((worker) => worker.calls_made))} in all`, (rates) => rates.calls],
  ["Traffic", () => `${bytes(total((worker) => worker.rates.sent))}/s`, () => `${bytes(total((worker) => worker.bytes_sent))} sent`, (rates) => rates.sent],
  ["Backward passes", () => `${count(total((worker) => worker.rates.passes))}/s`, () => `${store.snapshot.passes.length} running`, (rates) => rates.passes],
  ["Memory", () => bytes(total((worker) => worker.memory)), () => `${bytes(total((worker) => worker.shared_memory))} shared`, (rates) => rates.memory],
  ["Oldest call", () => {
    const calls = store.snapshot.calls;
    return calls.length ? duration(Math.max(0, now() - calls[0].began)) : "–";
  }, () => `${store.snapshot.calls_in_all} live`, null],
];

const COLUMNS = [
  ["Worker", ""], ["State", ""], ["Host", ""], ["Pid", "number"], ["Incarnation", ""], ["Up", "number"], ["Calls/s", "number"],
  ["Served/s", "number"], ["", "spark"], ["Out", "number"], ["In", "number"], ["CPU", "number"], ["Memory", "number"],
  ["Threads", "number"], ["Fds", "number"], ["Passes", "number"], ["Steps", "number"], ["RRefs", "number"],
];

function tile([title, value, note, series]) {
  const number = h("div", { class: "tile-value" });
  const under = h("div", { class: "tile-note" });
  const canvas = series ? h("canvas", { "aria-hidden": "true" }) : null;
  const element = h("div", { class: "tile" }, h("div", { class: "tile-title" }, title), number, under, canvas);
  return { element, update() {
    setText(number, value());
    setText(under, note());
    if (canvas) sparkline(canvas, recent(series), css("--accent"));
  } };
}

function makeRow() {
  const row = h("tr", { tabindex: "0", class: "clickable", "aria-expanded": "false" }, ...COLUMNS.map(([, kind]) => h("td", { class: kind })));
  put(row.children[8], h("canvas", { "aria-hidden": "true" }));
  return row;
}

function fillRow(row, worker) {
  const cells = row.children;
  const rates = worker.rates;
  const alive = worker.state === "alive";
  put(cells[0], workerTag(worker.name));
  put(cells[1], h("span", { class: `pill ${alive ? "good" : "bad"}`, title: worker.reason }, worker.state));
  const texts = alive
    ? [worker.host, worker.pid, `${worker.incarnation.slice(0, 8)}${worker.generation ? ` · ${replaced(worker.generation)}` : ""}`, duration(worker.up), count(rates.calls), count(rates.served), null,
      `${bytes(rates.sent)}/s`, `${bytes(rates.received)}/s`, `${Math.round(rates.cpu * 100)} %`, bytes(worker.memory),
      worker.threads, worker.descriptors, count(worker.passes_run), count(worker.optimizer_steps), `${worker.references_owned} / ${worker.references_held}`]
    : [null, ...Array(15).fill("")];
  if (!alive) put(cells[2], h("span", { class: "reason", title: worker.reason }, worker.reason || "–"));
  texts.forEach((text, index) => text !== null && setText(cells[index + 2], text));
  cells[17].title = "owned / held";
  row.classList.toggle("gone", !alive);
  const values = store.points.slice(-60).map((point) => (point.workers[worker.name] ? point.workers[worker.name].calls + point.workers[worker.name].served : 0));
  sparkline(cells[8].firstChild, values, workerColor(workerIndex(worker.name)));
}

function details(worker) {
  if (worker.state !== "alive") return facts([[worker.state, worker.reason || "–"]]);
  return facts([
    ["id", worker.id], ["incarnation", worker.incarnation], ["replaced", worker.generation ? replaced(worker.generation) : "no"],
    ["addresses", worker.addresses.join("  ") || "–"],
    ["connections", Object.entries(worker.connections).map(([name, kind]) => `${name} (${kind})`).join(", ") || "none"],
    ["calls", `${count(worker.calls_made)} made, ${count(worker.calls_served)} served, ${count(worker.calls_failed)} failed, ${worker.live_calls} live`],
    ["bytes", `${bytes(worker.bytes_sent)} sent, ${bytes(worker.bytes_received)} received`],
    ["autograd", `${worker.contexts} contexts, ${worker.passes_run} passes, ${worker.optimizer_steps} optimizer steps`],
    ["RRefs", `${worker.references_owned} owned, ${worker.references_held} held`],
    ["clock offset", `${duration(worker.offset)} ± ${duration(worker.offset_error)}`],
    ["events dropped", worker.dropped],
  ]);
}

function facts(found) {
  return h("dl", { class: "facts" }, ...found.flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
}

export function overview(main) {
  const tiles = TILES.map(tile);
  const body = h("tbody");
  const drawer = h("section", { class: "panel drawer", hidden: true, "aria-live": "polite" });
  const charts = [
    new Chart("Calls made", "per second", (rates) => rates.calls, count),
    new Chart("Traffic", "bytes sent per second", (rates) => rates.sent, bytes, true),
    new Chart("Memory", "resident", (rates) => rates.memory, bytes, true),
    new Chart("CPU", "cores in use", (rates) => rates.cpu, (value) => (value && value < 10 ? String(Number(value.toFixed(2))) : value.toFixed(0))),
  ];
  let selected = "";
  const choose = (name) => {
    selected = selected === name ? "" : name;
    update();
  };
  put(main, h("div", { class: "tiles" }, ...tiles.map((each) => each.element)),
    h("section", { class: "panel" },
      h("div", { class: "panel-head" }, h("h1", {}, "Workers"), h("span", { class: "muted" }, "choose one for its details")),
      h("div", { class: "scroll" }, h("table", { class: "grid workers" },
        h("thead", {}, h("tr", {}, ...COLUMNS.map(([name, kind]) => h("th", { scope: "col", class: kind }, name)))), body))),
    drawer, h("div", { class: "charts" }, ...charts.map((chart) => chart.element)));

  function make(worker) {
    const row = makeRow();
    row.addEventListener("click", () => choose(worker.name));
    row.addEventListener("keydown", (event) => {
      if (event.key === "Enter" || event.key === " ") {
        choose(worker.name);
        event.preventDefault();
      }
    });
    return row;
  }

  function update() {
    for (const each of tiles) each.update();
    const workers = store.snapshot.workers;
    keyed(body, workers, (worker) => worker.name, make, (row, worker) => {
      fillRow(row, worker);
      row.classList.toggle("selected", worker.name === selected);
      row.setAttribute("aria-expanded", String(worker.name === selected));
    });
    const chosen = workers.find((worker) => worker.name === selected);
    drawer.hidden = !chosen;
    if (chosen) put(drawer, h("div", { class: "panel-head" }, h("h2", {}, workerTag(chosen.name))), details(chosen));
    for (const chart of charts) chart.draw();
  }
  const resized = () => store.snapshot && update();
  addEventListener("resize", resized);
  return { update, close: () => removeEventListener("resize", resized) };
}
