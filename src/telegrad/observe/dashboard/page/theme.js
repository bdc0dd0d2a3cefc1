// Sets the theme before anything is drawn. A plain script, so that it runs before the style sheets apply.
"use strict";
(function () {
  var kept = null;
  try { kept = localStorage.getItem("telegrad-theme"); } catch (error) { console.debug("no storage", error); }
  var dark = kept ? kept === "dark" : !matchMedia("(prefers-color-scheme: light)").matches;
  document.documentElement.dataset.theme = dark ? "dark" : "light";
})();
