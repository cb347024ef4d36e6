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
    const labels = heads.map((head) => head.textContent);
    const sort = (column, down) => {
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      heads[column].setAttribute("aria-sort", down ? "descending" : "ascending");
      body.append(...ordered([...body.rows], column, down));
    };
    const isUp = (column) => heads[column].getAttribute("aria-sort") === "ascending";
    heads.forEach((head, column) => {
      const button = element("button", { type: "button", title: "Sort by this column" });
      button.textContent = labels[column];
      head.replaceChildren(button);
      button.addEventListener("click", () => sort(column, isUp(column)));
    });
    (table.closest(".scroll") || table).before(chooser(labels, sort, isUp));
  }
}

/** Where a table is too narrow for heads, the style sheet shows this instead: a list of the columns, and the direction. */
function chooser(labels, sort, isUp) {
  const line = element("div", { class: "sorting" }), label = element("label", {}), list = element("select", {});
  const turn = element("button", { type: "button", class: "tool", title: "Reverse the order" });
  turn.textContent = "▴▾";
  turn.hidden = true;
  list.append(new Option("as listed", "", true, true), ...labels.map((text, column) => new Option(text || "name", column)));
  list.options[0].disabled = true;
  list.addEventListener("change", () => { turn.hidden = false; sort(Number(list.value), false); });
  turn.addEventListener("click", () => sort(Number(list.value), isUp(Number(list.value))));
  label.append("sort by ", list);
  line.append(label, turn);
  return line;
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
