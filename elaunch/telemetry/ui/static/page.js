"use strict";
// Draws /job.json, and asks for it again while the page is seen. Texts of events become text nodes, nothing else.

const EVERY_MS = 1000;
const PHASES = ["detect", "connect", "agree", "plan", "transfer", "resume"];
const PALETTE = ["#7ab5f5", "#f5b25c", "#84cf8a", "#e58fb5", "#b9a2ee", "#e5d35c", "#6fd0cf", "#f0917e", "#b8c27a", "#c9a98c"];
const byId = (id) => document.getElementById(id);

let job = null;            // the newest document
let chosen = null;         // number of the change that is shown
let follows = true;        // each new change is shown
let worker = null;         // slot of the worker that is pointed out
const plans = new Map();   // by number: what /plan/N.json said, or a promise of it
const drawn = new Map();   // by section: what it was drawn from
const colours = new Map(); // by slot

// -- small things ----------------------------------------------------------------------------------------------------

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== ""));
  return element;
}

function shape(tag, attributes = {}, text = null) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== null) element.textContent = text;
  return element;
}

function fill(id, ...children) { byId(id).replaceChildren(...children); }

// Draws a section if what it is drawn from has changed.
function section(name, from, draw) {
  const text = JSON.stringify(from);
  if (drawn.get(name) === text) return;
  drawn.set(name, text);
  draw();
}

function empty(text) { return make("p", { class: "empty" }, text); }

function took(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.9995) return `${figure(seconds * 1e3)} ms`;
  return seconds < 120 ? `${figure(seconds)} s` : ago(seconds);
}

function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size === 0 ? "0" : size < 0.001 ? value.toExponential(2) : String(Number(value.toPrecision(3)));
}

function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "kB", "MB", "GB", "TB"];
  let place = 0;
  while (value >= 1000 && place < units.length - 1) { value /= 1000; place += 1; }
  return `${figure(value)} ${units[place]}`;
}

function ago(seconds) {
  if (seconds < 9.95) return `${Math.max(0, seconds).toFixed(1)} s`;
  if (seconds < 120) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  return minutes < 2880 ? `${Math.floor(minutes / 60)} h ${minutes % 60} min` : `${Math.round(minutes / 1440)} days`;
}

function clock(t) {
  const date = new Date(t * 1000), time = date.toLocaleTimeString("en-GB");
  const isLong = job.end_t - job.begin_t > 72000;
  return isLong ? `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}` : time;
}

const plural = (n, noun) => `${n.toLocaleString("en")} ${noun}${n === 1 ? "" : "s"}`;
const slotOf = (name) => name.split("#")[0];

function colour(slot) {
  if (!colours.has(slot)) {
    const number = colours.size;
    // The golden angle keeps neighbours apart however many there are.
    const hue = (number * 137.508) % 360;
    colours.set(slot, number < PALETTE.length ? PALETTE[number] : `hsl(${hue.toFixed(0)} 62% ${66 + (number % 3) * 6}%)`);
  }
  return colours.get(slot);
}

// -- the head --------------------------------------------------------------------------------------------------------

function drawHead() {
  const isOver = job.state.startsWith("over") || job.state.startsWith("ended");
  byId("job").textContent = job.job || "elaunch";
  document.title = `${job.job || "job"} ${job.state ? `· ${job.state} ` : ""}· elaunch`;
  const state = byId("state");
  state.textContent = job.state;
  state.className = `pill ${/fail/.test(job.state) ? "bad" : isOver ? "calm" : ""}`;
  const since = !isOver && job.step_t !== null ? `${ago(Date.now() / 1000 - job.step_t)} ago` : "";
  const figures = [
    ["members", job.members.toLocaleString("en")],
    ["nodes", job.nodes.filter((one) => one.node).length.toLocaleString("en")],
    ["generation", job.generation.toLocaleString("en")],
    ["last step", job.step === null ? "–" : job.step.toLocaleString("en"), since],
    ["steps/s", figure(job.steps_per_s)],
    ["samples/s", figure(job.samples_per_s)],
    ["loss", job.loss === null ? "–" : Math.abs(job.loss) < 0.001 ? figure(job.loss) : String(Number(job.loss.toPrecision(5)))],
    ...(job.copy_lag === null || job.copy_lag === undefined ? [] : [["copies behind", plural(job.copy_lag, "step")]]),
    ["recoveries", job.recoveries.toLocaleString("en")],
  ];
  fill("figures", ...figures.map(([name, value, more]) =>
    make("div", {}, make("dt", {}, name, more ? ` ${more}` : ""), make("dd", { title: value }, value))));
  const from = { logs: "from event logs", agent: "from the events of one agent, which knows steps, decisions and recoveries of the time in which it had the first member", status: `from the documents of the running job at ${job.endpoint}` };
  const parts = [`${plural(job.events, job.source === "status" ? "change" : "event")} ${from[job.source] || ""}`];
  if (job.begin_t !== null) parts.push(`${new Date(job.begin_t * 1000).toLocaleString("en-GB")} to ${clock(job.end_t)}`);
  if (job.unreadable) parts.push(`${job.unreadable} could not be read`);
  if (job.left_off.changes) parts.push(`the first ${plural(job.left_off.changes, "change")} are no longer kept`);
  byId("foot").textContent = `${parts.join("; ")}. elaunch ${job.elaunch}`;
}

