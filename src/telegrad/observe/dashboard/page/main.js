// Puts the page together: tabs, tools, shortcuts and the view that is open.

import { h, put, setText } from "./dom.js";
import { store, connect, onChange, pause, changed } from "./store.js";
import { overview } from "./overview.js";
import { calls } from "./calls.js";
import { passes } from "./passes.js";
import { timeline } from "./timeline.js";
import { stuck, stuckCount } from "./stuck.js";

const VIEWS = [
  ["overview", "Overview", overview],
  ["calls", "Calls", calls],
  ["passes", "Passes", passes],
  ["timeline", "Timeline", timeline],
  ["stuck", "Stuck", stuck],
];
const BADGES = {
  calls: () => (store.snapshot ? store.snapshot.calls_in_all : 0),
  passes: () => (store.snapshot ? store.snapshot.passes.length : 0),
  stuck: stuckCount,
};

const main = document.getElementById("view");
const tabs = document.querySelector(".tabs");
let open = null;

// The token has been exchanged for a cookie. It need not stay in the address bar and the history.
if (location.search) history.replaceState(null, "", location.pathname + location.hash);

for (const [index, [name, title]] of VIEWS.entries()) {
  tabs.append(h("a", { href: `#${name}`, role: "tab", id: `tab-${name}`, "aria-controls": "view", title: `${title} (${index + 1})` },
    title, h("span", { class: "badge", hidden: true })));
}

function show() {
  const wanted = location.hash.slice(1);
  const [name, title, view] = VIEWS.find(([each]) => each === wanted) || VIEWS[0];
  if (open && open.name === name) return;
  if (open && open.close) open.close();
  for (const tab of tabs.children) {
    const selected = tab.id === `tab-${name}`;
    tab.setAttribute("aria-selected", String(selected));
    tab.tabIndex = selected ? 0 : -1;
  }
  document.title = `${title} · telegrad`;
  main.className = `view-${name}`;
  main.setAttribute("aria-labelledby", `tab-${name}`);
  put(main);
  open = { name, ...view(main) };
  update();
}

function update() {
  const live = document.getElementById("live");
  const state = store.paused ? "paused" : store.ended ? "ended" : !store.connected ? "reconnecting" : store.error ? "unseen" : "live";
  setText(live, state);
  live.dataset.state = state;
  const notice = document.getElementById("notice");
  const text = store.ended ? "The dashboard was closed. What you see is the last state."
    : store.error ? `Cannot see the group: ${store.error}.${store.snapshot ? ` What you see is from ${store.seenAt}.` : ""}` : "";
  setText(notice, text);
  notice.hidden = !text;
  for (const [name, countOf] of Object.entries(BADGES)) {
    const badge = document.querySelector(`#tab-${name} .badge`);
    const found = countOf();
    setText(badge, found);
    badge.hidden = !found;
    badge.classList.toggle("alarm", name === "stuck");
  }
  if (store.snapshot) open.update();
}

function setPaused(on) {
  pause(on);
  const button = document.getElementById("pause");
  setText(button, on ? "Resume" : "Pause");
  button.setAttribute("aria-pressed", String(on));
}

function switchTheme() {
  const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem("telegrad-theme", theme);
  } catch (error) {
    console.debug("no storage", error);
  }
  changed();
}

document.getElementById("pause").addEventListener("click", () => setPaused(!store.paused));
document.getElementById("theme").addEventListener("click", switchTheme);
tabs.addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  const all = [...tabs.children];
  const next = all[(all.indexOf(document.activeElement) + step + all.length) % all.length];
  next.focus();
  location.hash = next.getAttribute("href");
  event.preventDefault();
});
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, button, [role=slider]")) return;
  const number = Number(event.key);
  if (number >= 1 && number <= VIEWS.length) location.hash = VIEWS[number - 1][0];
  else if (event.key === "d") switchTheme();
  else if (event.key === " " && !event.target.matches("a, summary, canvas, tr, [role=treeitem]")) setPaused(!store.paused);
  else return;
  event.preventDefault();
});
addEventListener("hashchange", show);
onChange(update);
show();
connect();
