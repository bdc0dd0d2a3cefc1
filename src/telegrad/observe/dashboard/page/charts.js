// Line charts of one value of every worker over the last minutes, drawn on canvas.

import { h } from "./dom.js";
import { css, duration, workerColor } from "./format.js";
import { store, now, workerIndex } from "./store.js";
import { canvasContext, showTip } from "./parts.js";

const LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 22;

function niceCeiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  for (const factor of [1, 2, 2.5, 5, 10]) if (factor * power >= value) return factor * power;
  return 10 * power;
}

// Sizes are counted in powers of two.
function niceBytes(value) {
  let ceiling = 1024;
  while (ceiling < value) ceiling *= 2;
  return ceiling;
}

// The parts of a series between which the worker did not answer: what it did then is not known.
function unbroken(points) {
  const order = new Map(store.points.map(({ at }, index) => [at, index]));
  const parts = [];
  for (const point of points) {
    const last = parts.at(-1);
    if (last && order.get(point[0]) === order.get(last.at(-1)[0]) + 1) last.push(point);
    else parts.push([point]);
  }
  return parts;
}

export class Chart {
  constructor(title, unit, valueOf, format, inBytes = false) {
    Object.assign(this, { title, valueOf, format, inBytes, hover: null });
    this.canvas = h("canvas", { class: "chart", role: "img", tabindex: "0" });
    this.latest = h("span", { class: "latest" });
    this.element = h("figure", { class: "panel chart-panel" },
      h("figcaption", { class: "panel-head" }, h("h2", {}, title), h("span", { class: "muted" }, unit), this.latest), this.canvas);
    this.canvas.addEventListener("pointermove", (event) => {
      this.hover = event;
      this.draw();
    });
    this.canvas.addEventListener("pointerleave", () => {
      this.hover = null;
      showTip(null, null);
      this.draw();
    });
  }

  series() {
    const names = (store.snapshot ? store.snapshot.workers : []).map((worker) => worker.name);
    return names.map((name) => ({
      name,
      points: store.points.filter((point) => point.workers[name]).map((point) => [point.at, this.valueOf(point.workers[name])]),
    }));
  }

  draw() {
    const [context, width, height] = canvasContext(this.canvas);
    if (width < 80) return;
    const series = this.series();
    const end = now();
    const first = store.points.length ? store.points[0].at : end;
    // Not more time than there are points for: a group that is watched for ten seconds fills the plot.
    const span = Math.min(store.historySeconds, Math.max(30, (end - first) * 1.02));
    const begin = end - span;
    const highest = Math.max(0, ...series.flatMap((each) => each.points.map((point) => point[1])));
    const top = this.inBytes ? niceBytes(highest) : niceCeiling(highest);
    const x = (at) => LEFT + ((at - begin) / span) * (width - LEFT - RIGHT);
    const y = (value) => height - BOTTOM - (value / top) * (height - TOP - BOTTOM);
    this.axes(context, width, height, span, top, y);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT - RIGHT, height);
    context.clip();
    for (const { name, points } of series)
      for (const part of unbroken(points)) this.line(context, part, x, y, (alpha) => workerColor(workerIndex(name), alpha), height);
    context.restore();
    // A worker that did not answer the last look has no value now.
    const last = store.points.length ? store.points.at(-1).at : null;
    const current = series.map(({ name, points }) => [name, points.length && points.at(-1)[0] === last ? points.at(-1)[1] : null]);
    this.latest.textContent = this.format(current.reduce((sum, [, value]) => sum + (value || 0), 0));
    this.canvas.setAttribute("aria-label", `${this.title}, now ${current.map(([name, value]) =>
      `${name} ${value === null ? "unknown" : this.format(value)}`).join(", ")}`);
    if (this.hover) this.crosshair(context, width, height, begin, span, series, y);
  }

  axes(context, width, height, span, top, y) {
    context.font = `11px ${css("--sans")}`;
    context.fillStyle = css("--muted");
    context.strokeStyle = css("--grid");
    context.lineWidth = 1;
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (let part = 0; part <= 2; part += 1) {
      const value = (top * part) / 2;
      const at = Math.round(y(value)) + 0.5;
      context.beginPath();
      context.moveTo(LEFT, at);
      context.lineTo(width - RIGHT, at);
      context.stroke();
      context.fillText(this.format(value), LEFT - 8, at);
    }
    context.textBaseline = "alphabetic";
    context.textAlign = "left";
    context.fillText(`−${duration(Math.round(span))}`, LEFT, height - 6);
    context.textAlign = "right";
    context.fillText("now", width - RIGHT, height - 6);
  }

  line(context, points, x, y, color, height) {
    if (!points.length) return;
    context.beginPath();
    for (const [index, [at, value]] of points.entries()) {
      if (index) context.lineTo(x(at), y(value));
      else context.moveTo(x(at), y(value));
    }
    context.strokeStyle = color(1);
    context.lineWidth = 1.75;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(points.at(-1)[0]), y(0));
    context.lineTo(x(points[0][0]), y(0));
    const fade = context.createLinearGradient(0, TOP, 0, height - BOTTOM);
    fade.addColorStop(0, color(0.16));
    fade.addColorStop(1, color(0));
    context.fillStyle = fade;
    context.fill();
  }

  crosshair(context, width, height, begin, span, series, y) {
    const box = this.canvas.getBoundingClientRect();
    const at = begin + ((this.hover.clientX - box.left - LEFT) / (width - LEFT - RIGHT)) * span;
    const nearest = store.points.reduce((best, point) => (!best || Math.abs(point.at - at) < Math.abs(best.at - at) ? point : best), null);
    if (!nearest) return;
    const px = LEFT + ((nearest.at - begin) / span) * (width - LEFT - RIGHT);
    context.strokeStyle = css("--muted");
    context.setLineDash([3, 3]);
    context.beginPath();
    context.moveTo(px, TOP);
    context.lineTo(px, height - BOTTOM);
    context.stroke();
    context.setLineDash([]);
    const lines = [h("div", { class: "muted" }, `${duration(Math.max(0, now() - nearest.at))} ago`)];
    for (const { name } of series) {
      if (!nearest.workers[name]) continue;
      const value = this.valueOf(nearest.workers[name]);
      context.fillStyle = workerColor(workerIndex(name));
      context.beginPath();
      context.arc(px, y(value), 3, 0, 7);
      context.fill();
      const dot = h("i", { class: "dot" });
      dot.style.background = workerColor(workerIndex(name));
      lines.push(h("div", { class: "tip-row" }, h("span", {}, dot, name), h("b", {}, this.format(value))));
    }
    showTip(this.hover, lines.slice(0, 24));
  }
}

// A line without axes, for tiles and rows.
export function sparkline(canvas, values, color) {
  const [context, width, height] = canvasContext(canvas);
  if (values.length < 2 || width < 8) return;
  const top = Math.max(...values) || 1;
  const x = (index) => 1 + (index / (values.length - 1)) * (width - 2);
  const y = (value) => height - 2 - (value / top) * (height - 4);
  context.beginPath();
  values.forEach((value, index) => (index ? context.lineTo(x(index), y(value)) : context.moveTo(x(index), y(value))));
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke();
  context.lineTo(x(values.length - 1), height);
  context.lineTo(x(0), height);
  context.globalAlpha = 0.14;
  context.fillStyle = color;
  context.fill();
  context.globalAlpha = 1;
}