// -- members ---------------------------------------------------------------------------------------------------------

const STATES = { member: "member", starting: "starting or ready", spare: "spare", left: "left", done: "done", failed: "failed" };

function drawMembers() {
  if (!job.slots.length) {
    fill("members", empty(job.events ? "No workers have been named yet: they are once an agent has met the others." :
      "No events yet. The log is empty, or the job has not begun."));
    return;
  }
  const nodes = new Map(job.nodes.filter((one) => one.node).map((one) => [one.node, { remark: one.remark, slots: [] }]));
  for (const one of job.slots) {
    if (!nodes.has(one.node)) nodes.set(one.node, { remark: "", slots: [] });
    nodes.get(one.node).slots.push(one);
  }
  for (const one of job.slots) colour(one.slot);
  const had = document.activeElement?.dataset?.slot;
  const rows = [...nodes].map(([node, of]) => make("div", { class: "node" },
    make("span", { class: `name${of.remark ? " warn" : ""}`, title: of.remark ? `${node}: ${of.remark}` : node }, of.remark ? `${node} !` : node),
    make("span", { class: "cells" }, ...of.slots.map(drawCell))));
  const grid = make("div", { class: nodes.size > 8 ? "many" : "", role: "group", "aria-label": "Workers; arrows go from one to the next" }, ...rows);
  grid.addEventListener("keydown", walkCells);
  const counts = Object.entries(STATES).map(([state, words]) => [words, job.slots.filter((one) => one.state === state).length]);
  const legend = counts.filter(([, n]) => n).map(([words, n]) => make("li", {}, `${n.toLocaleString("en")} ${words}`));
  const remarked = job.slots.filter((one) => one.remarks.length).length;
  if (remarked) legend.push(make("li", { class: "warn" }, `${remarked} with remarks (!)`));
  const remarks = [...nodes].filter(([, of]) => of.remark).map(([node, of]) => make("p", { class: "warn" }, `${node}: ${of.remark}`));
  fill("members", grid, make("ul", { class: "legend" }, ...legend), ...remarks);
  chooseWorker(worker);
  const cells = [...grid.querySelectorAll(".cell")];
  const focused = cells.find((cell) => cell.dataset.slot === had);
  if (cells.length) (focused || cells[0]).tabIndex = 0;
  focused?.focus();
  byId("table-of-members").lastElementChild.replaceChildren(byId("table-of-members").open ? memberTable() : "");
}

function drawCell(one) {
  const label = `${one.worker}, ${one.rank === null ? STATES[one.state] || one.state : `rank ${one.rank}`}${one.remarks.map((text) => `; ${text}`).join("")}`;
  const cell = make("button", {
    class: `cell ${one.state}${one.remarks.length ? " remarked" : ""}`, "data-slot": one.slot, tabindex: -1, title: label, "aria-label": label,
    onclick: () => chooseWorker(worker === one.slot ? null : one.slot), onfocus: () => describeWorker(one.slot),
  }, one.slot.split("/").pop());
  cell.style.setProperty("--own", colour(one.slot));
  return cell;
}

