"use strict";
// Texts of the study are only ever set as text, never as HTML.
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const short = (number) => (Number.isFinite(number) ? String(+number.toPrecision(4)) : "–");

function showTip(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}

// ---- the leaderboard sorts

for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.closest("th"), table = head.closest("table"), column = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of table.querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const key = (row) => row.cells[column].dataset.key ?? row.cells[column].textContent;
    const compare = (a, b) => {
      const [x, y] = [key(a), key(b)], [n, m] = [Number(x), Number(y)];
      if ((x === "") !== (y === "")) return x === "" ? 1 : -1; // what is missing is last both ways
      const order = Number.isNaN(n) || Number.isNaN(m) ? x.localeCompare(y) : n - m;
      return up ? order : -order;
    };
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  });
}

// ---- figures on canvas

/** Let `draw` fill a canvas; it returns what says the text under the pointer. */
function figure(id, height, draw) {
  const canvas = document.getElementById(id);
  if (!canvas) return;
  let under = () => "";
  const paint = () => {
    const ratio = devicePixelRatio || 1, width = canvas.clientWidth || canvas.parentElement.clientWidth;
    canvas.style.height = `${height}px`;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const pen = canvas.getContext("2d");
    pen.scale(ratio, ratio);
    pen.font = "12px system-ui, sans-serif";
    under = draw(pen, width, height);
  };
  canvas.addEventListener("pointermove", (event) => {
    const text = under(event.offsetX, event.offsetY);
    text ? showTip(event, text) : (tip.style.display = "none");
  });
  canvas.addEventListener("pointerleave", () => (tip.style.display = "none"));
  new ResizeObserver(paint).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);
}

/** Round steps between two numbers, at most `most` of them. */
function ticks(least, largest, most) {
  const rough = (largest - least) / most || 1, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough);
  const found = [];
  for (let k = Math.ceil(least / step); k * step <= largest + step * 1e-9; k++) found.push(k * step);
  return found;
}

/** Draw axes; return what turns values into places. */
function axes(pen, box, xs, ys, names) {
  const x = (value) => box.left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (box.right - box.left);
  const y = (value) => box.bottom - ((value - ys[0]) / (ys[1] - ys[0] || 1)) * (box.bottom - box.top);
  pen.strokeStyle = css("--line");
  pen.fillStyle = css("--soft");
  pen.lineWidth = 1;
  pen.textAlign = "center";
  for (const value of ticks(...xs, (box.right - box.left) / 90)) {
    pen.beginPath(); pen.moveTo(x(value), box.top); pen.lineTo(x(value), box.bottom); pen.stroke();
    pen.fillText(short(value), x(value), box.bottom + 16);
  }
  pen.fillText(names[0], (box.left + box.right) / 2, box.bottom + 34);
  if (names[1]) {
    pen.textAlign = "right";
    for (const value of ticks(...ys, (box.bottom - box.top) / 45)) {
      pen.beginPath(); pen.moveTo(box.left, y(value)); pen.lineTo(box.right, y(value)); pen.stroke();
      pen.fillText(short(value), box.left - 8, y(value) + 4);
    }
    pen.textAlign = "left";
    pen.fillText(names[1], 8, 16);
  }
  return { x, y };
}

function dashed(pen, x0, y0, x1, y1, text) {
  pen.save();
  pen.setLineDash([4, 4]);
  pen.strokeStyle = pen.fillStyle = css("--ink");
  pen.beginPath(); pen.moveTo(x0, y0); pen.lineTo(x1, y1); pen.stroke();
  pen.textAlign = "right";
  pen.fillText(text, x1 - 3, Math.min(y0, y1) - 4);
  pen.restore();
}

const colour = (trial) => data.colours[trial] ?? "#b0b0b0";

