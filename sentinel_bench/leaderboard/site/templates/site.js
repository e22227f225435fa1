"use strict";
// Sorts and filters tables, and changes the number in the matrix. Without it everything is there.
(() => {
  const all = (query, from = document) => [...from.querySelectorAll(query)];
  for (const node of all(".needs-script")) node.classList.remove("needs-script");

  // --- the matrix

  const metric = document.getElementById("metric");
  const choose = () => { document.body.dataset.metric = metric.value; };
  if (metric) {
    metric.addEventListener("change", choose);
    choose();
  }

  // --- sorting: numbers by value, texts by name, what is missing last

  const part = (cell) => (metric && cell.querySelector(`.m-${metric.value}`)) || cell;
  const keyOf = (cell, numeric) => {
    const { dataset, textContent } = part(cell);
    if (!numeric) return textContent.trim().toLowerCase();
    const text = dataset.v !== undefined ? dataset.v : textContent.trim();
    const value = text === "" ? NaN : parseFloat(text.replace(/,/g, ""));
    return Number.isNaN(value) ? null : value;
  };
  const compare = (a, b) => (typeof a === "number" ? a - b : a.localeCompare(b, "en"));
  const sort = (table, column, sign) => {
    const body = table.tBodies[0];
    const numeric = table.tHead.rows[0].cells[column].classList.contains("n");
    const keyed = [...body.rows].map((row) => [keyOf(row.cells[column], numeric), row]);
    keyed.sort(([a], [b]) =>
      (a === null || b === null ? (a === null) - (b === null) : sign * compare(a, b)));
    body.append(...keyed.map(([, row]) => row));
  };
  for (const table of all("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      const link = head.querySelector("a");
      if (link) {
        button.textContent = "↕";
        button.setAttribute("aria-label", `sort by ${head.textContent}`);
        head.append(" ", button);
      } else {
        button.append(...head.childNodes);
        head.append(button);
      }
      head.setAttribute("aria-sort", "none");
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") !== "ascending";
        for (const other of table.tHead.rows[0].cells) other.setAttribute("aria-sort", "none");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        sort(table, column, up ? 1 : -1);
      });
    });
  }

  // --- filters

  for (const bar of all("[data-filters]")) {
    const rows = [...document.getElementById(bar.dataset.filters).tBodies[0].rows];
    const fields = all("[data-filter]", bar);
    const apply = () => {
      const words = (field) => field.value.trim().toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      for (const row of rows) {
        row.hidden = !fields.every((field) => (field.dataset.filter === "text"
          ? words(field).every((word) => row.textContent.toLowerCase().includes(word))
          : field.value === "" || row.dataset[field.dataset.filter] === field.value));
        shown += !row.hidden;
      }
      bar.querySelector("[role=status]").textContent = `${shown} of ${rows.length} rows`;
    };
    for (const field of fields) field.addEventListener("input", apply);
    apply(); // a browser may keep what was typed before
  }

  addEventListener("beforeprint", () => {
    for (const details of all("details")) details.open = true;
  });
})();
