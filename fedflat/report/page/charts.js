// Charts in SVG: lines with bands, histograms, points by row.

/** An SVG of the host's width, with a frame for the data inside its margins. */
function frame(host, height, margins, label) {
  const width = Math.max(260, host.clientWidth);
  const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label }, host);
  const [top, right, bottom, left] = margins;
  return { svg, width, height, left, top, right: width - right, bottom: height - bottom };
}

function drawAxes(box, x, y, plot, levels) {
  const { svg, left, right, top, bottom } = box;
  const wide = FORMS[plot.x.form || "number"], tall = FORMS[plot.y.form || "number"];
  for (const value of levels.y) {
    element("line", { class: "grid", x1: left, x2: right, y1: y(value), y2: y(value) }, svg);
    element("text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, svg, tall(value));
  }
  for (const value of levels.x) {
    element("text", { x: x(value), y: bottom + 18, "text-anchor": "middle" }, svg, wide(value));
  }
  element("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }, svg);
  element("text", { x: right, y: bottom + 36, "text-anchor": "end" }, svg, plot.x.label || "");
}

/** Lowest and highest of all values, a little widened; never of the other sign than the data. */
function reach(values, log) {
  let low = Math.min(...values), high = Math.max(...values);
  if (log) return [low / 1.15, high * 1.15];
  if (low === high) return [low - (Math.abs(low) * 0.1 || 0.5), high + (Math.abs(high) * 0.1 || 0.5)];
  const room = 0.04 * (high - low);
  return [low >= 0 ? Math.max(0, low - room) : low - room, high + room];
}

/** A line through the points, interrupted where there is none, or none above `least`. */
function path(x, y, xs, ys, least) {
  let text = "", pen = "M";
  xs.forEach((value, i) => {
    if (ys[i] === null || ys[i] <= least) { pen = "M"; return; }
    text += `${pen}${x(value).toFixed(1)} ${y(ys[i]).toFixed(1)}`;
    pen = "L";
  });
  return text;
}

function lines(host, plot) {
  const log = plot.y.log, least = log ? plot.y.least || 0 : -Infinity, all = smoothed(plot);
  const series = all.filter((one) => !hidden.has(one.key));
  const box = frame(host, 290, [10, 20, 46, 54], plot.label);
  if (!series.length) return;
  const view = seen(plot, all, least), [first, last] = view.x, [low, high] = view.y;
  const x = scale(first, last, box.left, box.right), y = scale(low, high, box.bottom, box.top, log);
  const levels = { x: ticks(first, last, box.width < 420 ? 4 : 6), y: log ? decades(low, high) : ticks(low, high, 5) };
  drawAxes(box, x, y, plot, levels);
  const inside = clipped(box, `clip${host.dataset.plot}`);
  if (plot.diagonal) element("line", { class: "cursor", x1: x(0), y1: y(0), x2: x(1), y2: y(1) }, inside);
  for (const mark of plot.marks || []) {
    element("line", { class: "cursor", x1: x(mark.x), x2: x(mark.x), y1: box.top, y2: box.bottom }, inside);
  }
  for (const one of series) drawLine(inside, x, y, one, least, log ? low : least);
  follow(box, x, y, plot, series, view);
  zoomable(box, x, y, plot);
}

/** What of a plot is to be seen: what the reader has zoomed to, else all of it; a little widened. */
function seen(plot, series, least) {
  const xs = series.flatMap((one) => one.x), from = plot.x.from ?? Math.min(...xs);
  if (plot.diagonal && !plot.zoom) return { x: [0, 1], y: [0, 1] };
  const [first, last] = plot.zoom?.x || [from, Math.max(...xs)];
  if (plot.zoom?.y) return plot.zoom;
  const near = (one) => one.x.map((value, i) => value >= first && value <= last ? i : -1).filter((i) => i >= 0);
  const ys = series.flatMap((one) => near(one).flatMap((i) => [one.y, one.low, one.high, one.bare].map((row) => row?.[i])));
  const fine = ys.filter((value) => typeof value === "number" && value > least);
  let [low, high] = reach(fine.length ? fine : [1], plot.y.log);
  if (plot.y.form === "percent") high = Math.min(high, Math.max(1, ...fine));
  return { x: [first, last], y: [low, high] };
}

/** A group whose content ends where the frame does. */
function clipped(box, id) {
  const path = element("clipPath", { id }, box.svg);
  element("rect", { x: box.left - 3, y: box.top - 3, width: box.right - box.left + 6, height: box.bottom - box.top + 4 }, path);
  return element("g", { "clip-path": `url(#${id})` }, box.svg);
}

function drawLine(svg, x, y, one, least, bottom) {
  if (one.low) {
    const back = [...one.x.keys()].reverse(), above = (value) => Math.max(value, bottom);
    const edge = path(x, y, [...one.x, ...back.map((i) => one.x[i])], [...one.high, ...back.map((i) => one.low[i])].map(above), -Infinity);
    element("path", { class: `band ${look(one.place)}`, d: `${edge}Z` }, svg);
  }
  if (one.bare) element("path", { class: `bare c${one.place % PALETTE}`, d: path(x, y, one.x, one.bare, least) }, svg);
  element("path", { class: `line ${look(one.place)}`, d: path(x, y, one.x, one.y, least) }, svg);
  if (one.x.length === 1) element("circle", { class: `fill ${look(one.place)}`, cx: x(one.x[0]), cy: y(one.y[0]), r: 4 }, svg);
}

/** A cursor that follows the pointer or the arrow keys and tells the values there. */
function follow(box, x, y, plot, series, view) {
  const inside = (value) => value >= view.x[0] && value <= view.x[1];
  const places = [...new Set(series.flatMap((one) => one.x))].filter(inside).sort((a, b) => a - b);
  if (!places.length) return;
  const layer = element("g", {}, box.svg);
  const wide = FORMS[plot.x.form || "number"], tall = FORMS[plot.y.form || "number"];
  let at = places.length - 1;
  const leave = () => { layer.replaceChildren(); tip.hide(); };
  const show = () => {
    leave();
    const value = places[at], left = x(value), told = [];
    element("line", { class: "cursor", x1: left, x2: left, y1: box.top, y2: box.bottom }, layer);
    for (const one of series) {
      const i = nearest(one.x, value), height = one.y[i];
      if (height === null || (Math.abs(x(one.x[i]) - left) > 6)) continue;
      const range = one.low ? ` (${tall(one.low[i])} to ${tall(one.high[i])})` : "";
      const raw = one.bare && one.bare[i] !== null ? `, unsmoothed ${tall(one.bare[i])}` : "";
      told.push([height, `${one.name}: ${tall(height)}${range}${raw}`]);
      if (height >= view.y[0] && height <= view.y[1]) element("circle", { class: `fill c${one.place % PALETTE}`, cx: left, cy: y(height), r: 4 }, layer);
    }
    const spot = box.svg.getBoundingClientRect(), zoom = spot.width / box.width;
    const texts = told.sort((a, b) => b[0] - a[0]).map(([, text]) => text);
    const above = told.filter(([value]) => y(value) < (box.top + box.bottom) / 2).length > told.length / 2;
    const clear = spot.top + zoom * (above ? box.bottom : box.top);  // where the lines are not
    tip.show([`${plot.x.label} ${wide(value)}`, ...texts].join("\n"), spot.left + left * zoom, clear);
  };
  box.svg.addEventListener("pointermove", (event) => {
    if (event.buttons) return leave();
    const spot = box.svg.getBoundingClientRect();
    at = nearest(places, x.back((event.clientX - spot.left) / spot.width * box.width));
    show();
  });
  box.svg.addEventListener("pointerleave", leave);
  box.svg.addEventListener("blur", leave);
  box.svg.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -places.length, End: places.length }[event.key];
    if (event.key === "Escape") leave();
    if (!step) return;
    event.preventDefault();
    at = Math.min(Math.max(at + step, 0), places.length - 1);
    show();
  });
}

