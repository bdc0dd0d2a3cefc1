// What the server has told: the last snapshot, spans, graphs and points, all bounded.

const MOST_SPANS = 20000;
const MOST_GRAPHS = 60;

export const store = {
  snapshot: null,
  spans: [],
  graphs: new Map(),
  points: [],
  error: "",
  connected: false,
  ended: false,
  paused: false,
  spanSeconds: 60,
  historySeconds: 600,
  resets: 0,
  receivedAt: 0,
  seenAt: "",
  frozenAt: null,
};

const listeners = new Set();
let scheduled = false;

export function onChange(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

export function changed() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => {
    scheduled = false;
    for (const listener of listeners) listener();
  });
}

// The observer's clock now. It stands still while the page is paused.
export function now() {
  if (!store.snapshot) return 0;
  if (store.frozenAt !== null) return store.frozenAt;
  return store.snapshot.now + Math.min(5, (performance.now() - store.receivedAt) / 1000);
}

function takeSnapshot(snapshot) {
  if (!snapshot) return;
  store.snapshot = snapshot;
  store.receivedAt = performance.now();
  store.seenAt = new Date(snapshot.wall * 1000).toLocaleTimeString([], { hour12: false });
}

function takeState(state) {
  takeSnapshot(state.snapshot);
  store.spans = state.spans;
  store.graphs = new Map(state.graphs.map((graph) => [graph.context, graph]));
  store.points = state.points;
  store.spanSeconds = state.span_seconds;
  store.historySeconds = state.history_seconds;
  store.error = state.error;
  store.resets += 1;
}

function takeUpdate(update) {
  store.error = "";
  takeSnapshot(update.snapshot);
  const oldest = update.snapshot.now - store.spanSeconds;
  store.spans.push(...update.spans);
  const first = store.spans.findIndex((span) => span.ended >= oldest);
  const drop = Math.max(first < 0 ? store.spans.length : first, store.spans.length - MOST_SPANS);
  if (drop > 0) store.spans.splice(0, drop);
  for (const graph of update.graphs) store.graphs.set(graph.context, graph);
  while (store.graphs.size > MOST_GRAPHS) store.graphs.delete(store.graphs.keys().next().value);
  if (update.point) store.points.push(update.point);
  while (store.points.length && store.points[0].at < update.snapshot.now - store.historySeconds) store.points.shift();
}

let source = null;

export function connect() {
  source = new EventSource("/updates");
  const take = (name, apply) => source.addEventListener(name, (event) => {
    store.connected = true;
    apply(JSON.parse(event.data));
    changed();
  });
  take("state", takeState);
  take("update", takeUpdate);
  take("end", () => {
    store.ended = true;
    store.connected = false;
    source.close();
  });
  source.onopen = () => {
    store.connected = true;
    changed();
  };
  source.onerror = () => {
    store.connected = false;
    changed();
  };
}

// Paused, the page keeps what it shows. Resumed, it fetches the whole state again.
export function pause(on) {
  if (on === store.paused) return;
  if (on) {
    store.frozenAt = now();
    source.close();
  } else {
    store.frozenAt = null;
    connect();
  }
  store.paused = on;
  changed();
}

export function workerIndex(name) {
  const workers = store.snapshot ? store.snapshot.workers : [];
  const found = workers.findIndex((worker) => worker.name === name);
  return found < 0 ? workers.length : found;
}
