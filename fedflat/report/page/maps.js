// Heat maps of a matrix on a canvas.

function heat(host, plot) {
  const rows = plot.values.length, columns = plot.columns.length, form = FORMS[plot.form || "number"];
  const flat = plot.values.flat().filter((value) => value !== null);
  const low = plot.low ?? 0, high = plot.high ?? (Math.max(...flat) || 1);
  const width = Math.max(260, host.clientWidth), top = 4, foot = 34;
  const left = Math.min(width / 4, Math.max(44, 16 + 6.5 * Math.max(...plot.rows.map((name) => name.length))));
  const cell = [(width - left - 4) / columns, Math.min(24, Math.max(3, 300 / rows))];
  const height = top + rows * cell[1] + foot;
  const [made, pen] = canvas(host, width, height, `${plot.label}: ${plot.value} by ${plot.y} and ${plot.x}`);
  const shade = ramp(plot.ramp);
  const gap = Math.min(...cell) > 6 ? 1 : 0;
  plot.values.forEach((row, i) => row.forEach((value, j) => {
    if (value === null) return;
    pen.fillStyle = `rgb(${shade((value - low) / (high - low || 1))})`;
    pen.fillRect(left + j * cell[0], top + i * cell[1], cell[0] - gap, cell[1] - gap);
  }));
  pen.fillStyle = colour("quiet");
  pen.textAlign = "right";
  const tall = Math.ceil(16 / cell[1]), wide = Math.ceil((14 + 6.5 * Math.max(3, ...plot.columns.map((name) => name.length))) / cell[0]);
  plot.rows.forEach((name, i) => { if (i % tall === 0) pen.fillText(name, left - 8, top + (i + 0.5) * cell[1] + 4, left - 8); });
  pen.textAlign = "center";
  plot.columns.forEach((name, j) => { if (j % wide === 0) pen.fillText(name, left + (j + 0.5) * cell[0], height - foot + 15); });
  pen.textAlign = "right";
  pen.fillText(`${plot.x} →`, width - 4, height - 4);
  pen.textAlign = "left";
  pen.fillText(`${plot.y} ↓`, 0, height - 4);
  rampKey(host, plot.ramp, form(low), form(high), plot.value);
  made.addEventListener("pointermove", (event) => {
    const spot = made.getBoundingClientRect(), zoom = width / spot.width;
    const j = Math.floor(((event.clientX - spot.left) * zoom - left) / cell[0]);
    const i = Math.floor(((event.clientY - spot.top) * zoom - top) / cell[1]);
    const value = plot.values[i]?.[j];
    if (value === undefined || value === null) return tip.hide();
    tip.show(`${plot.x} ${plot.columns[j]}, ${plot.y} ${plot.rows[i]}\n${form(value)} ${plot.value}`, event.clientX, event.clientY);
  });
  made.addEventListener("pointerleave", tip.hide);
}

/** The loss seen from above: colours, contour lines at the levels given, the models that lie in it. */
function contour(host, item, { low, high, cut }, levels) {
  const size = Math.min(420, Math.max(240, host.clientWidth)), left = 40, foot = 24, inner = size - left - 8;
  const [made, pen] = canvas(host, size, inner + foot + 8, `Contour map of the loss${item.name ? ` around ${item.name}` : ""}`);
  const [xs, ys] = [item.x, item.y];
  const x = scale(xs[0], xs.at(-1), left, left + inner), y = scale(ys[0], ys.at(-1), 8 + inner, 8);
  pen.drawImage(shaded(item, low, high), left, 8, inner, inner);
  pen.strokeStyle = "rgba(255, 255, 255, .75)";
  pen.lineWidth = 1;
  for (const level of levels) isoline(pen, item, level, x, y, high);
  pen.fillStyle = colour("quiet");
  pen.textAlign = "center";
  for (const value of ticks(xs[0], xs.at(-1), 4)) pen.fillText(short(value), x(value), inner + foot);
  pen.textAlign = "right";
  for (const value of ticks(ys[0], ys.at(-1), 4)) pen.fillText(short(value), left - 6, y(value) + 4);
  item.marks.forEach((mark, place) => spotted(pen, x(mark.x), y(mark.y), item.marks.length > 1 ? place + 1 : ""));
  made.addEventListener("pointermove", (event) => {
    const spot = made.getBoundingClientRect(), zoom = size / spot.width;
    const [px, py] = [(event.clientX - spot.left) * zoom, (event.clientY - spot.top) * zoom];
    const share = [(px - left) / inner, (8 + inner - py) / inner];
    if (share.some((value) => value < 0 || value > 1)) return tip.hide();
    const place = `${short(x.back(px))}, ${short(y.back(py))}`;
    tip.show(`${item.name ? `${item.name}\n` : ""}at ${place}: loss ${told(between(item, ...share, high), high, cut)}`, event.clientX, event.clientY);
  });
  made.addEventListener("pointerleave", tip.hide);
}