function walkCells(event) {
  const cells = [...byId("members").querySelectorAll(".cell")];
  const place = cells.indexOf(document.activeElement);
  const steps = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
  if (place < 0 || !(event.key in steps)) return;
  event.preventDefault();
  event.stopPropagation();
  const next = cells[Math.min(cells.length - 1, Math.max(0, place + steps[event.key]))];
  cells[place].tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function describeWorker(slot) {
  const one = job.slots.find((other) => other.slot === slot);
  if (!one) { byId("member").textContent = ""; return; }
  const parts = [one.worker, one.rank === null ? STATES[one.state] || one.state : `member with rank ${one.rank}`];
  if (one.end) parts.push(`ended by ${/^\d+$/.test(one.end) ? `exit code ${one.end}` : one.end}${one.ended_t ? ` at ${clock(one.ended_t)}` : ""}`);
  if (one.pid) parts.push(`process ${one.pid}`);
  if (one.since_t) parts.push(`since ${clock(one.since_t)}`);
  if (one.restarts) parts.push(`replaced ${one.restarts === 1 ? "once" : `${one.restarts} times`}`);
  byId("member").textContent = [...parts, ...one.remarks].join(", ");
}

function chooseWorker(slot) {
  worker = slot;
  for (const cell of document.querySelectorAll(".cell")) {
    cell.classList.toggle("chosen", cell.dataset.slot === slot);
    cell.setAttribute("aria-pressed", cell.dataset.slot === slot);
  }
  describeWorker(slot);
  for (const svg of document.querySelectorAll("#plans svg")) {
    svg.classList.toggle("faint", slot !== null);
    for (const tile of svg.querySelectorAll(".tile")) tile.classList.toggle("chosen", slot !== null && tile.slots.includes(slot));
  }
}

function memberTable() {
  const head = ["rank", "worker", "state", "process", "since", "replaced", "remarks"];
  return make("div", { class: "scroll", tabindex: 0 }, make("table", {},
    make("thead", {}, make("tr", {}, ...head.map((name) => make("th", { scope: "col" }, name)))),
    make("tbody", {}, ...job.slots.map((one) => make("tr", {},
      make("td", {}, one.rank === null ? "" : String(one.rank)), make("td", { class: "name" }, one.worker),
      make("td", { class: one.state === "failed" ? "bad" : "" }, one.state + (one.end ? `: ${one.end}` : "")),
      make("td", {}, one.pid ? String(one.pid) : ""), make("td", {}, one.since_t ? clock(one.since_t) : ""),
      make("td", {}, one.restarts ? String(one.restarts) : ""), make("td", { class: "warn" }, one.remarks.join("; ")))))));
}

// -- step time and loss ----------------------------------------------------------------------------------------------

const [T, MEAN, MOST, LOSS] = [2, 3, 4, 5];

function drawCurves() {
  const points = job.steps.points;
  if (!points.length) {
    fill("curves", empty("No step has committed yet, or its line is in the log of another node. Scripts that never import elaunch have no steps."));
    return;
  }
  const width = Math.max(260, (byId("curves").clientWidth - (window.innerWidth > 900 ? 14 : 0)) / (window.innerWidth > 900 ? 2 : 1));
  const one = job.steps.per_point > 1 ? `; each point is the mean of ${job.steps.per_point} steps, the band goes to the slowest` : "";
  const figures = [drawCurve("Step time", points, MEAN, took, width, `${plural(job.steps.count, "step")}${one}`)];
  if (points.some((point) => point[LOSS] !== null)) {
    figures.push(drawCurve("Loss", points, LOSS, figure, width, "the mean of what was given to job.report"));
  } else figures.push(make("figure", {}, make("figcaption", {}, "Loss"), empty("No loss: the script reports none with job.report(loss=…).")));
  fill("curves", ...figures);
}

function drawCurve(name, points, field, unit, width, note) {
  const height = 190, left = 58, right = 10, top = 10, bottom = 22;
  const known = points.filter((point) => point[field] !== null);
  const sorted = known.map((point) => point[field]).sort((a, b) => a - b);
  const high = sorted[Math.floor((sorted.length - 1) * 0.95)];
  const isTime = field === MEAN;
  let least = isTime ? 0 : sorted[0];
  let most = isTime ? Math.min(Math.max(...known.map((point) => point[MOST])), 2.5 * high || 1) : sorted[sorted.length - 1];
  if (most <= least) { most = least + Math.abs(least) * 0.1 + 1e-9; }
  const begin = points[0][T], end = Math.max(points[points.length - 1][T], begin + 1e-3);
  const x = (t) => left + (width - left - right) * (t - begin) / (end - begin);
  const y = (value) => top + (height - top - bottom) * (1 - (Math.min(value, most) - least) / (most - least));
  const svg = shape("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", class: job.changes.length > 40 ? "many-marks" : "",
    "aria-label": `${name}: from ${unit(known[0][field])} to ${unit(known[known.length - 1][field])}, least ${unit(sorted[0])}, most ${unit(sorted[sorted.length - 1])}` });
  for (const tick of ticks(least, most, 4)) {
    svg.append(shape("line", { class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick) }));
    svg.append(shape("text", { x: left - 6, y: y(tick) + 4, "text-anchor": "end" }, unit(tick)));
  }
  const hours = Math.max(2, Math.floor((width - left) / 130));
  for (let place = 0; place <= hours; place += 1) {
    const t = begin + (end - begin) * place / hours;
    svg.append(shape("text", { x: x(t), y: height - 6, "text-anchor": place === 0 ? "start" : place === hours ? "end" : "middle" }, clock(t)));
  }
  for (const change of job.changes) {
    if (change.t < begin || change.t > end || !change.recovery) continue;
    const mark = shape("line", { class: `mark ${change.recovery.interrupted ? "repair" : ""}`, x1: x(change.t), x2: x(change.t), y1: top, y2: height - bottom });
    mark.change = change.number;
    mark.append(shape("title", {}, `${clock(change.t)} ${change.cause}`));
    mark.addEventListener("click", () => choose(change.number, false));
    svg.append(mark);
  }
  const path = (value) => known.map((point, place) => `${place ? "L" : "M"}${x(point[T]).toFixed(1)} ${y(value(point)).toFixed(1)}`).join("");
  if (isTime && job.steps.per_point > 1) {
    const back = [...known].reverse().map((point) => `L${x(point[T]).toFixed(1)} ${y(point[MEAN]).toFixed(1)}`).join("");
    svg.append(shape("path", { class: "band", d: `${path((point) => point[MOST])}${back}Z` }));
  }
  svg.append(shape("path", { class: "curve", d: path((point) => point[field]) }));
  for (const point of isTime ? known : []) {
    if (point[MOST] > most) svg.append(shape("path", { class: "beyond", d: `M${(x(point[T]) - 4).toFixed(1)} ${top + 6}l4 -6l4 6Z` }));
  }
  const cursor = shape("line", { class: "cursor", y1: top, y2: height - bottom, visibility: "hidden" });
  svg.append(cursor);
  const title = `${name}: ${note}`;
  const caption = make("figcaption", {}, title);
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const t = begin + (end - begin) * ((event.clientX - box.left) * width / box.width - left) / (width - left - right);
    const point = nearest(known, t);
    cursor.setAttribute("x1", x(point[T]));
    cursor.setAttribute("x2", x(point[T]));
    cursor.setAttribute("visibility", "visible");
    const steps = point[0] === point[1] ? `step ${point[0]}` : `steps ${point[0]} to ${point[1]}`;
    caption.textContent = `${name}: ${steps} at ${clock(point[T])}: ${unit(point[field])}, ${plural(point[6], "member")}`;
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); caption.textContent = title; });
  return make("figure", {}, caption, svg);
}

