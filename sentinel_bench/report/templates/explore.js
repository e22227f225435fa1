"use strict";
// Draws any statistic of any worker from the data in the page. Text from the record is set as text.
(() => {
  addEventListener("beforeprint", () => {
    for (const details of document.querySelectorAll("details")) details.open = true;
  });
  const source = document.getElementById("data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const REACH = 5; // fence heights that the axis shows beyond the fences
  const SVG = "http://www.w3.org/2000/svg";
  const element = (id) => document.getElementById(id);
  const key = (...parts) => parts.join("\n");
  const held = (map, name) => (Object.hasOwn(map, name) ? map[name] : undefined);
  const chart = element("chart");

  const decode = (text) => {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    const view = new DataView(bytes.buffer);
    return Float32Array.from({ length: bytes.length / 4 }, (_, i) => view.getFloat32(4 * i, true));
  };
  const line = (direction, name, stage, replica) => {
    const found = held(data.lines, key(direction, name, stage, replica));
    return found ? { steps: data.timelines[found.at], values: decode(found.values) }
      : { steps: [], values: [] };
  };
  const fenceOf = (direction, name, stage) => {
    const found = held(data.fences, key(direction, name, stage));
    return found
      ? { steps: data.timelines[found.at], low: decode(found.low), high: decode(found.high) }
      : { steps: [], low: [], high: [] };
  };
  const flagsOf = (direction, stage, replica) =>
    held(data.flags, key(direction, stage, replica)) || { count: 0, steps: [], lied: [], said: {} };

  // --- what is chosen

  const fill = (select, values) => {
    const before = select.value;
    select.replaceChildren(...values.map((value) => new Option(value, value)));
    if (values.map(String).includes(before)) select.value = before;
  };
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  const chosen = () => ({
    stage: Number(element("stage").value),
    replica: Number(element("replica").value),
    direction: element("direction").value,
    name: element("statistic").value,
  });
  const isClosed = (triple) => Boolean(triple) && (triple[1] !== null || triple[2] !== null);
  const isOutside = (triple) => isClosed(triple) &&
    (triple[0] === null || (triple[1] !== null && triple[0] <= triple[1]) ||
      (triple[2] !== null && triple[0] >= triple[2]));

  // --- drawing

  const make = (tag, attributes, parent, text) => {
    const node = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    if (text !== undefined) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };
  const ticks = (low, high, n) => {
    const rough = (high - low) / n;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
    const found = [];
    for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i++) {
      found.push(i * step);
    }
    return found;
  };
  const short = (x) => (x === null || Number.isNaN(x) ? "not finite"
    : !Number.isFinite(x) ? (x > 0 ? "∞" : "−∞") : String(Number(x.toPrecision(4))));

  const bounds = (values, fence, whole) => {
    const finite = (list) => Array.from(list).filter(Number.isFinite);
    const all = finite(values);
    const closed = finite(fence);
    if (!all.length && !closed.length) return null;
    const least = (list) => list.reduce((a, b) => Math.min(a, b));
    const most = (list) => list.reduce((a, b) => Math.max(a, b));
    let low = least([...all, ...closed]);
    let high = most([...all, ...closed]);
    if (closed.length && !whole) {
      const reach = REACH * Math.max(most(closed) - least(closed), 1e-12);
      low = Math.max(low, least(closed) - reach);
      high = Math.min(high, most(closed) + reach);
    }
    const room = 0.06 * Math.max(high - low, Math.abs(high) * 1e-6, 1e-12);
    return [low - room, high + room];
  };

  let points = [];
  let place = null;

  const draw = () => {
    const { stage, replica, direction, name } = chosen();
    const own = line(direction, name, stage, replica);
    const fence = fenceOf(direction, name, stage);
    const flags = flagsOf(direction, stage, replica);
    const worker = data.workers[key(stage, replica)];
    const said = held(flags.said, name) || [];
    const values = [...own.values, ...said.filter(Boolean).map((t) => t[0])];
    const closed = [...fence.low, ...fence.high,
      ...said.filter(Boolean).flatMap((t) => [t[1], t[2]])].filter((x) => x !== null);
    const range_ = bounds(values, closed, element("whole").checked);
    const width = Math.max(280, chart.clientWidth || 680);
    const height = Math.round(Math.min(340, Math.max(220, width * 0.5)));
    const left = 58, right = 10, top = 16, bottom = 36;
    const svg = make("svg", { viewBox: `0 0 ${width} ${height}`, width, height });
    const x = (step) => left + ((step - data.from + 1) / Math.max(1, data.to - data.from + 1)) *
      (width - left - right);
    const [low, high] = range_ || [0, 1];
    const y = (value) => top + ((high - value) / (high - low)) * (height - top - bottom);
    const inside = (value) => value >= low && value <= high;
    const clamp = (value) => y(Math.min(high, Math.max(low, value)));
    const edge = (step, above) => {
      const at = x(step), tip = above ? top : height - bottom, base = above ? tip + 7 : tip - 7;
      make("path", { d: `M${at} ${tip}L${at - 4} ${base}L${at + 4} ${base}Z`, class: "v-edge" }, svg);
    };

    for (const tick of ticks(data.from, Math.max(data.from + 1, data.to - 1), width < 480 ? 4 : 8)) {
      if (!Number.isInteger(tick)) continue;
      make("text", { x: x(tick), y: height - bottom + 15, "text-anchor": "middle" }, svg, tick);
      make("path", { d: `M${x(tick)} ${height - bottom}v4`, class: "v-axis" }, svg);
    }
    if (range_) for (const tick of ticks(low, high, 5)) {
      make("path", { d: `M${left} ${y(tick)}H${width - right}`, class: "v-grid" }, svg);
      make("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, svg, short(tick));
    }
    make("text", { x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle" }, svg, "step");
    make("text", { x: 2, y: 10 }, svg, `${name} (${direction})`);

    band(svg, fence, x, clamp);
    if (element("peers") && element("peers").checked) {
      for (const other of range(data.replicas)) {
        if (other !== replica) {
          path(svg, line(direction, name, stage, other), x, clamp, "v-peer");
        }
      }
    }
    said.forEach((triple, i) => {
      if (data.traced || !isClosed(triple)) return;
      const ends = [triple[1] ?? low, triple[2] ?? high].map(clamp);
      make("path", { d: `M${x(flags.steps[i])} ${ends[0]}V${ends[1]}`, class: "v-bar" }, svg);
    });
    path(svg, own, x, clamp, "v-value");
    own.steps.forEach((step, i) => {
      if (inside(own.values[i])) {
        make("circle", { cx: x(step), cy: y(own.values[i]), r: 1.4, class: "v-dot" }, svg);
      } else edge(step, !(own.values[i] < low));
    });
    flags.steps.forEach((step, i) => {
      make("path", { d: `M${x(step)} ${top - 3}v7`, class: "v-flag" }, svg);
      const triple = said[i];
      if (triple && triple[0] !== null && inside(triple[0])) {
        make("circle", { cx: x(step), cy: y(triple[0]), r: 1.4, class: "v-dot" }, svg);
      }
      if (!isOutside(triple)) return;
      if (triple[0] !== null && inside(triple[0])) {
        make("circle", { cx: x(step), cy: y(triple[0]), r: 4, class: "v-out" }, svg);
      } else edge(step, triple[0] === null || triple[0] > high);
    });
    if (worker) for (const [step, shift, look] of
      [[worker.acted, -0.5, "v-act"], [worker.banned, 0.5, "v-ban"]]) {
      if (step !== null) {
        make("path", { d: `M${x(step + shift)} ${top}V${height - bottom}`, class: look }, svg);
      }
    }
    make("path", { d: `M${left} ${top}V${height - bottom}H${width - right}`, class: "v-axis" }, svg);
    if (!own.steps.length && !said.length) {
      make("text", { x: (left + width) / 2, y: height / 2, "text-anchor": "middle" }, svg,
        data.traced ? "never tested here" : "never flagged here");
    }
    const beyond = values.filter((value) => !(value >= low && value <= high));
    if (range_ && beyond.length) {
      const far = beyond.reduce((a, b) => (Math.abs(b) > Math.abs(a) ? b : a));
      const text = beyond.some((value) => value === null || !Number.isFinite(value))
        ? "not finite" : `as far as ${short(far)}`;
      make("text", { x: width - right, y: 10, "text-anchor": "end", class: "v-edge" }, svg, text);
    }
    chart.replaceChildren(svg);
    points = readings(own, fence, flags, said);
    place = { svg, x, top, bottom: height - bottom, cursor: null };
    describe(worker, flags);
  };

  const path = (svg, { steps, values }, x, y, look) => {
    let d = "", open = false, last = null;
    steps.forEach((step, i) => {
      const value = values[i];
      const joined = open && last !== null && step - last <= 2 * data.stride;
      open = !Number.isNaN(value);
      if (open) d += `${joined ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
      last = step;
    });
    if (d) make("path", { d, class: look }, svg);
  };

  const band = (svg, { steps, low, high }, x, y) => {
    steps.forEach((step, i) => {
      if (!Number.isFinite(low[i]) && !Number.isFinite(high[i])) return;
      const from = i ? Math.max(step - data.stride, (steps[i - 1] + step) / 2) : step - 0.5;
      const to = i + 1 < steps.length
        ? Math.min(step + data.stride, (step + steps[i + 1]) / 2) : step + 0.5;
      const above = y(high[i]), below = y(low[i]);
      make("rect", { x: x(from), y: above, width: Math.max(0.5, x(to) - x(from) + 0.3),
        height: Math.max(0.8, below - above), class: "v-fence" }, svg);
    });
  };

  // --- words

  const readings = (own, fence, flags, said) => {
    const found = new Map();
    own.steps.forEach((step, i) => found.set(step, { step, value: own.values[i] }));
    fence.steps.forEach((step, i) => {
      if (found.has(step)) Object.assign(found.get(step), { low: fence.low[i], high: fence.high[i] });
    });
    flags.steps.forEach((step, i) => {
      const triple = said[i];
      const entry = { ...found.get(step), step, flagged: true, lied: Boolean(flags.lied[i]) };
      if (triple) {
        Object.assign(entry, { value: triple[0], low: triple[1], high: triple[2] });
      }
      found.set(step, entry);
    });
    return [...found.values()].sort((a, b) => a.step - b.step);
  };

  const describe = (worker, flags) => {
    const { stage, replica, direction } = chosen();
    const parts = [`Stage ${stage}, replica ${replica}: ${worker ? worker.words : "honest"}.`];
    if (worker && worker.acted !== null) parts.push(`First lie at step ${worker.acted}.`);
    if (worker && worker.banned !== null) parts.push(`Banned at step ${worker.banned}.`);
    parts.push(`Flags (${direction}): ${flags.count}.`);
    element("readout").textContent = parts.join(" ");
    chart.setAttribute("aria-label", parts.join(" "));
    for (const button of element("notable").children) {
      button.setAttribute("aria-pressed", String(button.value === key(stage, replica)));
    }
  };

  const bound = (x, sign) => (x === null || x === undefined || !Number.isFinite(x) ? `${sign}∞` : short(x));
  const show = (index) => {
    const point = points[index];
    if (!point || !place) return;
    const value = point.value === undefined ? "" : ` value ${short(point.value)},`;
    const fence = point.low === undefined ? ""
      : ` fence ${bound(point.low, "−")} to ${bound(point.high, "")}`;
    const flag = point.flagged ? `; flagged${point.lied ? ", and it had lied" : ", and it was honest"}` : "";
    element("readout").textContent = `Step ${point.step}:${value}${fence}${flag}.`;
    if (place.cursor) place.cursor.remove();
    const at = place.x(point.step);
    place.cursor = make("path", { d: `M${at} ${place.top}V${place.bottom}`, class: "v-cursor" }, place.svg);
    place.index = index;
  };

  // --- events

  const pick = (worker) => {
    const [stage, replica] = worker.split("\n");
    element("stage").value = stage;
    element("replica").value = replica;
    const told = data.telling[worker];
    if (told) {
      element("direction").value = told[0];
      fill(element("statistic"), data.names[told[0]]);
      element("statistic").value = told[1];
    }
    draw();
  };
  fill(element("stage"), range(data.stages));
  fill(element("replica"), range(data.replicas));
  fill(element("direction"), Object.keys(data.names));
  fill(element("statistic"), data.names[element("direction").value]);
  element("direction").addEventListener("change", () => {
    fill(element("statistic"), data.names[element("direction").value]);
    draw();
  });
  for (const id of ["stage", "replica", "statistic", "whole", "peers"]) {
    if (element(id)) element(id).addEventListener("change", draw);
  }
  for (const worker of Object.keys(data.telling)) {
    const button = document.createElement("button");
    button.type = "button";
    button.value = worker;
    const { letter, delay } = data.workers[worker];
    button.textContent = [worker.replace("\n", "."), letter && `${letter}${delay ?? ""}`]
      .filter(Boolean).join(" ");
    button.title = data.workers[worker].words;
    button.addEventListener("click", () => pick(worker));
    element("notable").append(button);
  }
  chart.addEventListener("pointermove", (event) => {
    if (!place || !points.length) return;
    const box = place.svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * place.svg.viewBox.baseVal.width;
    let best = 0;
    points.forEach((point, i) => {
      if (Math.abs(place.x(point.step) - at) < Math.abs(place.x(points[best].step) - at)) best = i;
    });
    show(best);
  });
  chart.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !points.length) return;
    event.preventDefault();
    const from = place.index === undefined ? (move > 0 ? -1 : points.length) : place.index;
    show(Math.min(points.length - 1, Math.max(0, from + move)));
  });
  addEventListener("resize", draw);

  element("explorer").hidden = false;
  const first = Object.keys(data.telling)[0];
  if (first) pick(first);
  else draw();
})();
