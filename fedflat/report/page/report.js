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
function stayAlive(seconds) {
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
  document.getElementById("live").hidden = !seconds;
  if (!seconds) return;
  setTimeout(() => {
    const open = folds.flatMap((fold, place) => fold.open ? [place] : []);
    remembered("sessionStorage", state, JSON.stringify({ scroll: scrollY, hidden: [...hidden], open }));
    location.reload();
  }, 1000 * seconds);
}

dress();
document.addEventListener("DOMContentLoaded", () => {
  const data = JSON.parse(document.getElementById("data").textContent);
  themeButton();
  stayAlive(data.reload);
  legends();
  drawAll(data.plots);
  menu();
});