function nearest(points, t) {
  let low = 0, high = points.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle][T] < t) low = middle + 1; else high = middle;
  }
  return low > 0 && t - points[low - 1][T] < points[low][T] - t ? points[low - 1] : points[low];
}

function ticks(least, most, about) {
  const raw = (most - least) / about;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((times) => times * power).find((one) => one >= raw);
  const found = [];
  for (let tick = Math.ceil(least / step) * step; tick <= most + step * 1e-6; tick += step) found.push(Math.abs(tick) < step * 1e-6 ? 0 : tick);
  return found;
}

// -- changes ---------------------------------------------------------------------------------------------------------

function place() { return job.changes.findIndex((one) => one.number === chosen); }

function choose(number, keepsUp) {
  chosen = number;
  follows = keepsUp;
  drawChanges();
}

function step(by) {
  const next = job.changes[Math.min(job.changes.length - 1, Math.max(0, place() + by))];
  if (next) choose(next.number, next === job.changes[job.changes.length - 1]);
}

function drawChanges() {
  const changes = job.changes;
  byId("of-changes").hidden = !changes.length;
  fill("no-changes", ...(changes.length ? [] : [empty("No generation has begun yet: a change is a new list of members or another plan.")]));
  if (!changes.length) return;
  if (follows || place() < 0) chosen = changes[changes.length - 1].number;
  const change = changes[place()];
  const slider = byId("slider");
  slider.max = changes.length - 1;
  slider.value = place();
  slider.setAttribute("aria-valuetext", `${place() + 1} of ${changes.length}: ${change.cause}`);
  byId("former").disabled = place() === 0;
  byId("later").disabled = place() === changes.length - 1;
  byId("newest").setAttribute("aria-pressed", follows);
  section("list", changes, () => fill("list", ...changes.map((one) => make("li", {
    role: "option", id: `change-${one.number}`, class: !one.recovery ? "" : one.recovery.interrupted ? "repair" : "planned",
    onclick: () => choose(one.number, one === job.changes[job.changes.length - 1]),
  }, make("span", { class: "dim" }, `${clock(one.t)} · generation ${one.generation}${one.recovery ? ` · ${took(one.recovery.total_s)}` : ""}`),
    make("br"), one.cause || "another plan"))));
  for (const item of byId("list").children) item.setAttribute("aria-selected", item.id === `change-${chosen}`);
  byId("list").setAttribute("aria-activedescendant", `change-${chosen}`);
  const item = byId(`change-${chosen}`), list = byId("list");
  if (item.offsetTop < list.scrollTop + list.offsetTop || item.offsetTop + item.offsetHeight > list.scrollTop + list.offsetTop + list.clientHeight) {
    list.scrollTop = item.offsetTop - list.offsetTop - list.clientHeight / 2;
  }
  section("change", [change, window.innerWidth, job.nodes.length > 1], () => drawChange(change));
  for (const mark of document.querySelectorAll(".mark")) mark.classList.toggle("chosen", mark.change === chosen);
  for (const row of document.querySelectorAll("#recoveries .row")) row.classList.toggle("chosen", row.dataset.change === String(chosen));
}

