// Tables that sort.

const LARGE = { k: 1e3, M: 1e6, G: 1e9 };

/** What a cell is sorted by: a number with its unit, a time in hours, minutes and seconds, or NaN for words. */
function amountOf(text) {
  const time = text.match(/^(?:(\d+):)?(\d+):(\d\d)$/);
  if (time) return 3600 * Number(time[1] || 0) + 60 * Number(time[2]) + Number(time[3]);
  const found = text.match(/^[<≥]?\s*(-?\d[\d.]*(?:e[+-]?\d+)?)(\+?)\s*([kMG])?/);
  return found ? Number(found[1]) * (LARGE[found[3]] || 1) + (found[2] ? 0.5 : 0) : NaN;
}

/** The head of a column sorts a table by its numbers or words, and again in the other direction; what is missing stays last. */
function sortable() {
  for (const table of document.querySelectorAll("main table")) {
    const body = table.tBodies[0], heads = [...(table.tHead?.rows[0]?.cells || [])];
    if (!body || body.rows.length < 2) continue;
    heads.forEach((head, column) => {
      const label = head.textContent, button = element("button", { type: "button", title: "Sort by this column" });
      button.textContent = label;
      head.replaceChildren(button);
      button.addEventListener("click", () => {
        const down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach((each) => each.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        body.append(...ordered([...body.rows], column, down));
      });
    });
  }
}

function ordered(rows, column, down) {
  const text = (row) => row.cells[column]?.textContent.trim() || "", sign = down ? -1 : 1;
  const missing = (row) => ["", "–"].includes(text(row));
  return rows.sort((a, b) => {
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    const [x, y] = [amountOf(text(a)), amountOf(text(b))];
    return sign * (Number.isNaN(x) || Number.isNaN(y) ? text(a).localeCompare(text(b), undefined, { numeric: true }) : x - y);
  });
}
