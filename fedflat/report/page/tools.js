// What a reader does with a chart: zoom, smooth, change the scale, and take it away as SVG, PNG or CSV.

const smoothing = { share: null };  // of the values of a curve that one point averages; null: as the page has it

/** Centred mean over so many values; the window shrinks towards both ends, so that the end values stay the same. */
function movingAverage(values, window) {
  const last = values.length - 1;
  return values.map((_, place) => {
    const reach = Math.min(Math.floor(window / 2), place, last - place);
    const part = values.slice(place - reach, place + reach + 1).filter((value) => value !== null);
    return part.length ? part.reduce((sum, value) => sum + value, 0) / part.length : null;
  });
}

/** How many values of a series one point of its smoothed curve averages. */
function windowOf(plot, one) {
  const share = plot.smooth === undefined ? 0 : smoothing.share ?? plot.smooth;
  return 2 * Math.floor(share * one.x.length / 2) + 1;
}

/** The series as they are drawn. Of smoothed ones `bare` holds the values themselves. */
function smoothed(plot) {
  return plot.series.map((one) => {
    const window = windowOf(plot, one);
    if (window < 2) return one;
    const edges = one.low ? { low: movingAverage(one.low, window), high: movingAverage(one.high, window) } : {};
    return { ...one, ...edges, y: movingAverage(one.y, window), bare: one.y };
  });
}

/** Dragging marks a part of the chart and zooms to it; a double click, or the key 0, shows all again. */
function zoomable(box, x, y, plot) {
  const { svg, left, right, top, bottom } = box, least = 8, tall = 28;  // pixels; flatter marks leave the height alone
  let start = null, mark = null;
  const within = (value, low, high) => Math.min(Math.max(value, low), high);
  const place = (event) => {
    const spot = svg.getBoundingClientRect(), zoom = box.width / spot.width;
    return [within((event.clientX - spot.left) * zoom, left, right), within((event.clientY - spot.top) * zoom, top, bottom)];
  };
  const marked = (event) => {
    const [a, b] = [start, place(event)], flat = Math.abs(a[1] - b[1]) < tall;
    const [x1, x2] = [a[0], b[0]].sort((p, q) => p - q), [y1, y2] = flat ? [top, bottom] : [a[1], b[1]].sort((p, q) => p - q);
    return { x1, x2, y1, y2, flat };
  };
  const zoom = (part) => { plot.zoom = part; plot.draw(); };
  svg.setAttribute("tabindex", "0");
  svg.addEventListener("mousedown", (event) => event.preventDefault());  // no text is selected on the way
  svg.addEventListener("pointerdown", (event) => {
    if (event.pointerType === "touch" || event.button) return;
    start = place(event);
    svg.setPointerCapture(event.pointerId);
  });
  svg.addEventListener("pointermove", (event) => {
    if (!start) return;
    const { x1, x2, y1, y2 } = marked(event);
    mark ??= element("rect", { class: "marked" }, svg);
    for (const [name, value] of Object.entries({ x: x1, y: y1, width: x2 - x1, height: y2 - y1 })) mark.setAttribute(name, value);
  });
  svg.addEventListener("pointerup", (event) => {
    if (!start) return;
    const { x1, x2, y1, y2, flat } = marked(event);
    start = null;
    mark?.remove();
    mark = null;
    if (x2 - x1 >= least) zoom({ x: [x.back(x1), x.back(x2)], y: flat ? null : [y.back(y2), y.back(y1)] });
  });
  svg.addEventListener("pointercancel", () => { start = null; mark?.remove(); mark = null; });
  svg.addEventListener("dblclick", () => zoom(null));
  svg.addEventListener("keydown", (event) => {
    const share = { "+": 0.25, "=": 0.25, "-": -0.5, 0: 0 }[event.key];
    if (share === undefined) return;
    const cut = share * (right - left), most = [Math.min(...plot.series.flatMap((one) => one.x)), Math.max(...plot.series.flatMap((one) => one.x))];
    const part = [left + cut, right - cut].map((pixel) => within(x.back(pixel), ...most));
    zoom(share && (part[0] > most[0] || part[1] < most[1]) ? { x: part, y: null } : null);
    plot.host.querySelector("svg[tabindex]")?.focus();
  });
}

/** The row below a chart. */
function tools(host, plot) {
  const row = element("div", { class: "tools" }, host.parentElement), updates = [];
  const button = (text, action, title) => {
    const made = element("button", { type: "button", class: "tool", title }, row, text);
    made.addEventListener("click", () => action(made));
    return made;
  };
  if (plot.kind === "lines") {
    if (plot.smooth !== undefined) updates.push(smoothingControl(row, plot));
    const whole = button("whole", () => { plot.zoom = null; plot.draw(); }, "Show the whole chart again");
    updates.push(() => { whole.hidden = !plot.zoom; });
    const positive = plot.series.every((one) => one.y.every((value) => value === null || value > 0));
    if (positive && !plot.diagonal) {
      const log = button("log", () => { plot.y.log = !plot.y.log; plot.zoom = plot.zoom && { x: plot.zoom.x, y: null }; plot.draw(); }, "Logarithmic scale");
      updates.push(() => log.setAttribute("aria-pressed", String(Boolean(plot.y.log))));
    }
  }
  const name = plot.label.replace(/[^\p{L}\p{N}]+/gu, "-").replace(/^-|-$/g, "").toLowerCase();
  button("SVG", () => save(`data:image/svg+xml;charset=utf-8,${encodeURIComponent(picture(host, plot))}`, `${name}.svg`), "Save as SVG");
  button("PNG", () => bitmap(picture(host, plot)).then((url) => save(url, `${name}.png`)), "Save as PNG");
  button("CSV", () => save(`data:text/csv;charset=utf-8,${encodeURIComponent(CSV[plot.kind](plot))}`, `${name}.csv`), "Save the numbers");
  return () => updates.forEach((update) => update());
}

