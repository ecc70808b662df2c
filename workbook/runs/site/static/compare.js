/* The page of comparisons: runs of one notebook, chosen in the address or by ticking, laid side by
   side. The data of a run is a script beside the page, which a browser loads from a folder too. */
(function () {
  "use strict";
  const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#7f7f7f",
    "#9467BD", "#6B6B00"];
  const DASHES = ["", "7 4", "2 3", "9 3 2 3", "4 2", "1 4"];
  const MOST_ROWS = 300, MOST_LINES = 24;
  const VERSIONS = ["torch", "cuda", "triton", "driver"];
  const OF_SOME = { flash_attn: "flash and dense-flash", flash_attn_4: "flash and dense-fa4", python: "what the host does" };
  const $ = (what, of) => (of || document).querySelector(what);
  const all = (what, of) => Array.from((of || document).querySelectorAll(what));
  const text = (value) => value === undefined || value === null || value === "" ? "none"
    : typeof value === "object" ? JSON.stringify(value) : String(value);

  function make(tag, attributes, ...inside) {
    const svg = /^(svg|g|path|line|circle|polygon|text|rect|title|desc)$/.test(tag);
    const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
    Object.entries(attributes || {}).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...inside.filter((one) => one !== null && one !== undefined));
    return made;
  }

  function load(run) {
    if ((window.nsaRuns || {})[run]) return Promise.resolve(window.nsaRuns[run]);
    return new Promise((done, failed) => {
      const script = make("script", { src: `data/${encodeURIComponent(run.replaceAll("/", "__"))}.js` });
      script.onload = () => done(window.nsaRuns[run]);
      script.onerror = () => failed(new Error(`the data of ${run} is not in this site`));
      document.head.append(script);
    });
  }

  const short = (run) => run.run.split("/").pop().replace(/^.*-(?=[0-9a-f]{8})/, "");

  /* ---- what differs ---- */
  function differing(maps) {
    const names = new Set(maps.flatMap((map) => Object.keys(map)));
    return [...names].filter((name) => new Set(maps.map((map) => text(map[name]))).size > 1);
  }

  function reasons(runs) {
    const unfair = [], told = [], facts = runs.map((run) => run.facts);
    const several = (values) => [...new Set(values)];
    const devices = several(runs.map((run) => run.device.join(" and ") || "an unknown device"));
    if (devices.length > 1) unfair.push(`they were measured on different devices: ${devices.join("; ")}`);
    const cpus = several(facts.map((f) => text(f.cpu)));
    if (cpus.length > 1) (devices.length === 1 && !devices[0].startsWith("cpu") ? told : unfair)
      .push(`the CPUs of the machines differ: ${cpus.join("; ")}`);
    VERSIONS.forEach((name) => {
      const found = several(facts.map((f) => text(f[name])));
      if (found.length > 1) unfair.push(`${name} differs: ${found.join(", ")}`);
    });
    Object.entries(OF_SOME).forEach(([name, rows]) => {
      const found = several(facts.map((f) => text(f[name])));
      if (found.length > 1) told.push(`${name} differs (${found.join(", ")}), which matters to ${rows}`);
    });
    if (devices.length === 1 && devices[0].startsWith("cpu"))
      told.push("they were measured on a CPU, where only ratios within one run mean much");
    const commits = several(runs.map((run) => run.commit || "no commit"));
    if (commits.length > 1) told.push(`their source differs: commits ${commits.join(", ")}`);
    if (runs.some((run) => (run.commit || "").endsWith("+dirty")))
      told.push("some were made from changes that are in no commit");
    if (runs.some((run) => run.status !== "ok"))
      told.push("not all reached their end: " + runs.map((run) => `${short(run)} ${run.status}`).join(", "));
    return { unfair, told };
  }

  /* ---- rows ---- */
  function decoded(run, by) {
    const { columns, outcome } = run.rows, n = run.rows.median.length;
    const at = (name, i) => columns[name] ? columns[name].values[columns[name].codes[i]] : undefined;
    return Array.from({ length: n }, (_, i) => ({
      what: [at("operation", i), at("metric", i), at("unit", i)].filter(Boolean).join(", "),
      backend: at("backend", i), mode: at("mode", i), unit: at("unit", i), x_name: at("x_name", i), x: run.rows.x_value[i],
      series: [at("backend", i), at("mode", i), ...by.map((name) => {
        const value = at(name, i);
        return value === undefined || value === null || value === "" ? null : `${name} ${value}`;
      })].filter(Boolean).join(", "),
      median: run.rows.median[i], low: run.rows.q20[i], high: run.rows.q80[i],
      outcome: outcome.values[outcome.codes[i]],
    }));
  }

  const number = (value) => value === null || value === undefined ? ""
    : value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3) ? value.toExponential(3)
      : String(Number(value.toPrecision(4)));

  const place = (x) => x === null || x === undefined ? "" : x >= 8192 && x % 1024 === 0 ? `${x / 1024}k`
    : Number.isInteger(x) ? String(x) : number(x);

  function measured(row) {
    if (!row) return "";
    if (row.median === null) return row.outcome && row.outcome !== "ok" ? row.outcome : "not measured";
    const spread = row.low !== null && row.high !== null && (row.low !== row.median || row.high !== row.median);
    return number(row.median) + (spread ? ` (${number(row.low)} to ${number(row.high)})` : "");
  }

  function ratio(a, b) {
    if (!a || !b || a.median === null || b.median === null || !a.median) return "";
    const apart = a.low !== null && b.low !== null && (b.low > a.high || b.high < a.low);
    return `${number(b.median / a.median)}${apart ? " beyond the spread" : ""}`;
  }

  /* ---- pieces of the page ---- */
  function table(heads, rows, caption) {
    return make("div", { class: "scroll" }, make("table", {},
      caption ? make("caption", {}, caption) : null,
      make("thead", {}, make("tr", {}, ...heads.map((head) => make("th", { scope: "col" }, head)))),
      make("tbody", {}, ...rows.map((row) => make("tr", {},
        ...row.map((cell, i) => make(i ? "td" : "th", i ? {} : { scope: "row" }, cell)))))));
  }

  function fair(runs) {
    const { unfair, told } = reasons(runs);
    const box = make("div", { class: unfair.length ? "fairness unfair" : "fairness" });
    box.append(make("strong", {}, unfair.length ? "Not a fair comparison of speed or memory."
      : "Same devices and versions: a fair comparison as far as the records tell."));
    if (unfair.length || told.length)
      box.append(make("ul", {}, ...[...unfair, ...told].map((line) => make("li", {}, line))));
    return box;
  }

  function differences(runs) {
    const heads = ["", ...runs.map(short)];
    const rows = (pick, names) => names.map((name) => [name, ...runs.map((run) => text(pick(run)[name]))]);
    const settings = differing(runs.map((run) => run.parameters));
    const facts = differing(runs.map((run) => run.facts));
    const out = [make("h2", {}, "Parameters that differ")];
    out.push(settings.length ? table(heads, rows((run) => run.parameters, settings))
      : make("p", {}, "None: all parameters are the same."));
    if (facts.length) out.push(make("details", {}, make("summary", {}, `${facts.length} facts of the environment differ`),
      table(heads, rows((run) => run.facts, facts))));
    return out;
  }

  function plot(what, lines, runs) {
    const points = lines.flatMap((line) => line.points);
    const xs = [...new Set(points.map((p) => p.x))].sort((a, b) => a - b);
    if (xs.length < 2) return null;
    const W = 720, H = 360, L = 72, R = 12, T = 12, B = 44;
    const values = points.flatMap((p) => [p.low ?? p.median, p.median, p.high ?? p.median]);
    const logX = xs[0] > 0 && xs[xs.length - 1] / xs[0] > 8;
    const low = Math.min(...values), high = Math.max(...values);
    const logY = low > 0 && high / low > 20;
    const scale = (log, a, b, from, to) => {
      const f = log ? Math.log10 : (v) => v;
      const [u, v] = [f(a), f(b)];
      return (value) => from + (to - from) * (v === u ? 0.5 : (f(value) - u) / (v - u));
    };
    const bottom = logY ? low / 1.2 : Math.min(0, low), top = logY ? high * 1.2 : high + 0.05 * Math.abs(high) || 1;
    const x = scale(logX, xs[0], xs[xs.length - 1], L + 10, W - R - 10), y = scale(logY, bottom, top, H - B, T);
    const ticks = logY ? Array.from({ length: 13 }, (_, i) => 10 ** (Math.floor(Math.log10(bottom)) + i))
      .flatMap((t) => high / low > 1e3 ? [t] : [t, 2 * t, 5 * t]).filter((t) => t >= bottom && t <= top)
      : Array.from({ length: 6 }, (_, i) => bottom + (top - bottom) * i / 5);
    const name = (lines[0] || {}).x_name || "x";
    const label = `${what} against ${name}: ${lines.length} lines, of ${runs.map(short).join(", ")}; the table below has the numbers`;
    const svg = make("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": label }, make("title", {}, label));
    ticks.forEach((t) => svg.append(
      make("line", { x1: L, x2: W - R, y1: y(t), y2: y(t), class: "grid" }),
      make("text", { x: L - 6, y: y(t) + 4, "text-anchor": "end" }, number(t))));
    let last = -1e9;
    xs.forEach((t) => {
      if (x(t) - last < 44) return;
      last = x(t);
      svg.append(make("text", { x: x(t), y: H - B + 18, "text-anchor": "middle" }, place(t)));
    });
    svg.append(make("text", { x: (L + W - R) / 2, y: H - 6, "text-anchor": "middle" }, name),
      make("text", { x: 14, y: (T + H - B) / 2, "text-anchor": "middle", transform: `rotate(-90 14 ${(T + H - B) / 2})` },
        lines[0].unit || "value"));
    lines.forEach((line) => {
      const style = `stroke:${line.colour};stroke-dasharray:${line.dash || "none"}`;
      const sorted = line.points.slice().sort((a, b) => a.x - b.x);
      const path = sorted.map((p, i) => `${i ? "L" : "M"}${x(p.x).toFixed(1)} ${y(p.median).toFixed(1)}`).join("");
      svg.append(make("path", { d: path, class: "line", style }, make("title", {}, line.name)));
      sorted.forEach((p) => {
        if (p.low !== null && p.high !== null && p.high > p.low && (!logY || p.low > 0))
          svg.append(make("line", { x1: x(p.x), x2: x(p.x), y1: y(p.low), y2: y(p.high), class: "spread", style: `stroke:${line.colour}` }));
        svg.append(make("circle", { cx: x(p.x), cy: y(p.median), r: line.hollow ? 4.5 : 3, class: line.hollow ? "hollow" : "",
          style: line.hollow ? `stroke:${line.colour}` : `fill:${line.colour}` },
          make("title", {}, `${line.name}, ${name} ${place(p.x)}: ${measured(p)} ${line.unit || ""}`)));
      });
    });
    const keys = lines.map((line) => {
      const mark = make("svg", { viewBox: "0 0 34 10", class: "key", "aria-hidden": "true" },
        make("path", { d: "M1 5L33 5", class: "line", style: `stroke:${line.colour};stroke-dasharray:${line.dash || "none"}` }));
      return make("li", {}, mark, line.name);
    });
    return make("figure", { class: "overlay" }, make("div", { class: "scroll" }, svg), make("ul", { class: "keys" }, ...keys),
      make("figcaption", {}, "Colour is the series; dashes, and hollow points, are the run. Bars reach from the 20 % to the 80 % quantile."));
  }

  function metrics(runs) {
    const by = [...new Set(runs.flatMap((run) => run.rows.by))];
    const rows = runs.map((run) => decoded(run, by));
    const whats = [...new Set(rows.flat().map((row) => row.what))];
    const head = make("h2", {}, "Metrics");
    if (!whats.length) return [head, make("p", {}, "None of these runs has rows.")];
    const shared = (what) => rows.filter((of) => of.some((row) => row.what === what && row.median !== null)).length;
    const first = whats.slice().sort((a, b) => shared(b) - shared(a) || whats.indexOf(a) - whats.indexOf(b))[0];
    const select = make("select", { name: "metric" }, ...whats.map((what) => make("option", {}, what)));
    select.value = first;
    const filter = make("input", { type: "search", name: "series", placeholder: "e.g. triton forward" });
    const body = make("div");
    function begin() { // with what fits into one plot: a backend and a mode that the runs share
      const of = rows.map((rows) => rows.filter((row) => row.what === select.value && row.median !== null));
      if (new Set(of.flat().map((row) => row.series)).size * runs.length <= MOST_LINES) return "";
      const shared = (row) => of.filter((one) => one.some((other) => other.series === row.series)).length;
      const best = of.flat().filter((row) => !/limit$/.test(row.backend)).sort((a, b) => shared(b) - shared(a))[0];
      return best ? [best.backend, best.mode].filter(Boolean).join(" ") : "";
    }
    function draw() {
      const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const chosen = rows.map((of) => of.filter((row) => row.what === select.value &&
        words.every((word) => (` ${row.series.toLowerCase()}`).includes(` ${word}`))));
      const key = (row) => `${row.series}\u0000${row.x}`;
      const maps = chosen.map((of) => new Map(of.map((row) => [key(row), row])));
      const series = [...new Set(chosen.flat().map((row) => row.series))];
      const lines = runs.flatMap((run, r) => series.map((name, s) => ({
        name: `${name || select.value}, ${short(run)}`, colour: COLOURS[s % COLOURS.length], dash: DASHES[r % DASHES.length],
        unit: (chosen[r][0] || {}).unit, x_name: (chosen[r][0] || {}).x_name,
        hollow: r % 2 === 1,
        points: [...maps[r].values()].filter((row) => row.series === name && row.median !== null && row.x !== null),
      }))).filter((line) => line.points.length);
      const long = lines.filter((line) => line.points.length > 1), alone = lines.length - long.length;
      const keys = [...new Map(chosen.flat().map((row) => [key(row), row])).values()]
        .sort((a, b) => series.indexOf(a.series) - series.indexOf(b.series) || (a.x ?? 0) - (b.x ?? 0));
      const x_name = (chosen.flat()[0] || {}).x_name || "";
      const heads = ["", ...(x_name ? [x_name] : []), ...runs.map(short), ...runs.slice(1).map((run) => `${short(run)} / ${short(runs[0])}`)];
      const lined = keys.slice(0, MOST_ROWS).map((row) => {
        const of = maps.map((map) => map.get(key(row)));
        return [row.series || select.value, ...(x_name ? [place(row.x)] : []), ...of.map(measured), ...of.slice(1).map((b) => ratio(of[0], b))];
      });
      const many = long.length > MOST_LINES;
      body.replaceChildren(...[
        many ? make("p", {}, `${long.length} lines are too many for one plot: write words of a series above.`)
          : long.length ? plot(select.value, long, runs) : null,
        long.length && alone ? make("p", {}, `${alone} series of a single point stand in the table alone.`) : null,
        keys.length ? table(heads, lined, "median (20 % to 80 % quantile)") : make("p", {}, "No row has these words."),
        keys.length > MOST_ROWS ? make("p", {}, `The first ${MOST_ROWS} of ${keys.length} rows; write words of a series to see others.`) : null,
      ].filter(Boolean));
    }
    select.addEventListener("input", () => { filter.value = begin(); draw(); });
    filter.addEventListener("input", draw);
    filter.value = begin();
    draw();
    return [head, make("form", { class: "filters" }, make("label", {}, "Metric ", select), make("label", {}, "Series ", filter)), body];
  }

  async function show(names) {
    const result = $("#compare .result");
    if (names.length < 2) {
      result.replaceChildren(make("p", {}, names.length ? "Choose one more run." : "Choose two or more runs."));
      return;
    }
    try {
      const runs = await Promise.all(names.map(load));
      const books = new Set(runs.map((run) => run.notebook));
      if (books.size > 1) throw new Error(`these are runs of ${[...books].join(" and ")}; only runs of one notebook can be compared`);
      const list = make("ol", { class: "runs-compared" }, ...runs.map((run) => make("li", {},
        make("a", { href: `runs/${run.run}.html` }, run.run), `: ${run.started.slice(0, 16).replace("T", " ")}, ${run.device.join(", ")}`)));
      result.replaceChildren(list, fair(runs), ...differences(runs), ...metrics(runs));
    } catch (error) {
      result.replaceChildren(make("p", { class: "message" }, `Cannot compare: ${error.message}.`));
    }
  }

  function start() {
    const page = $("#compare");
    if (!page) return;
    const books = $("select[name=notebook]", page), boxes = all("fieldset input", page);
    const asked = () => new URLSearchParams(location.hash.slice(1));
    function choose() {
      all("fieldset", page).forEach((set) => { set.hidden = set.dataset.notebook !== books.value; });
    }
    function ticked() {
      return boxes.filter((box) => box.checked && !box.closest("fieldset").hidden).map((box) => box.value);
    }
    function read() {
      const names = (asked().get("runs") || "").split(",").filter(Boolean);
      boxes.forEach((box) => { box.checked = names.includes(box.value); });
      const one = boxes.find((box) => box.checked);
      if (one) books.value = one.closest("fieldset").dataset.notebook;
      else if (asked().get("notebook")) books.value = asked().get("notebook");
      choose();
      $(".chooser", page).open = names.length < 2;
      return show(names);
    }
    page.addEventListener("change", (event) => {
      if (event.target === books) { choose(); }
      if (event.target === books || boxes.includes(event.target)) {
        history.replaceState(null, "", `#runs=${encodeURIComponent(ticked().join(","))}`);
        show(ticked());
      }
    });
    addEventListener("hashchange", read);
    read();
  }

  document.readyState === "loading" ? document.addEventListener("DOMContentLoaded", start) : start();
})();
