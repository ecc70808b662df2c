/* The explorer without a kernel: draws stored data of a few examples; the query follows the hand. */
(function () {
  "use strict";
  const COLOURS = { cmp: "#E69F00", slc: "#0072B2", win: "#009E73" };
  const NAMES = { cmp: "compressed", slc: "selected", win: "window" };

  function sees(one, row) {
    const t = one.rows[row], blocks = new Set(one.blocks[row]);
    return {
      cmp: (s) => s < one.covered[row],
      slc: (s) => s <= t && blocks.has(Math.floor(s / one.block)),
      win: (s) => s <= t && s > t - one.window,
    };
  }

  function map(one, branch, canvas) {
    const n = one.rows.length, made = canvas.getContext("2d");
    canvas.width = canvas.height = n;
    made.fillStyle = "#fff";
    made.fillRect(0, 0, n, n);
    for (let row = 0; row < n; row++) {
      const seen = sees(one, row)[branch];
      one.rows.forEach((s, column) => {
        if (s > one.rows[row] || seen(s)) {
          made.fillStyle = s > one.rows[row] ? "#eee" : COLOURS[branch];
          made.fillRect(column, row, 1, 1);
        }
      });
    }
  }

  function bars(one, row, canvas) {
    const made = canvas.getContext("2d"), told = one.importance[row], wide = canvas.width / told.length;
    const taken = new Set(one.blocks[row]);
    made.fillStyle = "#fff";
    made.fillRect(0, 0, canvas.width, canvas.height);
    Array.from(told).forEach((digit, block) => {
      if (digit === "-") return;
      const high = 3 + (canvas.height - 3) * Number(digit) / 9;
      made.fillStyle = taken.has(block) ? COLOURS.slc : "#bbb";
      made.fillRect(block * wide, canvas.height - high, Math.max(1, wide - 1), high);
    });
  }

  function start(place) {
    const choice = place.querySelector("select"), slider = place.querySelector("input");
    const maps = Array.from(place.querySelectorAll("figure.map"));
    window.nsaExamples.forEach((one, i) => choice.add(new Option(one.name, i)));
    let one, row;
    function follow(to) {
      row = Math.max(0, Math.min(one.rows.length - 1, to));
      slider.value = row;
      maps.forEach((figure) => {
        figure.querySelector("i").style.top = 100 * (row + 0.5) / one.rows.length + "%";
      });
      bars(one, row, place.querySelector("canvas.importance"));
      const keys = one.keys[row], t = one.rows[row], all = keys[0] + keys[1] + keys[2];
      place.querySelector("output").textContent =
        `Query ${t} of T ${one.tokens} sees ${keys[0]} compressed keys, ${keys[1]} selected tokens and ` +
        `${keys[2]} in its window: ${all} keys, where dense attention sees ${t + 1}. It selects ` +
        `${one.blocks[row].length} of the ${Math.floor(t / one.block) + 1} blocks begun.`;
    }
    function choose() {
      one = window.nsaExamples[choice.value];
      slider.max = one.rows.length - 1;
      maps.forEach((figure) => map(one, figure.dataset.branch, figure.querySelector("canvas")));
      follow(Math.round(0.75 * one.rows.length));
    }
    maps.forEach((figure) => {
      figure.querySelector("figcaption").textContent = NAMES[figure.dataset.branch];
      const canvas = figure.querySelector("canvas");
      const drag = (event) => {
        if (event.buttons !== 1) return;
        const box = canvas.getBoundingClientRect();
        follow(Math.floor((event.clientY - box.top) / box.height * one.rows.length));
      };
      canvas.addEventListener("pointerdown", (e) => { canvas.setPointerCapture(e.pointerId); drag(e); });
      canvas.addEventListener("pointermove", drag);
    });
    choice.addEventListener("change", choose);
    slider.addEventListener("input", () => follow(Number(slider.value)));
    choose();
    place.hidden = false;
  }

  document.addEventListener("DOMContentLoaded", () => {
    const place = document.querySelector(".explorer");
    if (place && window.nsaExamples) start(place);
  });
})();
