"use strict";
// Draws the charts, with a choice of x-axis, zoom, smoothing and runs, and shows the values under the pointer.
(() => {
  const { frame, grids, charts, marks } = JSON.parse(document.getElementById("data").textContent);
  const { width, left, right, top, bottom } = frame;
  const svgs = [...document.querySelectorAll("svg.chart")]; // in the order of `charts`
  const [controls, slider, reset, readout] =
    ["controls", "smoothing", "reset", "readout"].map((id) => document.getElementById(id));
  if (!svgs.length) return;
  const hidden = new Set(); // runs
  let axis = "step";
  let zoom = null; // the ends of the x-axis
  let at = null; // the position of the readout
  let dragged = null; // the start of a drag
  const places = (line) => grids[line.grid][axis];
  const shown = (chart) => chart.lines.filter((line) => !hidden.has(line.run) && places(line));
  const tiny = (value) => (value && Math.abs(value) < 1e-4 ? Number(value.toPrecision(4)).toExponential() : null);
  const text = (value, options) => tiny(value) ?? value.toLocaleString("en-US", options);
  const short = (value) =>
    text(value, { notation: "compact", maximumSignificantDigits: 4 }).replace("K", "k").replace("B", "G");
  const long = (value) => text(value, { maximumSignificantDigits: Number.isInteger(value) ? 21 : 5 });

  // Axes: from values to pixels, and round ticks.
  const scale = (low, high, start, end, isLog) => {
    const t = isLog ? (value) => Math.log10(Math.max(value, low)) : (value) => value;
    const pixel = (value) => start + ((t(value) - t(low)) / (t(high) - t(low))) * (end - start);
    return { low, high, isLog, pixel: (value) => Math.round(10 * pixel(value)) / 10 };
  };
  const ticks = ({ low, high, isLog }, isWhole = false) => {
    const least = Math.max((high - low) / 7, isWhole ? 1 : 0);
    const power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least * (1 - 1e-9));
    const first = Math.ceil(low / step - 1e-9);
    const even = Array.from({ length: Math.floor(high / step + 1e-9) - first + 1 }, (_, i) => (first + i) * step);
    if (!isLog) return even;
    const decades = Array.from({ length: 640 }, (_, i) => 10 ** (i - 320)).filter((ten) => ten >= low / 10 && ten <= high);
    const round = decades.flatMap((ten) => [ten, 2 * ten, 5 * ten]).filter((tick) => tick >= low && tick <= high);
    const few = round.length < 8 ? round : decades.filter((ten, i) => ten >= low && i % Math.ceil(decades.length / 6) === 0);
    return few.length > 1 ? few : even;
  };
  const xScale = () => {
    const values = charts.flatMap(shown).flatMap(places).filter((value) => value !== null);
    const [low, high] = zoom || (values.length ? [Math.min(...values), Math.max(...values)] : [0, 1]);
    if (low === high) return scale(low - 1, high + 1, left, right);
    return scale(!zoom && low < 0.2 * high ? 0 : low, high, left, right);
  };
  // Covers the visible values; the far end of an interval may leave the chart, or it would flatten the line.
  const yScale = (chart, x) => {
    const values = shown(chart).flatMap((line) => {
      const inside = (value, i) => value !== null && places(line)[i] >= x.low && places(line)[i] <= x.high;
      const [means, lows, highs] = [line.mean, line.low || [], line.high || []].map((column) => column.filter(inside));
      const reach = line.interval ? [Math.min(...means) / 2, 2 * Math.max(...means)] : [-Infinity, Infinity];
      return [...means, ...lows, ...highs].filter((value) => value >= reach[0] && value <= reach[1]);
    }).filter((value) => !chart.log || value > 0);
    const [low, high] = values.length ? [Math.min(...values), Math.max(...values)] : [1, 1];
    const factor = chart.log ? (high / low) ** 0.04 : 1;
    if (factor > 1) return scale(low / factor, high * factor, bottom, top, true);
    const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    return scale(chart.zero && low >= 0 && !zoom ? 0 : low - room, high + room, bottom, top, false);
  };

  // The exponential moving average, divided by the sum of its weights, without which it would start at 0.
  const smooth = (values, weight) => {
    let [sum, total] = [0, 0];
    return values.map((value) => {
      if (value === null) return null;
      [sum, total] = [weight * sum + (1 - weight) * value, weight * total + 1 - weight];
      return sum / total;
    });
  };
  const smoothed = (line) => (line.noisy && slider.value > 0 ? smooth(line.mean, Number(slider.value)) : null);
  // The ranges of indices without missing values.
  const stretches = (...columns) => {
    const found = [[]];
    columns[0].forEach((_, i) => {
      if (columns.every((column) => column[i] !== null)) found.at(-1).push(i);
      else found.push([]);
    });
    return found.filter((stretch) => stretch.length);
  };
  const paths = (line, x, y) => {
    const point = (values) => (i) => `${x.pixel(places(line)[i])},${y.pixel(values[i])}`;
    const next = (values) => (i) =>
      (line.stepped ? `V${y.pixel(values[i])}H${x.pixel(places(line)[i])}` : `L${point(values)(i)}`);
    const path = (kind, d) => `<path class="${kind} ${line.color}" d="${d.join("")}"/>`;
    const trace = (kind, values) => path(kind, stretches(places(line), values).map(([first, ...rest]) =>
      `M${point(values)(first)}h0${rest.map(next(values)).join("")}`));
    const band = line.low ? stretches(places(line), line.low, line.high).map((stretch) =>
      `M${[...stretch.map(point(line.high)), ...stretch.reverse().map(point(line.low))].join("L")}Z`) : [];
    const dots = line.dots ? stretches(places(line), line.mean).flat().map((i) => `M${point(line.mean)(i)}h0`) : [];
    const average = smoothed(line);
    const lines = average ? trace("raw", line.mean) + trace("line", average) : trace("line", line.mean);
    return path("band", band) + lines + path("dots", dots);
  };
  const markPath = (mark, chart, x, y) => {
    if (hidden.has(mark.run) || mark.at[axis] == null || (mark.kind === "skip" && !chart.skipped)) return "";
    const d = mark.kind === "skip" ? `M-7,${top + 7 + 18 * (mark.run % 4)}l14,14m0,-14l-14,14` : `M0,${top}V${bottom}`;
    const label = chart.sizes && mark.size ? `<text x="12" y="${y.pixel(mark.size) + 28}">${short(mark.size)}</text>` : "";
    return `<g class="${mark.kind} ${mark.color}" transform="translate(${x.pixel(mark.at[axis])},0)">`
      + `<title>${mark.title}</title><path d="${d}"/>${label}</g>`;
  };
  const draw = () => {
    const x = xScale();
    const [across, down] = [right - left + 10, bottom - top + 10];
    reset.hidden = !zoom;
    charts.forEach((chart, number) => {
      const y = yScale(chart, x);
      // Only numbers and words of this program; names of runs are always set as text.
      svgs[number].innerHTML = [
        ...ticks(y).map((tick) => `<path class="rule" d="M${left},${y.pixel(tick)}H${right}"/>`
          + `<text class="y" x="${left - 14}" y="${y.pixel(tick) + 8}">${short(tick)}</text>`),
        ...ticks(x, true).map((tick) => `<path class="rule" d="M${x.pixel(tick)},${bottom}v8"/>`
          + `<text class="x" x="${x.pixel(tick)}" y="${bottom + 36}">${short(tick)}</text>`),
        `<svg x="${left - 5}" y="${top - 5}" width="${across}" height="${down}"`
          + ` viewBox="${left - 5} ${top - 5} ${across} ${down}">`,
        ...shown(chart).map((line) => paths(line, x, y)), ...marks.map((mark) => markPath(mark, chart, x, y)),
        `</svg><path class="rule cursor"/><rect class="selected" y="${top}" height="${bottom - top}" width="0"/>`,
      ].join("");
    });
  };

  // The readout: the values of every line nearest to a position on the x-axis.
  const nearest = (line, value, x) => {
    const distances = places(line).map((each) => (each === null ? Infinity : Math.abs(each - value)));
    const best = distances.indexOf(Math.min(...distances));
    const ended = value > Math.max(...places(line)) + 0.05 * (x.high - x.low);
    return ended || distances[best] === Infinity ? null : best;
  };
  const steps = ({ first, last, step }, i) =>
    (first && first[i] !== last[i] ? `steps ${long(first[i])}–${long(last[i])}` : `step ${long(step[i])}`);
  const add = (parent, name, text) => {
    parent.appendChild(document.createElement(name)).textContent = text;
    return parent.lastChild;
  };
  const addLine = (line, i, said) => {
    const row = add(readout, "div", "");
    row.innerHTML = `<svg class="swatch" viewBox="0 0 22 8"><path class="line ${line.color}" d="M1,4H21"/></svg>`;
    row.append(`${line.name} `);
    add(row, "b", line.mean[i] === null ? "–" : long(line.mean[i]));
    const range = line.low && line.low[i] !== null && line.low[i] !== line.high[i];
    const open = range && line.interval && line.high[i] >= line.interval * line.mean[i];
    const step = steps(grids[line.grid], i);
    add(row, "small", [
      range ? `(${long(line.low[i])} ${open ? "or more" : `to ${long(line.high[i])}`})` : "",
      smoothed(line) && line.mean[i] !== null ? `smoothed ${long(smoothed(line)[i])}` : "", step === said ? "" : `at ${step}`,
    ].join(" "));
  };
  const show = (number, value) => {
    const x = xScale();
    const found = shown(charts[number]).map((line) => [line, nearest(line, value, x)]).filter(([, i]) => i !== null);
    readout.hidden = !found.length;
    if (readout.hidden) return;
    const [grid, index] = [grids[found[0][0].grid], found[0][1]];
    const counts = ["examples", "tokens"].filter((name) => (grid[`${name}_seen`] || [])[index] != null)
      .map((name) => ` · ${long(grid[`${name}_seen`][index])} ${name}`);
    [at, readout.textContent] = [value, steps(grid, index) + counts.join("")];
    for (const [line, i] of found) addLine(line, i, steps(grid, index));
    for (const svg of svgs) svg.querySelector(".cursor").setAttribute("d", `M${x.pixel(value)},${top}V${bottom}`);
    const box = svgs[number].getBoundingClientRect();
    const beside = box.left + (x.pixel(value) / width) * box.width + 16;
    const fits = beside + readout.offsetWidth < document.documentElement.clientWidth;
    readout.style.left = `${Math.max(8, fits ? beside : beside - readout.offsetWidth - 32)}px`;
    readout.style.top = `${Math.max(8, Math.min(box.bottom + 6, innerHeight - readout.offsetHeight - 8))}px`;
  };
  const hide = () => {
    [at, dragged, readout.hidden] = [null, null, true];
    for (const svg of svgs) svg.querySelector(".cursor").removeAttribute("d");
    for (const svg of svgs) svg.querySelector(".selected").setAttribute("width", 0);
  };
  const redraw = (ends) => { zoom = ends; draw(); hide(); };

  // Pointer, keys and controls.
  const place = (svg, event) => {
    const [box, x] = [svg.getBoundingClientRect(), xScale()];
    const pixel = Math.min(Math.max(((event.clientX - box.left) / box.width) * width, left), right);
    return x.low + ((pixel - left) / (right - left)) * (x.high - x.low);
  };
  // Shows a drag and returns its ends; null for a tiny one.
  const select = (svg, to) => {
    const ends = [dragged, to].sort((a, b) => a - b);
    const [start, end] = ends.map(xScale().pixel);
    svg.querySelector(".selected").setAttribute("x", start);
    svg.querySelector(".selected").setAttribute("width", end - start);
    return end - start > 10 ? ends : null;
  };
  const press = (number, event) => {
    const { low, high } = xScale();
    const [value, move] = [at ?? (low + high) / 2, { ArrowLeft: -1, ArrowRight: 1 }[event.key]];
    if (move) show(number, Math.min(Math.max(value + (move * (high - low)) / 100, low), high));
    else if (event.key === "+") redraw([value - (high - low) / 4, value + (high - low) / 4]);
    else if (event.key === "Escape") redraw(null);
    else return;
    event.preventDefault();
  };
  svgs.forEach((svg, number) => {
    const on = (name, act) => svg.addEventListener(name, act);
    on("pointerdown", (event) => {
      show(number, place(svg, event));
      dragged = event.button === 0 ? place(svg, event) : null;
      svg.setPointerCapture(event.pointerId);
    });
    on("pointermove", (event) => {
      show(number, place(svg, event));
      if (dragged !== null) select(svg, place(svg, event));
    });
    on("pointerup", (event) => {
      const ends = dragged === null ? null : select(svg, place(svg, event));
      dragged = null;
      if (ends) redraw(ends);
    });
    on("pointercancel", hide);
    on("pointerleave", (event) => { if (event.pointerType === "mouse" && dragged === null) hide(); });
    on("dblclick", () => redraw(null));
    on("blur", hide);
    on("keydown", (event) => press(number, event));
  });
  addEventListener("scroll", hide, { passive: true });
  reset.addEventListener("click", () => redraw(null));
  slider.addEventListener("input", draw);
  for (const button of document.querySelectorAll("[name=axis]")) {
    button.addEventListener("change", () => { axis = button.value; redraw(null); });
  }
  for (const button of document.querySelectorAll("[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      if (!hidden.delete(run)) hidden.add(run);
      button.setAttribute("aria-pressed", !hidden.has(run));
      redraw(zoom);
    });
  }
  controls.hidden = false;
  draw();
})();