function drawChange(change) {
  byId("change-title").textContent = change.cause || "another plan";
  const facts = [`generation ${change.generation} at ${clock(change.t)}`];
  if (change.members) facts.push(plural(change.members, change.stage === "train" ? "member" : "worker"));
  if (change.stage && change.stage !== "train") facts.push(change.stage === "start" ? "workers start" : "all workers end and the nodes meet again");
  if (change.recovery) {
    facts.push(change.recovery.interrupted ? "interrupted a step" : "no step was interrupted");
    if (change.recovery.bytes_moved) {
      facts.push(`${bytes(change.recovery.bytes_moved)} of state moved${change.recovery.moved_over ? ` over ${change.recovery.moved_over}` : ""}`);
    }
  }
  byId("change-facts").textContent = facts.join(", ");
  if (change.recovery) {
    fill("phases", make("h3", {}, `${took(change.recovery.total_s)} from the cause to the next commit`), bar(change.recovery, 1), phaseLegend(change.recovery.phases));
  } else {
    fill("phases", empty(change.stage === "train" || !change.stage ?
      "No transition is known yet: its phases are written with the next commit, by the agent of the first member." : "Nobody trains in this generation."));
  }
  drawDecision(change);
  drawPlans(change);
}

function bar(recovery, part) {
  const spans = PHASES.filter((phase) => recovery.phases[phase]).map((phase) => {
    const span = make("span", { class: phase, title: `${phase} ${took(recovery.phases[phase])}` });
    span.style.flexGrow = recovery.phases[phase] / recovery.total_s * 1000; // below 1 in all they would leave room
    return span;
  });
  const line = make("div", { class: "bar", role: "img", "aria-label": PHASES.filter((phase) => recovery.phases[phase])
    .map((phase) => `${phase} ${took(recovery.phases[phase])}`).join(", ") }, ...spans);
  line.style.width = `${Math.max(0.5, part * 100).toFixed(2)}%`;
  return line;
}

function phaseLegend(phases) {
  return make("ul", { class: "legend" }, ...PHASES.filter((phase) => !phases || phases[phase]).map((phase) =>
    make("li", {}, make("span", { class: `key ${phase}` }), phases ? `${phase} ${took(phases[phase])}` : phase)));
}

