// The page itself: theme, legends, menu, and, while runs go on, loading itself again without losing the place.

const KINDS = { lines, histogram, dots, heat, surface };
const page = document.documentElement;

/** Storage that a browser may refuse to pages from files. */
function remembered(storage, key, value) {
  try {
    if (value === undefined) return window[storage].getItem(key);
    window[storage].setItem(key, value);
  } catch { /* nothing is remembered then */ }
  return null;
}

const system = matchMedia("(prefers-color-scheme: dark)");
const THEMES = ["system", "light", "dark"];
let theme = remembered("localStorage", "fedflat-theme") || "system";

function dress() {
  const dark = theme === "dark" || (theme === "system" && system.matches);
  page.dataset.theme = dark ? "dark" : "light";
}

function redraw() { redraws.forEach((draw) => draw()); }

function themeButton() {
  const button = document.getElementById("theme");
  const tell = () => button.setAttribute("aria-label", `Colours: ${theme === "system" ? "as the system has them" : theme}`);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    remembered("localStorage", "fedflat-theme", theme);
    tell(); dress(); redraw();
  });
  system.addEventListener("change", () => { dress(); redraw(); });
  addEventListener("beforeprint", () => { page.classList.add("printing"); page.dataset.theme = "light"; redraw(); });
  addEventListener("afterprint", () => { page.classList.remove("printing"); dress(); redraw(); });
  tell();
}

function drawAll(plots) {
  for (const host of document.querySelectorAll("[data-plot]")) {
    const plot = plots[host.dataset.plot];
    let width = 0;
    const draw = () => { host.replaceChildren(); KINDS[plot.kind](host, plot); };
    redraws.push(draw);
    tools(host, plot, draw);
    new ResizeObserver(() => {
      if (Math.abs(host.clientWidth - width) < 2) return;
      width = host.clientWidth;
      draw();
    }).observe(host);
  }
}

function legends() {
  const buttons = [...document.querySelectorAll("[data-key]")];
  const show = () => buttons.forEach((each) => each.setAttribute("aria-pressed", String(!hidden.has(each.dataset.key))));
  for (const button of buttons) button.addEventListener("click", () => {
    const key = button.dataset.key;
    hidden.has(key) ? hidden.delete(key) : hidden.add(key);
    show(); redraw();
  });
  show();
}

function menu() {
  const links = new Map([...document.querySelectorAll(".links a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  const watch = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
    const link = [...links].filter(([key]) => seen.has(key)).at(-1)?.[1];
    if (!link) return;
    links.forEach((each) => each.removeAttribute("aria-current"));
    link.setAttribute("aria-current", "true");
    link.parentElement.scrollTo({ left: link.offsetLeft - link.parentElement.offsetLeft - 60 });
  }, { rootMargin: "-10% 0px -80%" });
  document.querySelectorAll("main section").forEach((section) => watch.observe(section));
}

/** While runs go on: remember where the reader is and what is switched off or open, load anew, and put it back. */
function stayAlive(seconds, live) {
  const state = `fedflat ${location.pathname}`, folds = [...document.querySelectorAll("details")];
  const kept = JSON.parse(remembered("sessionStorage", state) || "null");
  if (kept) {
    remembered("sessionStorage", state, "null");
    kept.hidden.forEach((key) => hidden.add(key));
    kept.open.forEach((place) => { if (folds[place]) folds[place].open = true; });
    history.scrollRestoration = "manual";
    page.style.scrollBehavior = "auto";
    requestAnimationFrame(() => requestAnimationFrame(() => {
      scrollTo(0, kept.scroll);
      page.style.scrollBehavior = "";
    }));
  }
  document.getElementById("live").hidden = !seconds && !live;
  const again = () => {
    const open = folds.flatMap((fold, place) => fold.open ? [place] : []);
    remembered("sessionStorage", state, JSON.stringify({ scroll: scrollY, hidden: [...hidden], open }));
    location.reload();
  };
  if (seconds) setTimeout(again, 1000 * seconds);
  if (live) new EventSource(`events${location.search}`).onmessage = again;
}

/** Click on a head to sort a table by its numbers or words, and again to turn the order round. */
function sortable() {
  for (const table of document.querySelectorAll("main table")) {
    const body = table.tBodies[0], heads = [...(table.tHead?.rows[0]?.cells || [])];
    if (!body || body.rows.length < 2) continue;
    heads.forEach((head, column) => {
      head.tabIndex = 0;
      const sort = () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        const key = (row) => row.cells[column]?.textContent.trim() || "";
        const order = (a, b) => {
          const [x, y] = [parseFloat(key(a)), parseFloat(key(b))];
          return Number.isNaN(x) || Number.isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
        };
        const rows = [...body.rows].sort(order);
        body.append(...(down ? rows.reverse() : rows));
      };
      head.addEventListener("click", sort);
      head.addEventListener("keydown", (event) => { if (event.key === "Enter") sort(); });
    });
  }
}

/** The numbers of a chart of lines as comma-separated values. */
function values(plot) {
  const rows = plot.series.flatMap((one) => one.x.map((x, i) => [JSON.stringify(one.name), x, one.y[i], one.bare?.[i] ?? ""].join(",")));
  return [`series,${plot.x.label || "x"},value,unsmoothed`, ...rows].join("\n");
}

/** An SVG with the styles it needs, so that it looks the same alone. */
function alone(svg) {
  const copy = svg.cloneNode(true), originals = [svg, ...svg.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((each, i) => {
    const style = getComputedStyle(originals[i]);
    for (const name of ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity", "font-family", "font-size"]) {
      each.style.setProperty(name, style.getPropertyValue(name));
    }
  });
  copy.setAttribute("xmlns", svg.namespaceURI);
  return copy.outerHTML;
}

/** Buttons under a chart: log scale, and the chart as SVG or CSV. */
function tools(host, plot, draw) {
  if (plot.kind !== "lines") return;
  const row = element2("div", "tools"), name = plot.label.replace(/\W+/g, "-").toLowerCase();
  const save = (text, kind, suffix) => {
    const link = document.createElement("a");
    link.href = `data:${kind};charset=utf-8,${encodeURIComponent(text)}`;
    link.download = `${name}.${suffix}`;
    link.click();
  };
  const add = (label, action) => {
    const button = element2("button", "tool");
    button.type = "button";
    button.textContent = label;
    button.addEventListener("click", () => action(button));
    row.append(button);
  };
  const positive = plot.series.every((one) => one.y.every((y) => y === null || y > 0));
  if (positive && !plot.diagonal) add("log", (button) => {
    plot.y.log = !plot.y.log;
    button.setAttribute("aria-pressed", String(Boolean(plot.y.log)));
    draw();
  });
  add("SVG", () => save(alone(host.querySelector("svg")), "image/svg+xml", "svg"));
  add("CSV", () => save(values(plot), "text/csv", "csv"));
  host.after(row);
}

function element2(name, kind) {
  const made = document.createElement(name);
  made.className = kind;
  return made;
}

dress();
document.addEventListener("DOMContentLoaded", () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  themeButton();
  stayAlive(data.reload, data.live);
  sortable();
  legends();
  drawAll(data.plots);
  menu();
});