/** A loss as text; where a picture was cut, its highest value stands for anything above. */
function told(value, high, cut) {
  return `${cut && value >= high * 0.9999 ? "≥ " : ""}${short(value)}`;
}

/** The colours of a contour map, so many dots across. */
function shaded(item, low, high, across = 160) {
  const made = element("canvas", { width: across, height: across }), pen = made.getContext("2d");
  const image = pen.createImageData(across, across), shade = ramp("heat");
  for (let row = 0; row < across; row++) for (let column = 0; column < across; column++) {
    const value = between(item, (column + 0.5) / across, 1 - (row + 0.5) / across, high);
    image.data.set([...shade((value - low) / (high - low || 1)), 255], 4 * (row * across + column));
  }
  pen.putImageData(image, 0, 0);
  return made;
}

/** A model in the picture, with its number where there are several. */
function spotted(pen, x, y, number) {
  pen.beginPath();
  pen.arc(x, y, number ? 9 : 4.5, 0, 2 * Math.PI);
  pen.fillStyle = "#ffffff";
  pen.strokeStyle = "#000000";
  pen.fill();
  pen.stroke();
  pen.fillStyle = "#000000";
  pen.textAlign = "center";
  pen.fillText(number, x, y + 4);
}

/** The loss at shares of the way along both axes, between the four points around. */
function between(item, right, up, high) {
  const value = (i, j) => Math.min(item.z[i][j] ?? high, high);
  const a = right * (item.x.length - 1), b = up * (item.y.length - 1);
  const i = Math.min(Math.floor(a), item.x.length - 2), j = Math.min(Math.floor(b), item.y.length - 2);
  const near = value(i, j) * (1 - (b - j)) + value(i, j + 1) * (b - j);
  const far = value(i + 1, j) * (1 - (b - j)) + value(i + 1, j + 1) * (b - j);
  return near * (1 - (a - i)) + far * (a - i);
}

/** Marching squares: where the edges of a cell cross the level, joined by straight lines. */
function isoline(pen, item, level, x, y, high) {
  const value = (i, j) => Math.min(item.z[i][j] ?? high, high);
  pen.beginPath();
  for (let i = 0; i + 1 < item.x.length; i++) for (let j = 0; j + 1 < item.y.length; j++) {
    const corners = [[i, j], [i + 1, j], [i + 1, j + 1], [i, j + 1]], cuts = [];
    corners.forEach(([a, b], side) => {
      const [c, d] = corners[(side + 1) % 4], from = value(a, b), to = value(c, d);
      if ((from < level) === (to < level)) return;
      const share = (level - from) / (to - from);
      cuts.push([x(item.x[a] + share * (item.x[c] - item.x[a])), y(item.y[b] + share * (item.y[d] - item.y[b]))]);
    });
    for (let cut = 0; cut + 1 < cuts.length; cut += 2) {
      pen.moveTo(...cuts[cut]);
      pen.lineTo(...cuts[cut + 1]);
    }
  }
  pen.stroke();
}