function drawDecision(change) {
  if (!change.decision) {
    fill("decision", empty(job.source === "status" ?
      "The documents of a running job hold no decisions: start the agents with --events, and give elaunch ui the logs." :
      "No decision in this generation: the work is shared as before, or the log of the first member's node is missing."));
    return;
  }
  const { policy, reason, candidates } = change.decision;
  const words = { given: "the script gave the plan", asked: "elaunch ctl plan asked for it" };
  const parts = [make("p", {}, make("strong", {}, policy), reason ? `: ${reason}` : words[policy] ? `: ${words[policy]}` : "")];
  if (candidates.length) {
    const head = ["policy", "samples/s", "step", "transition", "waiting", "moves", "peak memory", "why not"];
    parts.push(make("div", { class: "scroll", tabindex: 0 }, make("table", {},
      make("thead", {}, make("tr", {}, ...head.map((name, at) => make("th", { scope: "col", class: at && at < 7 ? "n" : "" }, name)))),
      make("tbody", {}, ...candidates.map((one) => make("tr", { class: one.policy === policy ? "chosen" : "" },
        make("td", { class: "name" }, one.policy === policy ? `${one.policy} ✓` : one.policy), make("td", { class: "n" }, figure(one.score)),
        make("td", { class: "n" }, took(one.step_s)), make("td", { class: "n" }, took(one.transition_s)),
        make("td", { class: "n" }, one.bubble === null ? "–" : `${figure(one.bubble * 100)} %`), make("td", { class: "n" }, bytes(one.moved_bytes)),
        make("td", { class: "n" }, bytes(one.peak_bytes)), make("td", { class: one.rejected ? "no text" : "no" }, one.rejected)))))));
  } else parts.push(make("p", { class: "dim" }, "There were no candidates to choose among."));
  fill("decision", ...parts);
}

// -- plans -----------------------------------------------------------------------------------------------------------

async function planOf(number) {
  if (!plans.has(number)) {
    const asked = fetch(`plan/${number}.json`).then((reply) => (reply.ok ? reply.json() : null)).catch(() => null);
    plans.set(number, asked);
    if (plans.size > 40) plans.delete(plans.keys().next().value);
    if (!await asked) plans.delete(number); // it is asked for again
    return asked;
  }
  return plans.get(number);
}

async function drawPlans(change) {
  const current = change.plan ?? change.plan_before;
  if (current === null) {
    fill("plans", empty(job.source === "status" ?
      "The documents of a running job hold no plan: start the agents with --events, and give elaunch ui the logs, or use --ui-port." :
      "No plan is known. The first member's agent writes one when training begins; scripts that never import elaunch have none."));
    return;
  }
  const hasBefore = change.plan !== null && change.plan_before !== null;
  const [before, after] = await Promise.all([hasBefore ? planOf(change.plan_before) : null, planOf(current)]);
  if (change.number !== chosen) return; // another one has been chosen meanwhile
  const figures = [];
  const room = Math.max(240, byId("plans").clientWidth), width = hasBefore && room >= 574 ? (room - 14) / 2 : room;
  if (hasBefore) figures.push(drawPlan("before", before, width));
  figures.push(drawPlan(hasBefore ? "after" : change.plan === null ? "as before" : "first plan", after, width));
  fill("plans", ...figures);
  chooseWorker(worker);
}

