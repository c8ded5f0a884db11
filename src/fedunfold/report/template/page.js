"use strict";
// Draws the charts from the page's own data, and moves them with the theme, the choices and the sliders.
(() => {
  const root = document.documentElement;
  const drawings = JSON.parse(document.getElementById("drawings").textContent);
  const TEXT = new Set(["x", "y", "z", "name", "categoryarray"]); // data, never colours
  const PHONE = 560;

  // A copy of a chart's description with the theme's colours in place of their names, `var(--name)` and opacity.
  function themed(value, style) {
    if (Array.isArray(value)) return value.map((entry) => themed(entry, style));
    if (typeof value === "string") {
      const found = /^var\((--[\w-]+)\)([0-9a-f]{2})?$/.exec(value);
      return found ? style.getPropertyValue(found[1]).trim() + (found[2] ?? "") : value;
    }
    if (value === null || typeof value !== "object") return value;
    return Object.fromEntries(
      Object.entries(value).map(([key, inner]) => [key, TEXT.has(key) ? inner : themed(inner, style)]),
    );
  }

  // Every frame as one row of weights for each client.
  function unpack(frames) {
    const bytes = Uint8Array.from(atob(frames.values), (letter) => letter.charCodeAt(0));
    const parts = new DataView(bytes.buffer);
    return (frame) =>
      Array.from({ length: frames.clients }, (_, client) =>
        Float32Array.from({ length: frames.rounds }, (_, round) => {
          const index = (frame * frames.clients + client) * frames.rounds + round;
          return parts.getUint16(2 * index, true) * frames.unit;
        }),
      );
  }

  class Card {
    constructor(element) {
      this.element = element;
      this.place = element.querySelector(".chart");
      this.drawings = drawings[element.dataset.drawings];
      this.chosen = 0;
      this.slider = element.querySelector("input[type=range]");
      this.play = element.querySelector(".play");
      element.querySelectorAll("input[type=radio]").forEach((radio) => {
        radio.addEventListener("change", () => this.choose(Number(radio.value)));
      });
      this.slider?.addEventListener("input", () => this.show(Number(this.slider.value)));
      this.play?.addEventListener("click", () => (this.timer ? this.stop() : this.start()));
    }

    get drawing() {
      return this.drawings[this.chosen];
    }

    choose(number) {
      this.stop();
      this.chosen = number;
      const frames = this.drawing.frames;
      this.frame = frames ? frames.captions.length - 1 : 0;
      this.rows = frames ? unpack(frames) : null;
      if (this.slider) {
        this.slider.max = String(this.frame);
        this.slider.disabled = this.play.disabled = this.frame === 0;
      }
      this.draw();
      if (frames) this.caption();
    }

    draw() {
      const { data, layout } = themed({ data: this.drawing.data, layout: this.drawing.layout }, getComputedStyle(root));
      layout.font.family = getComputedStyle(document.body).fontFamily;
      layout.dragmode = false; // a finger on a chart scrolls the page
      layout.xaxis.fixedrange = layout.yaxis.fixedrange = true;
      if (this.rows) data[0].z = this.rows(this.frame);
      if (this.place.clientWidth < PHONE) {
        layout.font.size = 11;
        for (const trace of data) if (trace.colorbar) trace.colorbar = { ...trace.colorbar, thickness: 8, title: {} };
      }
      Plotly.react(this.place, data, layout, { displayModeBar: false, responsive: true });
    }

    show(frame) {
      this.frame = frame;
      Plotly.restyle(this.place, { z: [this.rows(frame)] }, [0]);
      this.caption();
    }

    caption() {
      const text = this.drawing.frames.captions[this.frame];
      this.element.querySelector("output").textContent = text;
      if (!this.slider) return;
      this.slider.value = String(this.frame);
      this.slider.setAttribute("aria-valuetext", text);
    }

    start() {
      const last = this.drawing.frames.captions.length - 1;
      if (this.frame === last) this.show(0);
      this.play.textContent = "Pause";
      this.timer = setInterval(() => {
        this.show(this.frame + 1);
        if (this.frame === last) this.stop();
      }, Math.max(80, 6000 / (last + 1)));
    }

    stop() {
      clearInterval(this.timer);
      this.timer = null;
      if (this.play) this.play.textContent = "Play";
    }
  }

  const cards = Array.from(document.querySelectorAll("[data-drawings]"), (element) => new Card(element));

  // One chart after the other, so that the page can be read and moved meanwhile.
  function drawFrom(number) {
    if (number === cards.length) {
      root.dataset.ready = "true";
      return;
    }
    cards[number].choose(0);
    setTimeout(drawFrom, 0, number + 1);
  }

  const toggle = document.getElementById("theme");

  function dress(theme) {
    root.dataset.theme = theme;
    toggle.setAttribute("aria-pressed", String(theme === "dark"));
    for (const card of cards) if (card.place.data) card.draw(); // those that are drawn already
  }

  toggle.setAttribute("aria-pressed", String(root.dataset.theme === "dark"));
  toggle.addEventListener("click", () => dress(root.dataset.theme === "dark" ? "light" : "dark"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (dark) => dress(dark.matches ? "dark" : "light"));
  drawFrom(0);
})();
