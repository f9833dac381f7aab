"use strict";
// Switches the x-axis and reads values out under the pointer. Everything is drawn already; this draws it again.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const { left, right, top, bottom } = data.frame;
  const readout = document.getElementById("readout");
  const figures = [...document.querySelectorAll("figure[data-chart]")].map((figure) => ({
    figure, svg: figure.querySelector("figcaption + svg"), chart: data.charts[figure.dataset.chart],
    cursor: figure.querySelector(".cursor"),
  }));
  let axis = "step";

  const xPixel = (value) => {
    const { low, high } = data.axes[axis];
    return left + ((value - low) / (high - low)) * (right - left);
  };
  const yPixel = (y, value) => {
    const t = y.log ? (v) => Math.log10(Math.max(v, y.low)) : (v) => v;
    return bottom - ((t(value) - t(y.low)) / (t(y.high) - t(y.low))) * (bottom - top);
  };
  const px = (value) => value.toFixed(1);

  // The stretches of points over which nothing is missing.
  const stretches = (xs, ...columns) => {
    const found = [];
    let open = null;
    xs.forEach((x, i) => {
      if (x === null || columns.some((column) => column[i] === null)) { open = null; return; }
      if (!open) found.push((open = []));
      open.push([xPixel(x), ...columns.map((column) => column[i])]);
    });
    return found;
  };
  const alone = (stretch) => (stretch.length === 1 ? "h0" : "");
  const trace = (xs, values, line, y) =>
    stretches(xs, values).map((stretch) => {
      const at = ([x, value]) => `${px(x)},${px(yPixel(y, value))}`;
      if (!line.stepped) return "M" + stretch.map(at).join("L") + alone(stretch);
      const rest = stretch.slice(1).map(([x, value]) => `V${px(yPixel(y, value))}H${px(x)}`);
      return "M" + at(stretch[0]) + rest.join("") + alone(stretch);
    }).join("");
  const paths = {
    line: (xs, line, y) => trace(xs, line.smooth || line.mean, line, y),
    raw: (xs, line, y) => trace(xs, line.mean, line, y),
    dots: (xs, line, y) =>
      stretches(xs, line.mean).flat().map(([x, value]) => `M${px(x)},${px(yPixel(y, value))}h0`).join(""),
    band(xs, line, y) {
      return stretches(xs, line.low, line.high).map((stretch) => {
        const there = stretch.map(([x, , high]) => `${px(x)},${px(yPixel(y, high))}`);
        const back = stretch.map(([x, low]) => `${px(x)},${px(yPixel(y, low))}`).reverse();
        return "M" + there.concat(back).join("L") + "Z";
      }).join("");
    },
  };

  const element = (name, attributes, text) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const draw = () => {
    for (const { svg, chart } of figures) {
      for (const path of svg.querySelectorAll("path[data-line]")) {
        const line = chart.lines[path.dataset.line];
        path.setAttribute("d", paths[path.classList[0]](data.grids[line.grid][axis], line, chart.y));
      }
      for (const mark of svg.querySelectorAll(".mark")) {
        const value = data.grids[mark.dataset.grid][axis][mark.dataset.index];
        mark.style.display = value === null ? "none" : "inline";
        if (value !== null) mark.setAttribute("transform", `translate(${px(xPixel(value))},0)`);
      }
      svg.querySelector(".x-axis").replaceChildren(...data.axes[axis].ticks.flatMap(([tick, text]) => {
        const x = px(xPixel(tick));
        return [element("line", { class: "tick", x1: x, x2: x, y1: bottom, y2: bottom + 4 }),
          element("text", { class: "x", x, y: bottom + 18 }, text)];
      }));
    }
  };

  const number = (value) =>
    Number.isInteger(value) ? value.toLocaleString("en-US")
      : Math.abs(value) >= 1e4 ? value.toLocaleString("en-US", { maximumFractionDigits: 1 })
        : String(Number(value.toPrecision(5)));
  // The point of a grid nearest to a value of the axis; null where it has none, or ends well before.
  const nearest = (grid, value) => {
    const { low, high } = data.axes[axis];
    const xs = data.grids[grid][axis];
    let best = null;
    xs.forEach((x, i) => {
      if (x !== null && (best === null || Math.abs(x - value) < Math.abs(xs[best] - value))) best = i;
    });
    return best === null || value - Math.max(...xs) > 0.05 * (high - low) ? null : best;
  };
  const names = { examples_seen: "examples", tokens_seen: "tokens" };
  const steps = (grid, i) => {
    const { first, last, step } = data.grids[grid];
    const several = first && first[i] !== last[i];
    return several ? `steps ${number(first[i])}–${number(last[i])}` : `step ${number(step[i])}`;
  };
  const counts = (grid, i) => Object.entries(names)
    .filter(([name]) => data.grids[grid][name][i] !== null)
    .map(([name, text]) => `${number(data.grids[grid][name][i])} ${text}`);
  const add = (parent, name, className, text) => {
    const made = parent.appendChild(document.createElement(name));
    made.className = className;
    made.textContent = text;
    return made;
  };
  const show = (item, event) => {
    const box = item.svg.getBoundingClientRect();
    const { low, high } = data.axes[axis];
    const x = ((event.clientX - box.left) / box.width) * item.svg.viewBox.baseVal.width;
    const value = low + ((Math.min(Math.max(x, left), right) - left) / (right - left)) * (high - low);
    readout.replaceChildren();
    let said = null;
    item.chart.lines.forEach((line, index) => {
      const i = nearest(line.grid, value);
      if (i === null) return;
      if (said === null) {
        said = steps(line.grid, i);
        add(readout, "div", "at", [said, ...counts(line.grid, i)].join(" · "));
      }
      const row = add(readout, "div", "", "");
      const swatch = element("svg", { class: "swatch", viewBox: "0 0 22 8" });
      const drawn = item.svg.querySelector(`.line[data-line="${index}"]`);
      swatch.append(element("path", { class: drawn.getAttribute("class"), d: "M1,4H21" }));
      row.append(swatch, `${line.name} `);
      add(row, "b", "", line.mean[i] === null ? "–" : number(line.mean[i]));
      if (line.low && line.low[i] !== null && line.low[i] !== line.high[i]) {
        const end = line.open && line.high[i] >= line.open * line.mean[i] ? "or more" : `to ${number(line.high[i])}`;
        add(row, "span", "range", ` (${number(line.low[i])} ${end})`);
      }
      if (steps(line.grid, i) !== said) add(row, "span", "range", ` at ${steps(line.grid, i)}`);
    });
    if (said === null) { hide(); return; }
    for (const { cursor } of figures) {
      cursor.removeAttribute("hidden");
      cursor.setAttribute("x1", px(xPixel(value)));
      cursor.setAttribute("x2", px(xPixel(value)));
    }
    readout.hidden = false;
    const { offsetWidth: width, offsetHeight: height } = readout;
    const room = document.documentElement.clientWidth - width - 8;
    const beside = event.clientX + 16 <= room ? event.clientX + 16 : event.clientX - width - 16;
    readout.style.left = `${Math.max(8, Math.min(beside, room))}px`;
    readout.style.top = `${Math.max(8, Math.min(event.clientY - height - 12, innerHeight - height - 8))}px`;
  };
  const hide = () => {
    readout.hidden = true;
    for (const { cursor } of figures) cursor.setAttribute("hidden", "");
  };

  for (const item of figures) {
    item.svg.addEventListener("pointermove", (event) => show(item, event));
    item.svg.addEventListener("pointerdown", (event) => show(item, event));
    // A finger leaves as soon as it has tapped: what it asked for stays until the page is touched elsewhere or moves.
    item.svg.addEventListener("pointerleave", (event) => { if (event.pointerType === "mouse") hide(); });
  }
  addEventListener("pointerdown", (event) => { if (!figures.some(({ svg }) => svg.contains(event.target))) hide(); });
  addEventListener("scroll", hide, { passive: true });
  const choose = document.querySelector(".switch");
  if (choose) {
    choose.hidden = false;
    choose.addEventListener("change", (event) => { axis = event.target.value; hide(); draw(); });
  }
})();