/** A slider that is the same for all curves over the rounds. Returns what shows its present value. */
function smoothingControl(row, plot) {
  const label = element("label", { class: "smoothing" }, row);
  element("span", {}, label, "smoothing");
  const slider = element("input", { type: "range", min: 0, max: 0.3, step: 0.01 }, label), value = element("output", {}, label);
  slider.addEventListener("input", () => { smoothing.share = Number(slider.value); redraw(); });
  return () => {
    slider.value = smoothing.share ?? plot.smooth;
    const most = Math.max(...plot.series.map((one) => windowOf(plot, one)));
    value.textContent = most < 2 ? "off" : `${most} values`;
  };
}

const CSV = {
  lines: (plot) => rowsOf(["series", plot.x.label || "x", "value", "lowest", "highest"],
    plot.series.flatMap((one) => one.x.map((x, i) => [one.name, x, one.y[i], one.low?.[i], one.high?.[i]]))),
  histogram: (plot) => rowsOf(["series", "from", "to", "clients"],
    plot.series.flatMap((one) => one.counts.map((count, i) => [one.name, i / one.counts.length, (i + 1) / one.counts.length, count]))),
  dots: (plot) => rowsOf(["series", "row", "value"], plot.series.flatMap((one) => plot.rows.map((row, i) => [one.name, row, one.values[i]]))),
  heat: (plot) => rowsOf([plot.y, plot.x, plot.value],
    plot.values.flatMap((row, i) => row.map((value, j) => [plot.rows[i], plot.columns[j], value]))),
  surface: (plot) => rowsOf(["series", "x", "y", "loss"],
    plot.items.flatMap((item) => item.z.flatMap((row, i) => row.map((z, j) => [item.name, item.x[i], item.y[j], z])))),
};

/** Comma-separated values; texts are quoted, and nothing stands for a missing value. */
function rowsOf(heads, rows) {
  const cell = (value) => typeof value === "string" ? `"${value.replaceAll("\"", "\"\"")}"` : value ?? "";
  return [heads, ...rows].map((row) => row.map(cell).join(",")).join("\n");
}

function save(url, name) {
  element("a", { href: url, download: name }).click();
}

const STYLES = ["fill", "stroke", "stroke-width", "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight"];

/** A copy of an SVG that looks the same without the style sheet. */
function alone(svg) {
  const copy = svg.cloneNode(true), originals = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((each, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of STYLES) each.style.setProperty(name, style.getPropertyValue(name));
  });
  return copy;
}

/** The chart as one SVG that needs nothing else: title and legend, then all that is drawn and written in its place. */
function picture(host, plot) {
  const spot = host.getBoundingClientRect(), edge = 16, width = spot.width + 2 * edge, sans = colour("sans");
  const made = element("svg", { width, "font-family": sans });
  const ground = element("rect", { width, fill: colour("card") }, made);
  element("text", { x: edge, y: edge + 12, "font-size": 15, "font-weight": 600, fill: colour("ink") }, made, plot.label);
  const top = keys(made, plot, width - 2 * edge, edge, edge + 22);
  for (const each of host.querySelectorAll("svg, canvas, b, span")) {
    const place = each.getBoundingClientRect(), at = { x: edge + place.x - spot.x, y: top + place.y - spot.y };
    const size = { width: place.width, height: place.height };
    if (each.tagName === "CANVAS") element("image", { ...at, ...size, href: each.toDataURL() }, made);
    else if (each.tagName === "svg") made.append(sized(alone(each), { ...at, ...size }));
    else element("text", { x: at.x, y: at.y + 0.75 * place.height, "font-size": parseFloat(getComputedStyle(each).fontSize), "font-weight": getComputedStyle(each).fontWeight, fill: getComputedStyle(each).color }, made, each.textContent);
  }
  const height = top + spot.height + edge;
  for (const each of [made, ground]) each.setAttribute("height", height);
  return new XMLSerializer().serializeToString(made);
}

function sized(element, attributes) {
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

/** The names of the series with their lines, in as many rows as they need; returns where they end. */
function keys(svg, plot, width, left, top) {
  const shown = ["lines", "dots"].includes(plot.kind) ? plot.series.filter((one) => !hidden.has(one.key)) : [];
  const style = getComputedStyle(document.documentElement);
  let [x, y] = [left, top + 14];
  for (const one of shown) {
    const text = element("text", { "font-size": 12, fill: colour("quiet") }, svg, one.name), wide = 42 + 7 * one.name.length;
    if (x > left && x + wide > left + width) [x, y] = [left, y + 18];
    const dash = ["none", "7 4.5", "1.5 4.5", "8 4 1.5 4"][one.place % DASHES];
    element("line", { x1: x, x2: x + 26, y1: y - 4, y2: y - 4, stroke: style.getPropertyValue(`--c${one.place % PALETTE}`), "stroke-width": 2.4, "stroke-dasharray": dash }, svg);
    sized(text, { x: x + 33, y });
    x += wide;
  }
  return shown.length ? y + 14 : top + 8;
}

/** An SVG as the address of a PNG with two dots per pixel. */
async function bitmap(text) {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const made = element("canvas", { width: 2 * image.width, height: 2 * image.height });
  made.getContext("2d").drawImage(image, 0, 0, made.width, made.height);
  return made.toDataURL("image/png");
}
