// Draws the charts, and lets tables be sorted and filtered. Without it the page shows the same, as it stands.
"use strict";

function draw(figure) {
  if (figure.classList.contains("drawn") || !figure.checkVisibility()) return;
  figure.classList.add("drawn");
  const spec = JSON.parse(figure.querySelector("script").textContent);
  const live = figure.querySelector(".live");
  if (figure.clientWidth < 560) spec.config.legend.columns = 2;
  // ast: expressions are interpreted, since the page's policy does not let text be run as code.
  const options = { actions: false, renderer: "svg", ast: true, tooltip: { disableDefaultStyle: true } };
  vegaEmbed(live, spec, options).catch(error => {
    figure.classList.remove("drawn");
    console.error(error);
  });
}

const drawAll = () => document.querySelectorAll("figure.chart").forEach(draw);
document.querySelectorAll("details").forEach(each => each.addEventListener("toggle", drawAll));
drawAll();

// What a link points at is shown, even in a folded section.
function unfold() {
  const target = location.hash.length > 1 && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  for (let each = target; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  if (target) target.scrollIntoView();
}
addEventListener("hashchange", unfold);
unfold();

function value(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.value ?? cell.textContent.trim();
  return cell.classList.contains("number") ? parseFloat(text.replaceAll(",", "")) : text;
}

function compare(one, other) {
  if (typeof one === "string") return one.localeCompare(other, "en", { numeric: true });
  return one - other;
}

function sort(table, column) {
  const header = table.tHead.rows[0].cells[column];
  const down = header.getAttribute("aria-sort") === "ascending";
  for (const each of table.tHead.rows[0].cells) each.removeAttribute("aria-sort");
  header.setAttribute("aria-sort", down ? "descending" : "ascending");
  const missing = row => { const own = value(row, column); return own === "" || Number.isNaN(own); };
  const rows = [...table.tBodies[0].rows];
  rows.sort((one, other) => missing(one) - missing(other)
    || (missing(one) ? 0 : compare(value(one, column), value(other, column)) * (down ? -1 : 1)));
  table.tBodies[0].append(...rows);
}

document.querySelectorAll("table.sortable").forEach(table => {
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(table, column));
    header.append(button);
  });
});

document.querySelectorAll("table.filtered").forEach(table => {
  const box = document.createElement("div");
  box.className = "filter";
  const field = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter rows" });
  field.setAttribute("aria-label", `Filter rows: ${table.caption.textContent}`);
  const count = document.createElement("span");
  count.className = "quiet";
  count.setAttribute("role", "status");
  field.addEventListener("input", () => {
    const words = field.value.toLowerCase().split(/\s+/);
    const rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !words.every(word => row.textContent.toLowerCase().includes(word));
    count.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length} rows`;
  });
  box.append(field, count);
  table.closest(".scroll").before(box);
});
