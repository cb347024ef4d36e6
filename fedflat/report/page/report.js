// The page itself: theme, legends, menu, and, while runs go on, newer figures without losing the reader's place.

const KINDS = { lines, histogram, dots, heat, surface };
const page = document.documentElement;
const views = new Map();  // by a plot's title: how the reader looks at it
let shown = [];           // the plots of the page

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
  redraws.length = 0;
  for (const host of document.querySelectorAll("[data-plot]")) {
    const plot = plots[host.dataset.plot];
    if (plot.same !== undefined) plot.series = plots[plot.same].series;
    Object.assign(plot, views.get(plot.label));
    let width = 0;
    plot.host = host;
    plot.draw = () => { host.replaceChildren(); KINDS[plot.kind](host, plot); update(); };
    const update = tools(host, plot);
    redraws.push(plot.draw);
    new ResizeObserver(() => {
      if (Math.abs(host.clientWidth - width) < 2) return;
      width = host.clientWidth;
      plot.draw();
    }).observe(host);
  }
  shown = plots;
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

let watch = null;

function menu() {
  watch?.disconnect();
  const links = new Map([...document.querySelectorAll(".links a")].map((link) => [link.hash.slice(1), link]));
  const seen = new Set();
  watch = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.isIntersecting ? seen.add(entry.target.id) : seen.delete(entry.target.id);
    const link = [...links].filter(([key]) => seen.has(key)).at(-1)?.[1];
    if (!link) return;
    links.forEach((each) => each.removeAttribute("aria-current"));
    link.setAttribute("aria-current", "true");
    link.parentElement.scrollTo({ left: link.offsetLeft - link.parentElement.offsetLeft - 60 });
  }, { rootMargin: "-10% 0px -80%" });
  document.querySelectorAll("main section").forEach((section) => watch.observe(section));
}

/** What the reader has switched off, opened, zoomed to. */
function stateOf() {
  const folds = [...document.querySelectorAll("details")];
  for (const plot of shown) views.set(plot.label, { zoom: plot.zoom, y: plot.y, view: plot.view });
  return { hidden: [...hidden], open: folds.flatMap((fold, place) => fold.open ? [place] : []), views: [...views], smoothing: smoothing.share };
}

function putBack(state) {
  const folds = document.querySelectorAll("details");
  state.hidden.forEach((key) => hidden.add(key));
  state.open.forEach((place) => { if (folds[place]) folds[place].open = true; });
  state.views.forEach(([label, view]) => views.set(label, view));
  smoothing.share = state.smoothing;
}

function scrollBack(top) {
  history.scrollRestoration = "manual";
  page.style.scrollBehavior = "auto";
  requestAnimationFrame(() => requestAnimationFrame(() => {
    scrollTo(0, top);
    page.style.scrollBehavior = "";
  }));
}

/** A file that is written anew while runs go on: load it again after so many seconds, and go on where the reader was. */
function loadAgain(seconds) {
  const name = `fedflat ${location.pathname}`, kept = JSON.parse(remembered("sessionStorage", name) || "null");
  if (kept) {
    remembered("sessionStorage", name, "null");
    putBack(kept);
    scrollBack(kept.scroll);
  }
  document.getElementById("live").hidden = !seconds;
  if (seconds) setTimeout(() => {
    remembered("sessionStorage", name, JSON.stringify({ ...stateOf(), scroll: scrollY }));
    location.reload();
  }, 1000 * seconds);
}

/** A page from a server, which tells when something has changed: fetch it and exchange what is on it. */
function listen() {
  const note = document.getElementById("live"), events = new EventSource(`events${location.search}`);
  let due = false;
  const say = (text) => { note.textContent = `· ${text}`; note.hidden = false; };
  const refresh = async () => {
    const text = await (await fetch(location.href)).text(), fresh = new DOMParser().parseFromString(text, "text/html");
    if (!fresh.getElementById("data")) return;
    const state = stateOf(), top = scrollY;
    for (const part of ["title", "h1", "#about", ".links", "main", "#data"]) document.querySelector(part).replaceChildren(...fresh.querySelector(part).childNodes);
    putBack(state);
    fill();
    redraw();
    scrollBack(top);
  };
  const later = () => {  // not while the reader marks or turns something
    if (!due) return;
    if (document.querySelector(".marked, .turn:active")) return void setTimeout(later, 500);
    due = false;
    refresh().catch(() => say("the server does not answer"));
  };
  events.onopen = () => say("live: follows the runs");
  events.onmessage = () => { if (!due) { due = true; setTimeout(later, 200); } };
  events.onerror = () => say("the server has stopped: this is the state before");
}

/** Make the page of its data. */
function fill() {
  const data = JSON.parse(document.getElementById("data").textContent);
  sortable();
  legends();
  drawAll(data.plots);
  menu();
}

dress();
document.addEventListener("DOMContentLoaded", () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  themeButton();
  loadAgain(data.reload);
  if (data.live) listen();
  fill();
});