// Curves: [trial, [[epoch, value], ...]], the best trials last, so that they lie above the others.
figure("curves", 340, (pen, width, height) => {
  const box = { left: 62, right: width - 16, top: 28, bottom: height - 44 };
  const points = data.curves.flatMap(([trial, some]) => some.map(([epoch, value]) => [epoch, value, trial]));
  const values = points.map((point) => point[1]);
  const span = (some) => some.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)], [Infinity, -Infinity]);
  const at = axes(pen, box, span(points.map((p) => p[0])), span(values), ["epoch", data.metric]);
  for (const [trial, some] of data.curves) {
    pen.strokeStyle = pen.fillStyle = colour(trial);
    pen.lineWidth = data.best.includes(trial) ? 2.2 : 1;
    pen.beginPath();
    some.forEach(([epoch, value], k) => pen[k ? "lineTo" : "moveTo"](at.x(epoch), at.y(value)));
    pen.stroke();
    if (some.length === 1) pen.fillRect(at.x(some[0][0]) - 2, at.y(some[0][1]) - 2, 4, 4);
  }
  return (px, py) => {
    let found = null, near = 14;
    for (const [epoch, value, trial] of points) {
      const far = Math.hypot(at.x(epoch) - px, at.y(value) - py);
      if (far <= near) [found, near] = [[epoch, value, trial], far];
    }
    return found && `trial ${found[2]} (${data.states[found[2]]})\n${data.metric} ${short(found[1])} after epoch ${found[0]}\n${data.configs[found[2]]}`;
  };
});

// Bars: [worker, trial, kind, epoch, shard, begin, seconds, hop, visits], by worker in order of time.
const ROW = Math.max(9, Math.min(30, 480 / Math.max(1, data.workers.length)));
figure("timeline", data.workers.length * ROW + 78, (pen, width, height) => {
  const wide = width > 600, box = { left: wide ? 84 : 12, right: width - 16, top: 24, bottom: height - 44 };
  const at = axes(pen, box, [0, data.end], [0, 1], ["seconds since the run began", ""]);
  const kinds = ["trains", "is scored"];
  for (const [worker, trial, kind, , , begin, seconds, hop] of data.bars) {
    const top = box.top + worker * ROW, left = at.x(begin);
    pen.globalAlpha = kind ? 0.45 : 1;
    pen.fillStyle = colour(trial);
    pen.fillRect(left, top + 1, Math.max(0.6, at.x(begin + seconds) - left), ROW - 2);
    pen.globalAlpha = 1;
    if (hop) { pen.fillStyle = css("--ink"); pen.fillRect(left, top + 1, 1, ROW - 2); }
  }
  pen.fillStyle = css("--soft");
  pen.textAlign = "right";
  if (wide && ROW >= 11) data.workers.forEach((name, k) => pen.fillText(name, box.left - 8, box.top + (k + 0.5) * ROW + 4));
  dashed(pen, at.x(data.bound), box.top - 4, at.x(data.bound), box.bottom, "bound");
  return (px, py) => {
    const worker = Math.floor((py - box.top) / ROW);
    const now = ((px - box.left) / (box.right - box.left)) * data.end, slack = data.end / (box.right - box.left);
    const bar = data.bars.find((b) => b[0] === worker && b[5] - slack <= now && now <= b[5] + b[6] + slack);
    if (!bar) return worker >= 0 && worker < data.workers.length ? `${data.workers[worker]}: idle` : "";
    const [, trial, kind, epoch, shard, begin, seconds, hop, visits] = bar;
    const where = visits > 1 ? `${visits} visits` : `epoch ${epoch}, shard ${shard}`;
    return `trial ${trial} ${kinds[kind]}: ${where}\n${data.workers[worker]}, ${short(begin)} s to ${short(begin + seconds)} s` + (hop ? "\nits state came from another worker" : "");
  };
});

// Cost: [[seconds, worker-seconds], ...]
figure("cost", 260, (pen, width, height) => {
  const box = { left: 62, right: width - 16, top: 28, bottom: height - 44 };
  const [end, most] = data.cost[data.cost.length - 1];
  const limits = [Math.max(end, data.deadline ?? 0), Math.max(most, data.budget ?? 0) * 1.06];
  const at = axes(pen, box, [0, limits[0]], [0, limits[1]], ["seconds since the run began", "worker-seconds"]);
  if (data.budget) dashed(pen, box.left, at.y(data.budget), box.right, at.y(data.budget), "budget");
  if (data.deadline) dashed(pen, at.x(data.deadline), box.top, at.x(data.deadline), box.bottom, "deadline");
  pen.strokeStyle = css("--accent");
  pen.lineWidth = 2.5;
  pen.beginPath();
  data.cost.forEach(([seconds, cost], k) => pen[k ? "lineTo" : "moveTo"](at.x(seconds), at.y(cost)));
  pen.stroke();
  return (px) => {
    const now = ((px - box.left) / (box.right - box.left)) * limits[0];
    const point = data.cost.findLast(([seconds]) => seconds <= now);
    return point && now <= end ? `${short(point[1])} worker-seconds after ${short(point[0])} s` : "";
  };
});