function nearest(values, wanted) {
  let best = 0;
  values.forEach((value, i) => { if (Math.abs(value - wanted) < Math.abs(values[best] - wanted)) best = i; });
  return best;
}

/** One row of bars per series, all on one scale from 0 to 1. */
function histogram(host, plot) {
  const shown = plot.series.filter((one) => !hidden.has(one.key));
  const first = Math.max(0, Math.min(...plot.series.map((one) => one.counts.findIndex((count) => count > 0))));
  const most = Math.max(...plot.series.flatMap((one) => one.counts));
  shown.forEach((one, row) => {
    const bins = one.counts.length, foot = row === shown.length - 1 ? 24 : 6;
    const head = element("div", { class: "row-name" }, host);
    element("b", {}, head, one.name);
    element("span", { class: "small" }, head, one.note);
    const box = frame(host, 72 + foot, [2, 22, foot, 22], `${one.name}: ${one.note}`);
    const x = scale(first / bins, 1, box.left, box.right), y = scale(0, most, box.bottom, box.top);
    one.counts.forEach((count, bin) => {
      if (bin < first) return;
      const from = x(bin / bins), to = x((bin + 1) / bins);
      if (count) element("rect", { class: `fill ${look(one.place)}`, x: from + 0.75, width: to - from - 1.5, y: y(count), height: box.bottom - y(count), rx: 1.5 }, box.svg);
      const catcher = element("rect", { x: from, width: to - from, y: box.top, height: box.bottom - box.top, fill: "transparent" }, box.svg);
      const told = `${count} client${count === 1 ? "" : "s"} from ${FORMS.percent(bin / bins)} to ${FORMS.percent((bin + 1) / bins)}`;
      catcher.addEventListener("pointermove", (event) => tip.show(`${one.name}\n${told}`, event.clientX, event.clientY));
      catcher.addEventListener("pointerleave", tip.hide);
    });
    element("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }, box.svg);
    for (const [name, kind] of [["mean", "mean"], ["low5", "tail"], ["top5", "tail"]]) {
      element("line", { class: kind, x1: x(one[name]), x2: x(one[name]), y1: box.top, y2: box.bottom }, box.svg);
    }
    if (row === shown.length - 1) for (const value of ticks(first / bins, 1, 6)) {
      element("text", { x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, box.svg, FORMS.percent(value));
    }
  });
}

/** One row of points per name, on a logarithmic scale. */
function dots(host, plot) {
  const series = plot.series.filter((one) => !hidden.has(one.key));
  const values = plot.series.flatMap((one) => one.values).filter((value) => value > 0);
  if (!values.length) return;
  const left = Math.min(170, 16 + 7 * Math.max(...plot.rows.map((name) => name.length)));
  const box = frame(host, 44 + 26 * plot.rows.length, [8, 16, 30, left], plot.label);
  const [low, high] = reach(values, true), x = scale(low, high, box.left, box.right, true);
  for (const value of decades(low, high)) {
    element("line", { class: "grid", x1: x(value), x2: x(value), y1: box.top, y2: box.bottom }, box.svg);
    element("text", { x: x(value), y: box.bottom + 18, "text-anchor": "middle" }, box.svg, short(value));
  }
  plot.rows.forEach((name, row) => {
    const y = box.top + (row + 0.5) * (box.bottom - box.top) / plot.rows.length;
    element("text", { x: left - 10, y: y + 4, "text-anchor": "end" }, box.svg, name.length > 22 ? `…${name.slice(-21)}` : name);
    element("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }, box.svg);
    for (const one of series) {
      if (!(one.values[row] > 0)) continue;
      const point = mark(box.svg, x(one.values[row]), y, one.place);
      point.addEventListener("pointermove", (event) => tip.show(`${name}\n${one.name}: ${short(one.values[row])}`, event.clientX, event.clientY));
      point.addEventListener("pointerleave", tip.hide);
    }
  });
}

/** A point whose shape, too, tells which series it belongs to. */
function mark(svg, x, y, place) {
  const shape = ["M-5 0a5 5 0 1 0 10 0a5 5 0 1 0 -10 0Z", "M-5 -5h10v10h-10Z", "M0 -6L6 5H-6Z", "M0 -6.5L6.5 0L0 6.5L-6.5 0Z"][place % DASHES];
  return element("path", { class: `fill c${place % PALETTE}`, d: shape, transform: `translate(${x} ${y})`, opacity: 0.9 }, svg);
}
