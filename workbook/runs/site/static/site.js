/* The table of runs and the front page: sorting, filtering, answers at a T. No request is made. */
(function () {
  "use strict";
  const $ = (what, of) => (of || document).querySelector(what);
  const all = (what, of) => Array.from((of || document).querySelectorAll(what));

  function cellValue(row, index) {
    const cell = row.cells[index];
    return cell.dataset.value || cell.textContent.trim();
  }

  function sortable(table) {
    const buttons = all("thead button", table);
    buttons.forEach((button) => button.addEventListener("click", () => {
      const head = button.parentElement, index = head.cellIndex;
      const down = head.getAttribute("aria-sort") === "ascending";
      buttons.forEach((other) => other.parentElement.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = Array.from(table.tBodies[0].rows);
      const by = new Intl.Collator(undefined, { numeric: true });
      rows.sort((a, b) => by.compare(cellValue(a, index), cellValue(b, index)) * (down ? -1 : 1));
      table.tBodies[0].append(...rows);
    }));
  }

  function runs(table) {
    const form = $("form.filters"), count = $(".count", form), compare = $(".compare", form);
    const fields = { notebook: "notebook", verdict: "verdict", GPU: "device" };
    function show() {
      const words = form.elements.text.value.toLowerCase().split(/\s+/).filter(Boolean);
      let shown = 0;
      Array.from(table.tBodies[0].rows).forEach((row) => {
        const said = (row.id + " " + row.textContent + " " + $(".question", row).title).toLowerCase();
        const fits = words.every((word) => said.includes(word)) &&
          Object.entries(fields).every(([name, key]) => {
            const wanted = form.elements[name].value;
            return !wanted || row.dataset[key].split("|").includes(wanted);
          });
        row.hidden = !fits;
        shown += fits;
      });
      count.textContent = `${shown} of ${table.tBodies[0].rows.length} runs`;
      const chosen = new URLSearchParams();
      [...Object.keys(fields), "text"].forEach((name) => {
        if (form.elements[name].value) chosen.set(name, form.elements[name].value);
      });
      history.replaceState(null, "", chosen.size ? `#${chosen}` : location.pathname);
    }
    function ticked() {
      const rows = all("tbody input:checked", table).map((box) => box.closest("tr"));
      const books = new Set(rows.map((row) => row.dataset.notebook));
      compare.disabled = rows.length < 2 || books.size > 1;
      compare.textContent = books.size > 1 ? "Tick runs of one notebook to compare"
        : `Compare ${rows.length > 1 ? rows.length + " runs" : "those ticked"}`;
      compare.value = rows.map((row) => row.id).join(",");
    }
    new URLSearchParams(location.hash.slice(1)).forEach((value, name) => {
      if (form.elements[name]) form.elements[name].value = value;
    });
    form.addEventListener("input", show);
    form.addEventListener("submit", (event) => event.preventDefault());
    table.addEventListener("change", ticked);
    compare.addEventListener("click", () => {
      location.href = `compare.html#runs=${encodeURIComponent(compare.value)}`;
    });
    show();
    ticked();
  }

  function tokens(text) {
    const found = /^\s*([\d.,_]+)\s*(k|m)?\s*$/i.exec(text);
    if (!found) return NaN;
    const unit = { k: 1024, m: 1048576 }[(found[2] || "").toLowerCase()] || 1;
    return parseFloat(found[1].replace(/[,_]/g, "")) * unit;
  }

  function asked(form) {
    const tables = [];
    for (let e = form.nextElementSibling; e && e.matches("section.answer"); e = e.nextElementSibling) tables.push(e);
    const out = $("output", form);
    function say() {
      const table = tables[form.elements.table ? Number(form.elements.table.value) : 0];
      tables.forEach((one) => { one.hidden = one !== table; });
      (form.dataset.ask === "speed" ? speed : memory)(table);
    }
    function speed(table) {
      const wanted = tokens(form.elements.tokens.value), rows = all("tbody tr", table);
      rows.forEach((row) => row.classList.remove("asked"));
      out.textContent = "";
      if (!form.elements.tokens.value) return;
      if (!(wanted > 0)) { out.textContent = "Write a length such as 32768 or 32k."; return; }
      const near = rows.slice().sort((a, b) => Math.abs(Math.log(a.dataset.tokens / wanted)) -
        Math.abs(Math.log(b.dataset.tokens / wanted)))[0];
      near.classList.add("asked");
      const same = Number(near.dataset.tokens) === wanted;
      out.textContent = (same ? "" : `Not measured at ${wanted}; the nearest is `) + near.dataset.said;
    }
    function memory(table) {
      const gib = Number(form.elements.gib.value);
      if (!(gib > 0)) { out.textContent = "Write how many GiB your GPU has."; return; }
      const head = $("thead th:last-child", table);
      head.textContent = head.textContent.replace(/[\d.]+ GiB$/, `${gib} GiB`);
      all("tbody tr", table).forEach((row) => {
        const cells = all("td[data-gib]", row);
        cells.forEach((cell) => {
          const least = Number(cell.dataset.least || cell.dataset.gib);
          cell.className = Number(cell.dataset.gib) <= gib ? "fits-yes" : least <= gib ? "fits-perhaps" : "fits-no";
        });
        const fit = cells.filter((cell) => cell.className === "fits-yes");
        const most = Math.max(...fit.map((cell) => Number(cell.dataset.tokens)));
        $(".largest", row).textContent = !fit.length ? "none"
          : most >= 8192 && most % 1024 === 0 ? `${most / 1024}k` : `${most}`;
      });
      out.textContent = "";
    }
    form.addEventListener("input", say);
    form.addEventListener("submit", (event) => event.preventDefault());
    say();
  }

  function openTarget() {
    const target = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (target && target.matches("details")) { target.open = true; target.scrollIntoView(); }
  }

  document.addEventListener("DOMContentLoaded", () => {
    all("table.sortable").forEach(sortable);
    all("table.runs").forEach(runs);
    all("form.ask").forEach(asked);
    addEventListener("hashchange", openTarget);
    openTarget();
  });
})();