function drawPlan(name, plan, width) {
  if (!plan || plan.problem) return make("figure", {}, make("figcaption", {}, name), empty(plan ? `This plan cannot be read: ${plan.problem}` : "This plan is no longer kept."));
  const left = 34, top = 18, right = 6, bottom = 4;
  const high = Math.min(300, Math.max(90, plan.layers * 26));
  const x = (sample) => left + (width - left - right) * sample / plan.samples;
  const y = (layer) => top + high * layer / plan.layers;
  const svg = shape("svg", { viewBox: `0 0 ${width} ${top + high + bottom}`, role: "img",
    "aria-label": `Plan ${name}: ${plural(plan.layers, "layer")} by ${plural(plan.samples, "sample")}, ${plural(plan.workers.length, "worker")}` });
  for (const tick of whole(plan.layers, Math.min(12, Math.floor(high / 18)))) svg.append(shape("text", { x: left - 5, y: y(tick) + 4, "text-anchor": "end" }, tick));
  for (const tick of whole(plan.samples, Math.floor(width / 60))) svg.append(shape("text", { x: x(tick), y: top - 5, "text-anchor": tick === plan.samples ? "end" : "middle" }, tick));
  const isFine = plan.rectangles.length > 800;
  const labels = [];
  for (const [l0, l1, s0, s1, workers, what] of plan.rectangles) {
    const slots = workers.map((number) => slotOf(plan.workers[number]));
    const box = { x: x(s0).toFixed(2), y: y(l0).toFixed(2), width: Math.max(0, x(s1) - x(s0)).toFixed(2), height: Math.max(0, y(l1) - y(l0)).toFixed(2) };
    const tile = shape("rect", { ...box, class: `tile${isFine ? " whole" : ""}${slots.length ? "" : " wrong"}` });
    tile.slots = slots;
    if (slots.length) tile.style.fill = colour(slots[0]);
    tile.append(shape("title", {}, what));
    svg.append(tile);
    const label = slots.map((slot) => (job.nodes.length > 1 ? slot : slot.split("/").pop())).join(",");
    const previous = labels[labels.length - 1];
    if (previous && previous.slots === slots.join() && previous.l0 === l0 && previous.l1 === l1 && previous.s1 === s0) previous.s1 = s1;
    else labels.push({ slots: slots.join(), label, l0, l1, s0, s1 });
  }
  for (const one of labels) {
    if (one.label && x(one.s1) - x(one.s0) > one.label.length * 7 + 6 && y(one.l1) - y(one.l0) > 14) {
      svg.append(shape("text", { class: "label", x: (x(one.s0) + x(one.s1)) / 2, y: (y(one.l0) + y(one.l1)) / 2 }, one.label));
    }
  }
  svg.append(shape("rect", { class: "frame", x: left, y: top, width: width - left - right, height: high }));
  svg.addEventListener("click", (event) => {
    const slot = event.target.slots?.[0] ?? null;
    chooseWorker(slot === worker ? null : slot);
  });
  const idle = plan.idle.length ? `; idle: ${plan.idle.slice(0, 8).join(", ")}${plan.idle.length > 8 ? ` and ${plan.idle.length - 8} more` : ""}` : "";
  return make("figure", {}, make("figcaption", {}, make("strong", {}, name),
    `: ${plural(plan.layers, "layer")} (down) × ${plural(plan.samples, "sample")} (across), micro-batches of ${plan.micro_batch}, ${plural(plan.workers.length - plan.idle.length, "worker")}${idle}`), svg);
}

function whole(most, about) {
  const step = Math.max(1, Math.ceil(most / Math.max(1, about)));
  const found = [];
  for (let tick = 0; tick <= most; tick += step) found.push(tick);
  return found;
}

// -- recoveries, hangs, notes ----------------------------------------------------------------------------------------

function drawRecoveries() {
  const all = job.changes.filter((one) => one.recovery);
  const shown = all.slice(-60).reverse();
  if (!shown.length) {
    fill("recoveries", empty("No change of the members has been completed by a commit yet."));
    return;
  }
  const most = Math.max(...shown.map((one) => one.recovery.total_s)) || 1;
  fill("recoveries", make("div", { id: "rows" }, ...shown.map((one) => make("button", {
    class: `row${one.number === chosen ? " chosen" : ""}`, "data-change": one.number, title: one.recovery.cause,
    onclick: () => choose(one.number, one === job.changes[job.changes.length - 1]),
  }, make("span", { class: one.recovery.interrupted ? "bad" : "" }, `${clock(one.t)} ${one.recovery.cause}`),
    bar(one.recovery, one.recovery.total_s / most), make("span", {}, took(one.recovery.total_s))))), phaseLegend(null),
    all.length > shown.length ? make("p", { class: "dim" }, `and ${all.length - shown.length} before`) : "");
}

function drawHangs() {
  if (!job.hangs.length) {
    fill("hangs", empty(job.source === "status" ? "Stacks of hung workers are in the event logs only." : "No worker has hung."));
    return;
  }
  fill("hangs", ...[...job.hangs].reverse().map((one) => make("div", { class: "hang" },
    make("p", {}, make("strong", {}, one.worker), ` at ${clock(one.t)}${one.step === null ? "" : `, step ${one.step}`}: ${one.doing}`),
    one.since_s === null ? "" : make("p", { class: "dim" }, `no progress for ${took(one.since_s)}${one.limit_s === null ? "" : `, limit ${took(one.limit_s)}`}`),
    ...one.waits.map((text) => make("p", {}, text)),
    one.place ? make("pre", {}, one.place.split(" < ").join("\n  called by ")) : "",
    one.stacks ? stacksOf(one) : make("p", { class: "dim" }, "There are no stacks of it."))));
}

