"use strict";
// What all plots share: elements, scales, ticks, numbers as text, colours of the theme, the tooltip.

const PALETTE = 7, DASHES = 4;
const hidden = new Set();   // keys of what the reader has switched off
const redraws = [];         // one function per plot

/** An HTML element, or an SVG one inside an SVG parent; text is always set as text. */
function element(name, attributes = {}, parent = null, text = null) {
  const inside = parent && parent.namespaceURI.endsWith("svg") || name === "svg";
  const made = inside ? document.createElementNS(document.querySelector("svg").namespaceURI, name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== null) made.textContent = text;
  if (parent) parent.append(made);
  return made;
}

function look(place) {
  return place === null || place === undefined ? "" : `c${place % PALETTE} d${place % DASHES}`;
}

function scale(low, high, from, to, log = false) {
  const place = log ? Math.log : (value) => value;
  const start = place(low), width = place(high) - start || 1;
  const map = (value) => from + (place(value) - start) / width * (to - from);
  map.back = (pixel) => {
    const value = start + (pixel - from) / (to - from) * width;
    return log ? Math.exp(value) : value;
  };
  return map;
}

/** Round numbers from `low` to `high`, about `count` of them. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const least = (high - low) / count, power = 10 ** Math.floor(Math.log10(least));
  const step = [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((size) => size >= least * 0.999);
  const first = Math.ceil(low / step - 1e-9), found = [];
  for (let number = first; number * step <= high + step * 1e-9; number++) found.push(+(number * step).toPrecision(12));
  return found;
}

function decades(low, high) {
  const found = [], first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const every = Math.max(1, Math.ceil((last - first) / 6));
  for (let power = first; power <= last; power += every) found.push(10 ** power);
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length > 1 ? inside : ticks(low, high, 4).filter((value) => value > 0);
}

function short(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e5 || size < 1e-3) return value.toExponential(1).replace("e+", "e").replace(".0e", "e");
  return String(+value.toPrecision(3));
}

const FORMS = {
  number: short,
  percent: (value) => `${+(100 * value).toFixed(1)} %`,
  amount: (value) => {
    const [size, unit] = [[1e9, " G"], [1e6, " M"], [1e3, " k"]].find(([least]) => value >= least) || [1, ""];
    return `${+(value / size).toPrecision(3)}${unit}`;
  },
};

/** A colour of the style sheet, as the theme has it now. */
function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

const RAMPS = {  // dark to bright: the order survives in grey, and colour-blind readers see it
  heat: () => ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"],
  ink: () => [colour("shade"), colour("c0")],
};

/** A function from [0, 1] to [red, green, blue]. */
function ramp(name) {
  const stops = RAMPS[name]().map((text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16)));
  return (share) => {
    const at = Math.min(Math.max(share, 0), 1) * (stops.length - 1), low = Math.min(Math.floor(at), stops.length - 2);
    return stops[low].map((value, i) => Math.round(value + (at - low) * (stops[low + 1][i] - value)));
  };
}

/** What the colours of a map stand for: a bar from the lowest value to the highest, with both written at its ends. */
function rampKey(host, name, low, high, label) {
  const stops = RAMPS[name](), id = `ramp-${name}-${host.dataset.plot}`, [left, wide] = [8 * low.length + 10, 144];
  const key = element("svg", { class: "ramp", width: Math.min(host.clientWidth, 600), height: 18, role: "img", "aria-label": `${low} to ${high} ${label}` }, host);
  const shades = element("linearGradient", { id }, key);
  stops.forEach((stop, i) => element("stop", { offset: i / (stops.length - 1), "stop-color": stop }, shades));
  element("text", { x: left - 8, y: 13, "text-anchor": "end" }, key, low);
  element("rect", { x: left, y: 5, width: wide, height: 8, rx: 4, fill: `url(#${id})` }, key);
  element("text", { x: left + wide + 8, y: 13 }, key, `${high} ${host.clientWidth < 440 ? label.split(";")[0] : label}`);
}

const tip = {
  show(text, x, y) {
    const box = document.getElementById("tip");
    box.textContent = text;
    box.hidden = false;
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${Math.max(6, Math.min(x + 14, innerWidth - width - 6))}px`;
    box.style.top = `${y - height - 12 < 6 ? y + 18 : y - height - 12}px`;
  },
  hide() { document.getElementById("tip").hidden = true; },
};

/** A canvas of so many CSS pixels with as many dots as the screen has, and its context. */
function canvas(host, width, height, label) {
  const made = element("canvas", { role: "img", "aria-label": label }, host);
  const dots = Math.max(2, window.devicePixelRatio || 1);
  made.width = width * dots;
  made.height = height * dots;
  made.style.aspectRatio = `${width} / ${height}`;
  const context = made.getContext("2d");
  context.scale(dots, dots);
  context.font = `12px ${colour("sans")}`;
  return [made, context];
}
