// Loss surfaces that turn, each with its contour map; those of one plot share their scale and turn together.

const REST = { around: -0.7, above: 0.5 };
const STEP = 0.12;

function surface(host, plot) {
  const view = plot.view ??= { ...REST }, painters = [];
  const repaint = () => painters.forEach((paint) => paint());
  const levels = ticks(plot.low, plot.high, 14).slice(1);
  const cards = element("div", { class: "surfaces" }, host);
  const shown = plot.items.filter((item) => !hidden.has(item.key)).map((item) => {
    const card = element("div", { class: "card" }, cards);
    const head = element("div", { class: "row-name" }, card);
    if (item.name) element("b", {}, head, item.name);
    if (item.note) element("span", { class: "small" }, head, item.note);
    const pair = element("div", { class: "pair" }, card);
    return [item, element("div", {}, pair), element("div", {}, pair)];
  });
  for (const [item, left, right] of shown) {  // once all cards have their width
    painters.push(solid(left, item, plot, view, repaint));
    contour(right, item, plot, levels);
    if (item.marks.length > 1) named(right.closest(".card"), item.marks);
  }
  rampKey(host, "heat", short(plot.low), told(plot.high, plot.high, plot.cut), "loss; the same contour levels in all");
}

/** What the numbers in a contour map stand for. */
function named(host, marks) {
  const list = element("ol", { class: "marks" }, host);
  marks.forEach((mark, place) => {
    const entry = element("li", {}, list);
    element("b", {}, entry, String(place + 1));
    element("span", {}, entry, mark.name);
  });
}

/** The canvas of one surface and its controls; returns what paints it as the view is now. */
function solid(host, item, plot, view, repaint) {
  const size = Math.min(420, Math.max(240, host.clientWidth)), height = Math.round(size * 0.82);
  const label = `Loss surface${item.name ? ` around ${item.name}` : ""}; the arrow keys turn it`;
  const [made, pen] = canvas(host, size, height, label);
  made.classList.add("turn");
  made.setAttribute("tabindex", "0");
  const turn = (around, above) => {
    view.around += around;
    view.above = Math.min(Math.max(view.above + above, 0.05), 1.5);
    repaint();
  };
  made.addEventListener("pointerdown", (event) => made.setPointerCapture(event.pointerId));
  made.addEventListener("pointermove", (event) => {
    if (made.hasPointerCapture(event.pointerId)) turn(-event.movementX / 120, event.movementY / 160);
  });
  made.addEventListener("dblclick", () => { Object.assign(view, REST); repaint(); });
  made.addEventListener("keydown", (event) => {
    const way = { ArrowLeft: [STEP, 0], ArrowRight: [-STEP, 0], ArrowUp: [0, STEP], ArrowDown: [0, -STEP] }[event.key];
    if (event.key === "Home") { Object.assign(view, REST); repaint(); }
    if (!way) return;
    event.preventDefault();
    turn(...way);
  });
  const paint = () => paintSurface(pen, size, height, item, plot, view);
  paint();
  return paint;
}

/** From coordinates in [-1, 1]² × [0, 1] to the canvas; `depth` is larger further away. */
function camera(size, height, view) {
  const [sa, ca, se, ce] = [Math.sin(view.around), Math.cos(view.around), Math.sin(view.above), Math.cos(view.above)];
  const zoom = size * 0.315;
  return (x, y, z) => {
    const side = x * ca - y * sa, away = x * sa + y * ca, up = 1.15 * (z - 0.5);
    return [size / 2 + 8 + zoom * side, height / 2 - zoom * (up * ce + away * se), away * ce - up * se];
  };
}

function paintSurface(pen, size, height, item, plot, view) {
  const see = camera(size, height, view), shade = ramp("heat");
  const share = (z) => Math.min(1, ((z ?? plot.high) - plot.low) / (plot.high - plot.low || 1));
  const [m, n] = [item.x.length, item.y.length];
  const at = (i, j) => [2 * i / (m - 1) - 1, 2 * j / (n - 1) - 1, share(item.z[i][j])];
  pen.clearRect(0, 0, size, height);
  paintFloor(pen, see);
  const tiles = [];
  for (let i = 0; i + 1 < m; i++) for (let j = 0; j + 1 < n; j++) {
    const points = [at(i, j), at(i + 1, j), at(i + 1, j + 1), at(i, j + 1)];
    const seen = points.map((point) => see(...point));
    tiles.push({ seen, depth: seen.reduce((sum, p) => sum + p[2], 0), mean: points.reduce((sum, p) => sum + p[2], 0) / 4, slope: points[1][2] - points[3][2] });
  }
  tiles.sort((a, b) => b.depth - a.depth);
  for (const tile of tiles) paintTile(pen, tile, shade);
  paintHeights(pen, see, plot);
}

/** A tile in the colour of its height, lit a little from one side so that its slope shows. */
function paintTile(pen, tile, shade) {
  const light = 1 + 0.9 * Math.min(Math.max(tile.slope, -0.2), 0.2);
  const fill = `rgb(${shade(tile.mean).map((value) => Math.min(255, Math.round(value * light)))})`;
  pen.beginPath();
  tile.seen.forEach(([x, y], i) => i ? pen.lineTo(x, y) : pen.moveTo(x, y));
  pen.closePath();
  pen.fillStyle = pen.strokeStyle = fill;
  pen.lineWidth = 0.6;
  pen.fill();
  pen.stroke();
  pen.strokeStyle = "rgba(255, 255, 255, .16)";
  pen.stroke();
}

function paintFloor(pen, see) {
  pen.strokeStyle = colour("rule");
  pen.lineWidth = 1;
  for (let place = -1; place <= 1; place += 0.5) {
    for (const ends of [[[place, -1], [place, 1]], [[-1, place], [1, place]]]) {
      pen.beginPath();
      ends.forEach(([x, y], i) => { const [a, b] = see(x, y, 0); i ? pen.lineTo(a, b) : pen.moveTo(a, b); });
      pen.stroke();
    }
  }
}

/** The axis of the loss, at whichever corner is leftmost. */
function paintHeights(pen, see, plot) {
  const corners = [[-1, -1], [-1, 1], [1, -1], [1, 1]];
  const [x, y] = corners.reduce((best, corner) => see(...corner, 0)[0] < see(...best, 0)[0] ? corner : best);
  const [[ax, ay], [bx, by]] = [see(x, y, 0), see(x, y, 1)];
  pen.strokeStyle = colour("faint");
  pen.beginPath();
  pen.moveTo(ax, ay);
  pen.lineTo(bx, by);
  pen.stroke();
  pen.fillStyle = colour("quiet");
  pen.textAlign = "right";
  const levels = ticks(plot.low, plot.high, 4), room = (plot.high - plot.low) / 8;
  const shown = plot.cut ? [...levels.filter((value) => value < plot.high - room), plot.high] : levels;
  for (const value of shown) {
    const [left, top] = see(x, y, (value - plot.low) / (plot.high - plot.low || 1));
    pen.fillText(told(value, plot.high, plot.cut), left - 6, top + 4);
  }
}
