// The live view of a search: draws `data`, which dagsel/views/notebook.py makes, and sends commands.
// All text is set as text: nothing that comes from a study is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

function make(tag, options = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(options)) {
    if (name === "on") for (const [event, call] of Object.entries(value)) node.addEventListener(event, call);
    else if (name === "text") node.textContent = value;
    else if (value !== undefined && value !== null && value !== false) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function clock(seconds) {
  const whole = Math.floor(seconds), two = (n) => String(n).padStart(2, "0");
  const hours = Math.floor(whole / 3600), minutes = Math.floor(whole / 60) % 60;
  return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)}`;
}

const several = (n, what) => `${n.toLocaleString("en")} ${what}${n === 1 ? "" : "s"}`;

function bar(share) {
  const inner = make("i");
  inner.style.width = `${100 * Math.max(0, Math.min(1, share))}%`;
  return make("div", { class: "bar" }, inner);
}

function curve(svg, heights) {
  const key = heights.join();
  if (svg.dataset.key === key) return;
  svg.dataset.key = key;
  svg.replaceChildren();
  const step = heights.length > 1 ? 80 / (heights.length - 1) : 0;
  const points = heights
    .map((height, at) => [2 + at * step, height === null ? null : 16 - 0.14 * height])
    .filter(([, y]) => y !== null);
  if (!points.length) return;
  const line = document.createElementNS(SVG, "polyline");
  line.setAttribute("points", points.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" "));
  const end = document.createElementNS(SVG, "circle");
  const [x, y] = points[points.length - 1];
  for (const [name, value] of [["cx", x], ["cy", y], ["r", 2]]) end.setAttribute(name, value);
  svg.append(line, end);
}

class View {
  constructor(model, el) {
    this.model = model;
    this.steers = false; // whether the kernel hears commands
    this.waiting = new Map(); // by number of a command: what to do with its answer
    this.lines = new Map(); // rows of the table, by the trial's number
    this.n = 0;
    this.build(el);
    this.onData = () => this.draw(model.get("data"));
    this.onMessage = (message) => this.hear(message);
    model.on("change:data", this.onData);
    model.on("msg:custom", this.onMessage);
    this.draw(model.get("data"));
    // A kernel that is busy hears it when the front end has opened a way beside the cells.
    const hello = () => model.send({ do: "hello" });
    this.asking = setInterval(hello, 1000);
    hello();
  }

  close() {
    clearInterval(this.asking);
    this.model.off("change:data", this.onData);
    this.model.off("msg:custom", this.onMessage);
  }

  // ---- what it is made of

  build(el) {
    this.phase = make("span", { class: "phase starting", role: "status" });
    this.time = make("span", { class: "time" });
    this.link = make("a", { target: "_blank", rel: "noopener", text: "Dask's dashboard ↗", hidden: "" });
    this.addButton = make("button", { text: "add a trial", title: "Train parameters of your own",
      on: { click: () => this.askAdd() } });
    this.finishButton = make("button", { class: "danger", text: "finish",
      title: "End the search now, with the best so far", on: { click: () => this.askFinish() } });
    this.commands = make("span", { hidden: "" }, this.addButton, this.finishButton);
    const top = make("div", { class: "top" }, make("b", { text: "dagsel" }), this.phase, this.time,
      make("span", { class: "grow" }), this.link, this.commands);
    this.tiles = make("div", { class: "tiles", hidden: "" });
    this.form = make("div");
    this.metric = make("th", { class: "num" });
    this.acts = make("th", { hidden: "", "aria-label": "commands" });
    const names = make("tr", {}, make("th", { class: "num", text: "trial" }), make("th", { text: "state" }),
      make("th", { text: "epochs" }), this.metric, make("th", { text: "curve" }),
      make("th", { text: "configuration" }), this.acts);
    this.body = make("tbody");
    this.table = make("div", { class: "scroll", hidden: "" }, make("table", {}, make("thead", {}, names), this.body));
    this.more = make("div", { class: "rest", hidden: "" });
    this.workerBody = make("tbody");
    const head = make("tr", {}, make("th", { text: "worker" }), make("th", { text: "does" }),
      make("th", { class: "num", text: "shards" }), make("th", { class: "num", text: "memory" }), make("th"));
    this.workers = make("div", { class: "scroll few", hidden: "" },
      make("table", {}, make("thead", {}, head), this.workerBody));
    this.moreWorkers = make("div", { class: "rest", hidden: "" });
    this.said = make("div", { class: "said", role: "status", "aria-live": "polite" });
    this.root = make("div", { class: "dagsel" }, top, this.tiles, this.form, this.said, this.table, this.more,
      this.workers, this.moreWorkers);
    el.append(this.root);
  }

  draw(data) {
    if (!data || !data.phase) return;
    this.data = data;
    this.phase.className = `phase ${data.phase}`;
    setText(this.phase, data.phase === "starting" ? data.said : data.phase);
    if (data.phase === "starting") return;
    setText(this.time, clock(data.seconds));
    this.link.hidden = !/^https?:\/\//.test(data.dashboard);
    if (!this.link.hidden) this.link.href = data.dashboard;
    this.commands.hidden = !this.steers;
    this.addButton.hidden = !Object.keys(data.add).length;
    this.drawTiles(data);
    this.drawTrials(data);
    this.drawWorkers(data);
  }

  drawTiles(data) {
    const [done, decided] = data.epochs, [ended, drawn, total] = data.trials;
    const tile = (name, big, small, ...rest) => make("div", { class: "tile" }, make("h4", { text: name }),
      make("div", { class: "big", text: big }, make("small", { text: small })), ...rest);
    const note = (text) => make("div", { class: "note", text });
    const tiles = [];
    if (data.best) {
      const [number, value, after, config] = data.best;
      tiles.push(tile(`best ${data.metric}`, value, ` trial ${number} after ${several(after, "epoch")}`, note(config)));
    } else if (data.front !== null) {
      tiles.push(tile("Pareto front", String(data.front), data.front === 1 ? " trial" : " trials"));
    }
    tiles[0]?.classList.add("wide");
    tiles.push(tile("epochs", String(done), ` of ${decided} decided`, bar(decided ? done / decided : 0),
      note(data.left ? `${data.left} left for these` : "")));
    const counts = make("div", { class: "counts" },
      ...data.counts.map(([state, n]) => make("span", { class: `state ${state}`, text: `${n} ${state}` })));
    tiles.push(total === null
      ? tile("trials", String(drawn), ` ${ended} ended`, counts)
      : tile("trials", String(ended), ` of ${total} ended`, bar(total ? ended / total : 0), counts));
    for (const [name, used, limit, left, share] of data.gauges) {
      const rest = share === null ? [] : [bar(share), note(`${left} left`)];
      if (share > 0.9) rest[0].classList.add("high");
      tiles.push(tile(name, used, limit && ` of ${limit}`, ...rest));
    }
    tiles.push(tile("workers", String(data.n_workers), ` ${data.rate} units/s`));
    this.tiles.replaceChildren(...tiles);
    this.tiles.hidden = false;
  }

  // ---- trials

  drawTrials(data) {
    setText(this.metric, data.metric);
    this.acts.hidden = !this.steers;
    const keys = data.rows.map((row) => row[0]);
    for (const [number, line] of this.lines) {
      if (!keys.includes(number)) {
        line.node.remove();
        this.lines.delete(number);
      }
    }
    for (const row of data.rows) {
      if (!this.lines.has(row[0])) this.lines.set(row[0], this.line(row[0]));
      this.fill(this.lines.get(row[0]), row);
    }
    // Rows keep their places under a pointer that may be about to click.
    const still = this.body.matches(":hover") || this.body.contains(document.activeElement);
    keys.forEach((number, at) => {
      const { node } = this.lines.get(number);
      if (node.parentNode && still) return;
      if (this.body.children[at] !== node) this.body.insertBefore(node, this.body.children[at] ?? null);
    });
    this.table.hidden = !keys.length;
    this.more.hidden = !data.more;
    setText(this.more, `and ${several(data.more, "more trial")}`);
  }

  line(number) {
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", "0 0 84 18");
    svg.setAttribute("aria-hidden", "true");
    const fill = make("i");
    const parts = {
      state: make("span", { class: "state" }), epochs: make("span"), fill,
      bar: make("span", { class: "bar" }, fill), value: make("td", { class: "num value" }), svg,
      config: make("span"), why: make("span", { class: "why" }),
    };
    const button = (what, call) => (parts[what] = make("button", { text: what,
      "aria-label": `${what} trial ${number}`, class: what === "stop" ? "danger" : null,
      on: { click: call ?? (() => this.send({ do: what, trial: number }, parts[what])) } }));
    parts.buttons = make("td", { class: "buttons" }, button("pause"), button("resume"),
      button("clone", () => this.askClone(number)), button("stop"));
    parts.node = make("tr", { "data-trial": number }, make("td", { class: "num", text: String(number) }),
      make("td", {}, parts.state), make("td", { class: "epochs" }, parts.epochs, parts.bar), parts.value,
      make("td", {}, svg), make("td", { class: "config" }, parts.config, parts.why), parts.buttons);
    return parts;
  }

  fill(parts, row) {
    const [number, state, done, decided, progress, value, heights, config, why, byUser] = row;
    const lives = state === "training" || state === "paused";
    const isBest = this.data.best && this.data.best[0] === number;
    const name = `${lives ? "" : "over"} ${isBest ? "best" : ""}`.trim();
    if (parts.node.className !== name) parts.node.className = name;
    if (parts.state.className !== `state ${state}`) parts.state.className = `state ${state}`;
    setText(parts.state, state);
    setText(parts.epochs, decided > done ? `${done}/${decided}` : String(done));
    parts.bar.hidden = !lives || decided <= 0;
    parts.fill.style.width = `${decided ? (100 * progress) / decided : 0}%`;
    setText(parts.value, value);
    curve(parts.svg, heights);
    setText(parts.config, config);
    setText(parts.why, why ? ` ${why}` : "");
    parts.buttons.hidden = !this.steers;
    for (const what of ["pause", "resume", "clone", "stop"]) parts[what].hidden = !lives;
    parts.pause.hidden ||= byUser;
    parts.resume.hidden ||= !byUser;
    parts.clone.disabled = !done;
    parts.clone.title = done ? "Train a copy with other parameters" : "It can be cloned after its first epoch";
  }

  // ---- workers

  drawWorkers(data) {
    this.workers.hidden = !data.workers.length;
    const rows = data.workers.map(([name, does, busy, held, memory, share]) => {
      const gauge = share === null ? "" : bar(share);
      if (share > 0.8) gauge.classList.add("high");
      return make("tr", { class: busy ? null : "over" }, make("td", { text: name }), make("td", { text: does }),
        make("td", { class: "num", text: String(held) }), make("td", { class: "num", text: memory }),
        make("td", { class: "gauge" }, gauge));
    });
    this.workerBody.replaceChildren(...rows);
    this.moreWorkers.hidden = !data.more_workers;
    setText(this.moreWorkers, `and ${several(data.more_workers, "more worker")}`);
  }

  // ---- commands

  send(command, button, whenDone) {
    const id = ++this.n;
    if (button) button.disabled = true;
    this.say("");
    this.waiting.set(id, (answer) => {
      if (button) button.disabled = false;
      this.say(answer.said, !answer.ok);
      if (answer.ok && whenDone) whenDone();
    });
    this.model.send({ id, ...command });
  }

  hear(message) {
    if (message.said === "hello") {
      clearInterval(this.asking);
      this.steers = message.steers;
      this.draw(this.model.get("data"));
      return;
    }
    const answer = this.waiting.get(message.id);
    this.waiting.delete(message.id);
    if (answer) answer(message);
  }

  say(text, isBad = false) {
    this.said.classList.toggle("bad", isBad);
    setText(this.said, text);
  }

  askClone(number) {
    const row = this.data.rows.find((one) => one[0] === number);
    if (row) this.ask(`a copy of trial ${number} with`, "clone", row[10], (params, before) => {
      const changed = Object.entries(params).filter(([name, text]) => text !== before[name]);
      return { do: "clone", trial: number, params: Object.fromEntries(changed) };
    });
  }

  askAdd() {
    this.ask("a trial with", "add", this.data.add, (params) => {
      const given = Object.entries(params).filter(([, text]) => text.trim());
      return { do: "add", params: Object.fromEntries(given) };
    });
  }

  askFinish() {
    this.ask("end the search now, with the best so far?", "finish", {}, () => ({ do: "finish" }));
  }

  ask(what, verb, params, command) {
    const inputs = Object.entries(params).map(([name, text]) => {
      const input = make("input", { name, value: text, spellcheck: "false", autocomplete: "off" });
      input.addEventListener("keydown", (event) => event.stopPropagation()); // the notebook has shortcuts
      return [name, input];
    });
    const submit = make("button", { type: "submit", text: verb });
    const form = make("form", { "aria-label": what }, make("span", { class: "what", text: what }),
      ...inputs.map(([name, input]) => make("label", { text: name }, input)), make("span", {}, submit,
        make("button", { type: "button", text: "leave it", on: { click: () => this.form.replaceChildren() } })));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const given = Object.fromEntries(inputs.map(([name, input]) => [name, input.value]));
      this.send(command(given, params), submit, () => form.remove());
    });
    this.say("");
    this.form.replaceChildren(form);
    (inputs[0]?.[1] ?? submit).focus();
  }
}

function render({ model, el }) {
  const view = new View(model, el);
  return () => view.close();
}

export default { render };
