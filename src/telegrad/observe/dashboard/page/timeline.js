// The timeline: what every worker did in the last minute, on a canvas that is panned and zoomed.

import { h, put, setText } from "./dom.js";
import { bytes, duration, KINDS, shortName } from "./format.js";
import { store, now } from "./store.js";
import { showTip } from "./parts.js";
import { layout, place } from "./lanes.js";
import { marksOf, paint } from "./painting.js";

const LEAST = 20e-6, LEFT = 150;

export function timeline(main) {
  let span = 10;
  let end = null; // follows the clock while it is null
  let chosen = null;
  let hovered = null;
  let scrolled = 0;
  let frame = 0;
  let dragged = null;
  const hidden = new Set();
  const canvas = h("canvas", { class: "timeline", tabindex: "0", role: "application",
    "aria-label": "Timeline. Left and right arrows pan, plus and minus zoom, F follows the clock, Tab leaves." });
  const follow = h("button", { type: "button", onclick: () => { end = null; } }, "Follow");
  const range = h("span", { class: "muted" });
  const facts = h("dl", { class: "facts" });
  const detail = h("section", { class: "panel detail", hidden: true, "aria-live": "polite" }, h("div", { class: "panel-head" }, h("h2", {}, "Span")), facts);
  const legend = h("div", { class: "legend", role: "group", "aria-label": "Kinds" }, ...KINDS.map(([kind, title]) =>
    h("button", { type: "button", class: `kind kind-${kind}`, "aria-pressed": "true", onclick: (event) => {
      if (!hidden.delete(kind)) hidden.add(kind);
      event.currentTarget.setAttribute("aria-pressed", String(!hidden.has(kind)));
    } }, title)));
  put(main, h("section", { class: "panel timeline-panel" },
    h("div", { class: "panel-head" }, h("h1", {}, "Timeline"), range, legend,
      h("span", { class: "buttons" },
        h("button", { type: "button", "aria-label": "Zoom in", onclick: () => zoom(0.5) }, "+"),
        h("button", { type: "button", "aria-label": "Zoom out", onclick: () => zoom(2) }, "−"), follow)),
    canvas), detail);

  const right = () => (end === null ? now() : end);

  function zoom(factor, part = 1) {
    const next = Math.min(store.spanSeconds, Math.max(LEAST, span * factor));
    const at = right() - span * (1 - part);
    if (end !== null || part !== 1) end = at + next * (1 - part);
    span = next;
  }

  function pan(seconds) {
    end = Math.min(now(), Math.max(now() - store.spanSeconds + span, right() + seconds));
    if (end >= now() - span * 1e-3) end = null;
  }

  function draw() {
    frame = requestAnimationFrame(draw);
    if (!store.snapshot) return;
    const stop = right();
    const view = { left: LEFT, begin: stop - span, end: stop, span, scrolled, hovered, chosen };
    const lanes = layout(place(), store.snapshot.workers.map((worker) => worker.name), hidden);
    scrolled = Math.max(0, Math.min(scrolled, lanes.height - canvas.clientHeight + 40));
    view.scrolled = scrolled;
    paint(canvas, lanes, view);
    setText(range, `${duration(span)}${end === null ? ", live" : `, ${duration(Math.max(0, now() - stop))} ago`}`);
    follow.setAttribute("aria-pressed", String(end === null));
  }

  function spanAt(event) {
    const box = canvas.getBoundingClientRect();
    return marksOf(canvas).findLast((mark) => event.clientX - box.left >= mark.x - 1 && event.clientX - box.left <= mark.x + mark.width + 1
      && event.clientY - box.top >= mark.y && event.clientY - box.top <= mark.y + mark.height)?.span || null;
  }

  function lines(each) {
    return [shortName(each.what) || each.kind, `${each.kind} on ${each.worker}${each.peer ? `, with ${each.peer}` : ""}`,
      each.live ? `running for ${duration(now() - each.began)}` : duration(each.ended - each.began), each.outcome].filter(Boolean);
  }

  function choose(each) {
    chosen = each;
    detail.hidden = !each;
    if (!each) return;
    const rows = [["what", each.what], ["kind", each.kind], ["worker", each.worker], ["peer", each.peer], ["call", each.id], ["took", each.live ? "running" : duration(each.ended - each.began)],
      ["outcome", each.outcome || (each.live ? "" : "ok")], ["sent", each.size ? bytes(each.size) : ""], ["received", each.received ? bytes(each.received) : ""],
      ["context", each.context], ["pass", each.pass_id], ["made by", each.parent ? `call ${each.parent[1]} of ${each.parent[0]}` : ""], ["thread", each.thread || ""]];
    put(facts, rows.filter(([, value]) => value).flatMap(([name, value]) => [h("dt", {}, name), h("dd", {}, String(value))]));
  }

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    const part = (event.clientX - canvas.getBoundingClientRect().left - LEFT) / (canvas.clientWidth - LEFT);
    if (event.shiftKey) scrolled += event.deltaY;
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX / canvas.clientWidth) * span);
    else zoom(Math.exp(event.deltaY * 0.0015), Math.min(1, Math.max(0, part)));
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      const dx = event.clientX - dragged.x;
      if (Math.abs(dx) + Math.abs(event.clientY - dragged.y) > 3 || dragged.moved) {
        pan((-dx / (canvas.clientWidth - LEFT)) * span);
        scrolled -= event.clientY - dragged.y;
        dragged = { x: event.clientX, y: event.clientY, moved: true };
      }
      return;
    }
    hovered = spanAt(event);
    showTip(event, hovered && lines(hovered));
  });
  canvas.addEventListener("pointerup", (event) => {
    if (dragged && !dragged.moved) choose(spanAt(event));
    dragged = null;
  });
  canvas.addEventListener("pointerleave", () => {
    hovered = null;
    showTip(null, null);
  });
  canvas.addEventListener("keydown", (event) => {
    const acts = {
      ArrowLeft: () => pan(-span / 8), ArrowRight: () => pan(span / 8), ArrowUp: () => { scrolled -= 40; }, ArrowDown: () => { scrolled += 40; },
      "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), f: () => { end = null; }, Escape: () => choose(null),
    };
    if (!acts[event.key]) return;
    acts[event.key]();
    event.preventDefault();
  });
  frame = requestAnimationFrame(draw);
  return { update() {}, close() {
    cancelAnimationFrame(frame);
    showTip(null, null);
  } };
}
