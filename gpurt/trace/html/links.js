// Links: the state that a URL holds after its `#`, so that a view can be sent to somebody.
//
//   view=begin,end  range=begin,end   nanoseconds        span=step.task       q=query
//   colour=operator|layer|request|stall   path=1   theme=light|dark   lane=first lane in pixels

import { COLOUR_MODES } from "./colour.js";

const WRITE_DELAY_MS = 250;

export class Links {
  constructor(viewer) {
    this.viewer = viewer;
    this.timer = 0;
    this.last = "";
    addEventListener("hashchange", () => {
      if (location.hash !== this.last) this.read();
    });
  }

  /** Takes over what the URL says; what it does not name stays. */
  read() {
    const { viewer } = this;
    const fields = new URLSearchParams(location.hash.slice(1));
    const theme = fields.get("theme");
    if (theme === "light" || theme === "dark") viewer.setTheme(theme);
    if (COLOUR_MODES.includes(fields.get("colour"))) viewer.setMode(fields.get("colour"));
    if (fields.has("q")) viewer.setQuery(fields.get("q"));
    if (fields.has("path")) viewer.setPath(fields.get("path") === "1");
    const range = pair(fields.get("range"));
    if (range) viewer.setRange(range);
    const view = pair(fields.get("view"));
    if (view) viewer.show(...view);
    const span = /^(\d+)\.(\d+)$/.exec(fields.get("span") ?? "");
    if (span) {
      const found = viewer.trace.find(Number(span[1]) - viewer.trace.firstStep, Number(span[2]));
      if (found >= 0) viewer.select(found, { reveal: !view });
    }
    const scroll = Number(fields.get("lane"));
    if (scroll > 0) viewer.scrollLanes(scroll - viewer.view.scroll);
  }

  /** Writes the state soon; a burst of changes makes one write, and no entries in the history. */
  write() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.writeNow(), WRITE_DELAY_MS);
  }

  writeNow() {
    this.last = `#${this.text()}`;
    try {
      history.replaceState(null, "", this.last);
    } catch {
      location.hash = this.last; // a page from a file may not replace its state
    }
  }

  text() {
    const { viewer } = this;
    const { view, trace, range, selected } = viewer;
    const fields = [["view", `${Math.round(view.begin)},${Math.round(view.end)}`]];
    if (selected >= 0)
      fields.push(["span", `${trace.firstStep + trace.step[selected]}.${trace.task[selected]}`]);
    if (range) fields.push(["range", range.map(Math.round).join(",")]);
    if (viewer.query) fields.push(["q", encodeURIComponent(viewer.query)]);
    if (viewer.colours.mode !== "operator") fields.push(["colour", viewer.colours.mode]);
    if (viewer.pathShown) fields.push(["path", "1"]);
    if (viewer.themeChosen) fields.push(["theme", viewer.theme]);
    if (view.scroll) fields.push(["lane", view.scroll]);
    return fields.map(([name, value]) => `${name}=${value}`).join("&");
  }
}

function pair(text) {
  const numbers = (text ?? "").split(",").map(Number);
  return numbers.length === 2 && numbers[0] < numbers[1] ? numbers : null;
}