function stacksOf(one) {
  const text = make("pre", { tabindex: 0 }, "…");
  const details = make("details", {}, make("summary", {}, "Stacks of all threads"), make("p", { class: "dim" }, `${one.stacks} on ${one.node}`), text);
  details.addEventListener("toggle", async () => {
    if (!details.open || text.textContent !== "…") return;
    const reply = await fetch(`stacks/${one.number}.txt`).catch(() => null);
    text.textContent = reply?.ok ? await reply.text() : "The file is not on this machine, or is gone.";
  });
  return details;
}

function drawNotes() {
  if (!job.notes.length) {
    fill("notes", empty("Nothing else: no checkpoints, no slow workers or links, no sick devices, no nodes cut off."));
    return;
  }
  fill("notes", make("div", { class: "scroll", tabindex: 0 }, make("table", {}, make("tbody", {}, ...[...job.notes].reverse().map((one) => make("tr", {},
    make("td", { class: "n" }, clock(one.t)), make("td", { class: one.bad ? "name warn" : "name" }, one.kind.replaceAll("_", " ")),
    make("td", { class: "name" }, one.worker || one.node), make("td", { class: "text" }, one.text)))))));
}

// -- the whole -------------------------------------------------------------------------------------------------------

function draw() {
  drawHead();
  section("members", [job.slots, job.nodes, job.events > 0], drawMembers);
  section("curves", [job.steps, job.changes.map((one) => [one.number, one.t, one.recovery !== null]), window.innerWidth], drawCurves);
  section("recoveries", job.changes.map((one) => [one.number, one.recovery]), drawRecoveries);
  drawChanges();
  section("hangs", job.hangs, drawHangs);
  section("notes", job.notes, drawNotes);
}

let tag = "";
let asks = false;

async function ask() {
  if (asks || document.hidden) return;
  asks = true;
  const problem = await read().catch((error) => {
    console.error(error);
    return `The page cannot show what the server answers: ${error.message}`;
  });
  asks = false;
  const link = byId("link");
  link.textContent = problem && job ? `${problem} What was last read is shown.` : problem;
  link.className = problem ? "bad" : "";
}

// Reads the document and draws it; returns what is wrong, in a sentence.
async function read() {
  const reply = await fetch("job.json", tag ? { headers: { "If-None-Match": tag } } : {}).catch(() => null);
  if (!reply) return "The server does not answer.";
  if (reply.status === 200) {
    job = await reply.json();
    tag = reply.headers.get("ETag") || "";
    draw();
    document.documentElement.dataset.drawn = String(job.events);
  } else if (reply.status === 304) drawHead();
  else return `The server says: ${(await reply.text()).trim()}.`;
  return job.problem ? `The job's etcd does not answer: ${job.problem}.` : "";
}

byId("slider").addEventListener("input", (event) => {
  const one = job.changes[Number(event.target.value)];
  choose(one.number, one === job.changes[job.changes.length - 1]);
});
byId("former").addEventListener("click", () => step(-1));
byId("later").addEventListener("click", () => step(1));
byId("newest").addEventListener("click", () => choose(null, true));
byId("table-of-members").addEventListener("toggle", (event) => {
  if (job) event.target.lastElementChild.replaceChildren(event.target.open ? memberTable() : "");
});
document.addEventListener("keydown", (event) => {
  if (!job || event.altKey || event.ctrlKey || event.metaKey || event.target.closest("input, .scroll, pre")) return;
  const inList = event.target.id === "list";
  const by = { ArrowLeft: -1, ArrowRight: 1, ...(inList ? { ArrowUp: -1, ArrowDown: 1, Home: -Infinity, End: Infinity } : {}) }[event.key];
  if (event.key === "Escape") chooseWorker(null);
  if (by === undefined) return;
  event.preventDefault();
  step(by);
});
document.addEventListener("visibilitychange", ask);
let resized = 0;
window.addEventListener("resize", () => { cancelAnimationFrame(resized); resized = requestAnimationFrame(() => { if (job) draw(); }); });
ask();
setInterval(ask, EVERY_MS);
