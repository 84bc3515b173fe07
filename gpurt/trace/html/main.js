// Main: reads the trace, makes the Viewer and joins it to the page's controls.

import { COLOUR_MODES } from "./colour.js";
import { readTrace } from "./data.js";
import { byId, make } from "./dom.js";
import { count } from "./format.js";
import { Input, keyTable } from "./input.js";
import { Panel } from "./panel.js";
import { Viewer } from "./viewer.js";

const SEARCH_DELAY_MS = 120;

async function start() {
  const data = byId("trace-data");
  const trace = await readTrace(data.textContent.trim());
  data.remove();
  const elements = Object.fromEntries(
    ["stage", "base", "overlay", "overview"].map((id) => [id, byId(id)]),
  );
  const viewer = new Viewer(trace, elements);
  globalThis.gpurt = viewer; // for scripts and tests
  describe(trace);
  joinToolbar(viewer);
  joinSearch(viewer);
  joinHelp(viewer);
  viewer.panel = new Panel(viewer);
  new Input(viewer);
  viewer.showFirst();
  viewer.links.read();
  document.documentElement.dataset.ready = "yes";
}

function describe(trace) {
  const ranks = trace.ranks > 1 ? `${trace.ranks} ranks, ` : "";
  byId("name").textContent = trace.name;
  byId("about").textContent =
    `${trace.device} · ${ranks}${count(trace.lanes.length)} workers · ` +
    `${count(trace.size)} spans · ${count(trace.wholeSteps.length)} whole steps`;
  byId("about").title = byId("about").textContent;
  const dropped = byId("dropped");
  dropped.hidden = !trace.dropped;
  dropped.textContent = `${count(trace.dropped)} spans dropped`;
  dropped.title = "Newer spans took their place: the ring that keeps them is finite.";
}

function joinToolbar(viewer) {
  const modes = byId("modes");
  for (const mode of COLOUR_MODES) {
    const radio = make("input", {
      type: "radio",
      name: "mode",
      value: mode,
      checked: mode === viewer.colours.mode,
      onchange: () => viewer.setMode(mode),
    });
    modes.append(make("label", {}, radio, make("span", {}, mode)));
  }
  const path = byId("path-toggle");
  const theme = byId("theme");
  const panel = byId("panel-toggle");
  path.addEventListener("click", () => viewer.setPath(!viewer.pathShown));
  theme.addEventListener("click", () =>
    viewer.setTheme(viewer.theme === "dark" ? "light" : "dark"),
  );
  panel.addEventListener("click", () => {
    const hidden = document.body.classList.toggle("no-panel");
    panel.setAttribute("aria-pressed", String(!hidden));
  });
  byId("link").addEventListener("click", () => copyLink(viewer));
  document.documentElement.dataset.theme = viewer.theme;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (e) => {
    if (!viewer.themeChosen) viewer.setTheme(e.matches ? "dark" : "light", false);
  });
  viewer.onChange((what) => {
    if (what === "path") path.setAttribute("aria-pressed", String(viewer.pathShown));
    if (what === "mode") modes.querySelector(`[value=${viewer.colours.mode}]`).checked = true;
  });
}

async function copyLink(viewer) {
  viewer.links.writeNow();
  const button = byId("link");
  try {
    await navigator.clipboard.writeText(location.href);
    button.textContent = "Copied";
  } catch {
    button.textContent = "In the address bar"; // the browser refused the clipboard
  }
  setTimeout(() => (button.textContent = "Copy link"), 1600);
}

function joinSearch(viewer) {
  const field = byId("search");
  const found = byId("found");
  let timer = 0;
  field.addEventListener("input", () => {
    clearTimeout(timer);
    timer = setTimeout(() => viewer.setQuery(field.value), SEARCH_DELAY_MS);
  });
  field.addEventListener("keydown", (e) => {
    if (e.key === "Enter") {
      clearTimeout(timer);
      if (viewer.query !== field.value) viewer.setQuery(field.value);
      viewer.nextMatch(e.shiftKey ? -1 : 1);
    } else if (e.key === "Escape") {
      clearTimeout(timer);
      viewer.setQuery("");
      viewer.elements.overlay.focus();
    }
  });
  viewer.onChange((what) => {
    if (what !== "query") return;
    if (field.value !== viewer.query) field.value = viewer.query;
    const size = viewer.matches ? viewer.matches.size : 0;
    found.textContent = viewer.problem || (viewer.matches ? `${count(size)} found` : "");
    found.classList.toggle("none", Boolean(viewer.matches) && !size);
  });
}

function joinHelp(viewer) {
  const help = byId("help");
  const arrows = { ArrowLeft: "←", ArrowRight: "→", ArrowUp: "↑", ArrowDown: "↓" };
  const names = { ...arrows, Escape: "Esc" };
  const rows = keyTable(viewer).map(([keys, what]) =>
    make(
      "div",
      {},
      make(
        "dt",
        {},
        keys.filter((k) => k !== "=").map((k) => make("kbd", {}, names[k] ?? k)),
      ),
      make("dd", {}, what),
    ),
  );
  byId("keys").append(...rows);
  byId("help-toggle").addEventListener("click", () => help.showModal());
  help.addEventListener("click", (e) => e.target === help && help.close());
}

start().catch((error) => {
  const text = `This trace cannot be shown: ${error.message}`;
  document.body.prepend(make("p", { class: "failure", role: "alert" }, text));
  document.documentElement.dataset.ready = "failed";
  throw error;
});
