// Numbers, sizes and times as people read them, and the colours of workers and kinds.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  let unit = 0;
  while (value >= 1000 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 || value >= 100 ? Math.round(value) : value.toFixed(1)} ${UNITS[unit]}`;
}

export function count(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(1)} G`;
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)} M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)} k`;
  return Number.isInteger(value) || value >= 100 ? Math.round(value).toLocaleString("en") : value.toFixed(1);
}

export function duration(seconds) {
  if (seconds < 0) return `−${duration(-seconds)}`;
  if (seconds < 1e-3) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1e3).toFixed(seconds < 0.01 ? 2 : seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${String(Math.floor(seconds % 60)).padStart(2, "0")} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${String(Math.floor((seconds / 60) % 60)).padStart(2, "0")} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds / 3600) % 24)} h`;
}

// Golden angle: neighbours are far apart, however many workers there are.
export function workerColor(index, alpha = 1) {
  const hue = (178 + index * 137.508) % 360;
  const dark = document.documentElement.dataset.theme === "dark";
  return `oklch(${dark ? 0.78 : 0.55} ${dark ? 0.13 : 0.15} ${hue.toFixed(1)} / ${alpha})`;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export const KINDS = [
  ["call", "call made"],
  ["serve", "call served"],
  ["pass", "backward pass"],
  ["island", "island"],
  ["gate", "gate"],
  ["probe", "probe"],
  ["gradient", "gradient"],
  ["step", "optimizer step"],
  ["collective", "collective"],
];

// How often a worker was replaced: a launcher counts its restarts in steps of 65536.
export function replaced(generation) {
  return generation >= 65536 ? `restart ${Math.floor(generation / 65536)}` : `generation ${generation}`;
}

// The last two parts of a path; the whole one is shown by the pointer.
export function shortPath(where = "") {
  return where.replace(/\/\S*\/(?=[^/\s]+\/[^/\s]+:\d)/, "…/");
}

// "module:Class.method" without the module, which is in the details.
export function shortName(name = "") {
  const at = name.lastIndexOf(":");
  return at >= 0 && at < name.length - 1 ? name.slice(at + 1) : name;
}
