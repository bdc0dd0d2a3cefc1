// Gives every span of the timeline its place: a lane for each worker, in it a track for each kind, in it rows.

import { store } from "./store.js";

export const ROW = 15, GAP = 10, HEAD = 22;
const MOST_ROWS = 8;

const TRACKS = { call: 0, serve: 1, pass: 2, island: 3, gate: 3, probe: 3, "gradient-sent": 3, "gradient-arrived": 3, step: 4, collective: 4 };

let placed = { resets: -1, last: null, workers: new Map() };

function tracksOf(name) {
  if (!placed.workers.has(name)) placed.workers.set(name, Array.from({ length: 5 }, () => ({ ends: [], spans: [] })));
  return placed.workers.get(name);
}

function rowFor(ends, span) {
  // Spans come in the order of their ends. So a row is free if what it got last ended before this one began.
  const free = ends.findIndex((end) => end <= span.began + 1e-9);
  return free >= 0 ? free : Math.min(ends.length, MOST_ROWS - 1);
}

// Places the spans that are new, and returns all. A span keeps its row while it is shown.
export function place() {
  const spans = store.spans;
  let from = 0;
  if (placed.resets === store.resets && placed.last) {
    from = spans.lastIndexOf(placed.last) + 1;
  } else {
    placed = { resets: store.resets, last: null, workers: new Map() };
  }
  for (const span of spans.slice(from)) {
    const track = tracksOf(span.worker)[TRACKS[span.kind] ?? 4];
    if (span.kind.startsWith("gradient")) span.row = 0;
    else {
      span.row = rowFor(track.ends, span);
      track.ends[span.row] = Math.max(track.ends[span.row] || 0, span.ended);
    }
    track.spans.push(span);
  }
  if (spans.length) placed.last = spans.at(-1);
  const oldest = spans.length ? spans[0].ended : 0;
  for (const tracks of placed.workers.values()) {
    for (const track of tracks) {
      const drop = track.spans.findIndex((span) => span.ended >= oldest);
      if (drop > 0) track.spans.splice(0, drop);
      else if (drop < 0) track.spans.length = 0;
    }
  }
  return placed.workers;
}

// Calls and passes that have not ended, as spans that end now.
function running(name, tracks) {
  const taken = tracks.map((track) => [...track.ends]);
  const found = [];
  const add = (span) => {
    const index = TRACKS[span.kind];
    span.row = rowFor(taken[index], span);
    taken[index][span.row] = Infinity;
    found.push([index, span]);
  };
  for (const call of store.snapshot.calls) {
    const common = { began: call.began, ended: Infinity, id: call.id, what: call.function, context: call.context, parent: call.parent, live: true };
    if (call.caller === name) add({ worker: name, kind: "call", peer: call.callee, ...common });
    if (call.callee === name) add({ worker: name, kind: "serve", peer: call.caller, ...common });
  }
  for (const pass of store.snapshot.passes) {
    if (pass.parts.some((part) => part.worker === name)) add({ worker: name, kind: "pass", peer: pass.driver, what: "backward", began: pass.began, ended: Infinity, pass_id: pass.id, context: pass.context, live: true });
  }
  return found;
}

// Returns the lanes from top to bottom: name, y, height, and rows of spans with their y.
export function layout(workers, names, hidden) {
  let y = 30;
  const lanes = [];
  for (const name of names) {
    const tracks = workers.get(name) || tracksOf(name);
    const live = running(name, tracks);
    const lane = { name, y, tracks: [] };
    let at = y + HEAD;
    for (const [index, track] of tracks.entries()) {
      const spans = [...track.spans, ...live.filter(([own]) => own === index).map(([, span]) => span)].filter((span) => !hidden.has(span.kind.split("-")[0]));
      if (!spans.length) continue;
      const rows = 1 + spans.reduce((most, span) => Math.max(most, span.row), 0);
      lane.tracks.push({ y: at, spans, rows });
      at += rows * (ROW + 1) + 3;
    }
    lane.height = Math.max(at - y, HEAD + 6);
    y += lane.height + GAP;
    lanes.push(lane);
  }
  return { lanes, height: y };
}
