// Overview: the whole trace in one strip, with the part that is seen; drag it, or its ends.

import { font } from "./frame.js";

const END_PX = 7;

export class Overview {
  constructor(viewer, canvas) {
    this.viewer = viewer;
    this.canvas = canvas;
    this.columns = null;
    this.listen();
  }

  draw(ratio) {
    const { canvas, viewer } = this;
    const { trace, ink, view } = viewer;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    if (canvas.width !== Math.round(width * ratio)) {
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      this.columns = null;
    }
    const [begin, end] = view.whole;
    const count = Math.max(1, Math.round(this.plotWidth / 2));
    this.columns ??= viewer.integrals.columns(begin, end, count);
    const context = canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    const most = this.columns.length * trace.lanes.length;
    const wide = this.plotWidth / count;
    context.fillStyle = ink.accent;
    context.globalAlpha = 0.55;
    for (let i = 0; i < count; ++i) {
      const share = this.columns.run[i] / most;
      const tall = share > 0 ? Math.max(1.5, share * (height - 12)) : 0;
      context.fillRect(view.gutter + i * wide, height - 6 - tall, wide, tall);
    }
    context.globalAlpha = 1;
    context.font = font(11);
    context.textBaseline = "middle";
    context.fillStyle = ink.muted;
    context.fillText("overview", 14, height / 2);
    this.drawView(context, height, ink);
  }

  drawView(context, height, ink) {
    const { view } = this.viewer;
    const [from, to] = [this.x(view.begin), this.x(view.end)];
    const [low, high] = [this.x(view.whole[0]), this.x(view.whole[1])];
    context.globalAlpha = 0.62;
    context.fillStyle = ink.ground;
    context.fillRect(low, 0, from - low, height);
    context.fillRect(to, 0, high - to, height);
    context.globalAlpha = 1;
    context.strokeStyle = ink.accent;
    context.lineWidth = 1.5;
    const wide = Math.max(to - from, 3);
    context.beginPath();
    context.roundRect(from - 0.5, 2, wide + 1, height - 4, 3);
    context.stroke();
  }

  get plotWidth() {
    return Math.max(1, this.canvas.clientWidth - this.viewer.view.gutter);
  }

  x(time) {
    const { view } = this.viewer;
    return view.gutter + ((time - view.whole[0]) / view.wholeLength) * this.plotWidth;
  }

  time(x) {
    const { view } = this.viewer;
    return view.whole[0] + ((x - view.gutter) / this.plotWidth) * view.wholeLength;
  }

  listen() {
    const { canvas, viewer } = this;
    let grip = null;
    canvas.addEventListener("pointerdown", (e) => {
      const { view } = viewer;
      const x = e.offsetX;
      const [from, to] = [this.x(view.begin), this.x(view.end)];
      const isWide = to - from > 3 * END_PX;
      if (isWide && Math.abs(x - from) <= END_PX) grip = { part: "begin" };
      else if (isWide && Math.abs(x - to) <= END_PX) grip = { part: "end" };
      else {
        const inside = x >= from && x <= to;
        grip = { part: "all", offset: inside ? this.time(x) - view.begin : view.length / 2 };
        this.drag(grip, x);
      }
      canvas.setPointerCapture(e.pointerId);
    });
    canvas.addEventListener("pointermove", (e) => grip && this.drag(grip, e.offsetX));
    canvas.addEventListener("pointerup", () => (grip = null));
    canvas.addEventListener(
      "wheel",
      (e) => {
        e.preventDefault();
        viewer.zoom(Math.exp(e.deltaY * 0.002), (viewer.view.begin + viewer.view.end) / 2);
      },
      { passive: false },
    );
  }

  drag(grip, x) {
    const { view } = this.viewer;
    const time = this.time(x);
    if (grip.part === "begin") this.viewer.show(Math.min(time, view.end - 20), view.end);
    else if (grip.part === "end") this.viewer.show(view.begin, Math.max(time, view.begin + 20));
    else this.viewer.show(time - grip.offset, time - grip.offset + view.length);
  }
}
