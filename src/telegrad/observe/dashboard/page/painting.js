// Paints the lanes of the timeline: the ruler, spans, and arrows from callers to callees and along gradients.

import { css, duration, shortName, workerColor } from "./format.js";
import { workerIndex } from "./store.js";
import { canvasContext } from "./parts.js";
import { ROW } from "./lanes.js";

const MOST_ARROWS = 160;
const marks = new WeakMap();

// What is under the pointer: the rectangles of the last painting.
export function marksOf(canvas) {
  return marks.get(canvas) || [];
}

function ruler(context, view, width, height, x) {
  const rough = view.span / Math.max(2, (width - view.left) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= rough);
  context.font = `11px ${css("--sans")}`;
  context.textBaseline = "middle";
  context.textAlign = "center";
  // Counted from the right edge, so that the labels are round numbers.
  for (let count = Math.floor(view.span / step); count > 0; count -= 1) {
    const tick = view.end - count * step;
    context.strokeStyle = css("--grid");
    context.beginPath();
    context.moveTo(Math.round(x(tick)) + 0.5, 24);
    context.lineTo(Math.round(x(tick)) + 0.5, height);
    context.stroke();
    context.fillStyle = css("--muted");
    const text = `−${duration(count * step)}`;
    if (x(tick) > view.left + 30 && x(tick) < width - 30) context.fillText(text, x(tick), 14);
  }
}

// A text that is too long for its span ends with dots, not in the middle of a letter.
function fitting(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = Math.min(text.length, Math.floor(width / 4));
  while (length > 1 && context.measureText(`${text.slice(0, length)}…`).width > width) length -= 1;
  return length > 1 ? `${text.slice(0, length)}…` : "";
}

function label(context, span, x, y, width) {
  if (width < 34) return;
  context.save();
  context.beginPath();
  context.rect(x, y, width - 3, ROW);
  context.clip();
  context.fillStyle = css("--on-span");
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.font = `600 10.5px ${css("--sans")}`;
  context.fillText(fitting(context, shortName(span.what) || span.kind, x + width - 6 - Math.max(x, 0)), Math.max(x, 0) + 5, y + ROW / 2 + 0.5);
  context.restore();
}

function paintSpan(context, span, mark, colors, view) {
  const { x, y, width } = mark;
  if (span.kind.startsWith("gradient")) {
    context.fillStyle = colors[span.kind];
    context.beginPath();
    context.moveTo(x, y + 2);
    context.lineTo(x + 5, y + ROW / 2);
    context.lineTo(x, y + ROW - 2);
    context.lineTo(x - 5, y + ROW / 2);
    context.fill();
    return;
  }
  context.globalAlpha = span.live ? 0.62 : 1;
  context.fillStyle = span.outcome ? colors.failed : colors[span.kind] || colors.call;
  context.beginPath();
  context.roundRect(x, y, Math.max(width, 1.5), ROW, Math.min(3, width / 2));
  context.fill();
  context.globalAlpha = 1;
  if (span === view.chosen || span === view.hovered) {
    context.strokeStyle = css("--text");
    context.lineWidth = 1.5;
    context.stroke();
    context.lineWidth = 1;
  }
  label(context, span, x, y, width);
}

function arrows(context, painted, view) {
  const key = (caller, id) => `${caller}\u0000${id}`;
  const made = new Map();
  const served = new Map();
  const sent = new Map();
  const arrived = new Map();
  for (const mark of painted) {
    const span = mark.span;
    if (span.kind === "call") made.set(key(span.worker, span.id), mark);
    else if (span.kind === "serve") served.set(key(span.peer, span.id), mark);
    else if (span.kind === "gradient-sent") sent.set(key(span.pass_id, span.id), mark);
    else if (span.kind === "gradient-arrived") arrived.set(key(span.pass_id, span.id), mark);
  }
  const draw = (from, to, kind) => {
    const wanted = [view.chosen, view.hovered].some((each) => each && (each === from.span || each === to.span));
    if (!wanted && painted.length > MOST_ARROWS) return;
    context.strokeStyle = css(kind);
    context.globalAlpha = wanted ? 1 : 0.5;
    const [x1, y1, x2, y2] = [from.x, from.y + ROW / 2, to.x, to.y + ROW / 2];
    const bend = Math.max(8, Math.abs(x2 - x1) / 2);
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1 + bend, y1, x2 - bend, y2, x2, y2);
    context.stroke();
    context.fillStyle = css(kind);
    context.beginPath();
    context.arc(x2, y2, 2.5, 0, 7);
    context.fill();
    context.globalAlpha = 1;
  };
  for (const [call, mark] of made) if (served.has(call)) draw(mark, served.get(call), "--arrow");
  for (const [message, mark] of sent) if (arrived.has(message)) draw(mark, arrived.get(message), "--gradient");
}

// Paints the visible part of all lanes.
export function paint(canvas, { lanes }, view) {
  const [context, width, height] = canvasContext(canvas);
  if (width < view.left + 40) return;
  const x = (time) => view.left + ((time - view.begin) / view.span) * (width - view.left);
  const colors = Object.fromEntries(["call", "serve", "pass", "island", "gate", "probe", "step", "collective", "failed"].map((kind) => [kind, css(`--${kind}`)]));
  colors["gradient-sent"] = css("--gradient");
  colors["gradient-arrived"] = css("--gradient");
  const painted = [];
  const gradients = [];
  ruler(context, view, width, height, x);
  context.save();
  context.beginPath();
  context.rect(0, 26, width, height - 26);
  context.clip();
  for (const lane of lanes) {
    const top = lane.y - view.scrolled;
    if (top > height || top + lane.height < 0) continue;
    context.fillStyle = css("--lane");
    context.beginPath();
    context.roundRect(6, top, width - 12, lane.height, 8);
    context.fill();
    context.fillStyle = workerColor(workerIndex(lane.name));
    context.beginPath();
    context.arc(20, top + 14, 4.5, 0, 7);
    context.fill();
    context.fillStyle = css("--text");
    context.font = `600 12.5px ${css("--sans")}`;
    context.textAlign = "left";
    context.textBaseline = "middle";
    context.fillText(lane.name.length > 16 ? `${lane.name.slice(0, 15)}…` : lane.name, 31, top + 14.5);
    context.save();
    context.beginPath();
    context.rect(view.left, 0, width - view.left - 6, height);
    context.clip();
    for (const track of lane.tracks) {
      for (const span of track.spans) {
        const ended = span.live ? view.end : span.ended;
        if (ended < view.begin || span.began > view.end) continue;
        const from = Math.max(view.left - 4, x(span.began));
        const mark = { span, x: from, y: track.y - view.scrolled + span.row * (ROW + 1), width: x(ended) - from, height: ROW };
        painted.push(mark);
        if (span.kind.startsWith("gradient")) gradients.push(mark);
        else paintSpan(context, span, mark, colors, view);
      }
    }
    // On top of the islands that they start.
    for (const mark of gradients.splice(0)) paintSpan(context, mark.span, mark, colors, view);
    context.restore();
  }
  context.save();
  context.beginPath();
  context.rect(view.left, 0, width - view.left - 6, height);
  context.clip();
  arrows(context, painted, view);
  context.restore();
  context.restore();
  marks.set(canvas, painted);
}
