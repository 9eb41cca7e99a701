// A single disk: what it is, what can be done with it, and, while it is plugged, what each layer does.

import { clone, destroy, limit, plug, resize, share, snapshot, unplug } from "./actions.js";
import { facts, h, setAttribute, setText } from "./dom.js";
import { bytes, duration, megabytes, moment, number, percent, short } from "./format.js";
import { layerRows, layerTable } from "./layers.js";
import { grown, HeatMap, merged, Plot, quantile } from "./plots.js";
import { STAGES, state, takeDisks, want } from "./store.js";
import { Table } from "./table.js";

/** An age from which a request in flight is pointed out, in nanoseconds. */
const STUCK = 1e9;

const section = (title, ...content) => h("section", { "aria-label": title }, h("h2", {}, title), content);

/** The VBD to look at: the one that was asked for, or the one that is plugged. */
function vbdOf(vdi, wanted) {
  const vbds = [...state.vbd.values()].filter((vbd) => vbd.vdi === vdi);
  return vbds.find((vbd) => vbd.uuid === wanted) ?? vbds.find((vbd) => vbd.state === "plugged") ?? vbds[0];
}

function stageTable() {
  const stage = (name) => ({
    title: name, num: true,
    text: ({ one }) => (one.count ? `${duration(one.stages[name] / one.count)}` : ""),
  });
  const columns = [
    { title: "Operation", text: (row) => row.key },
    { title: "Requests", num: true, text: ({ one }) => number(one.count) },
    ...STAGES.map(stage),
    { title: "All", num: true, text: ({ one }) => (one.count ? duration(one.time / one.count) : "") },
  ];
  const table = new Table("Average time in each stage, of the requests answered in the last second", columns,
    { empty: "No request was answered in the last second" });
  table.element.classList.add("short", "stages");
  return table;
}

function flightTable() {
  const columns = [
    { title: "Operation", text: (row) => row.operation },
    { title: "Offset", num: true, text: (row) => bytes(row.offset) },
    { title: "Size", num: true, text: (row) => bytes(row.size) },
    { title: "Age", num: true, text: (row) => duration(row.age_ns) },
    { title: "With", text: (row) => (row.stage === "storage" ? "storage" : "disk") },
  ];
  const table = new Table("Requests in flight", columns, { empty: "None in flight" });
  table.element.classList.add("short");
  return table;
}

/** Everything that moves: it is made once statistics come. */
class Live {
  constructor() {
    // A screen reader reads what is stuck once, and not its age each second.
    [this.stuckWhere, this.stuckAge] = [h("span"), h("span", { "aria-hidden": "true" })];
    this.stuck = h("p", { class: "banner", role: "alert", hidden: true }, this.stuckWhere, this.stuckAge);
    this.info = facts();
    const lines = (title, value) => new Plot(title, ["read", "write", "other"], { value });
    this.iops = lines("IOPS", number);
    this.throughput = lines("Throughput", (value) => megabytes(value));
    this.queue = new Plot("Queue by layer", [...STAGES, "in flight now"], { areas: STAGES.length, value: number });
    this.latency = new Plot("Latency", ["p50", "p99", "p99.9"], { value: duration, log: true });
    this.heat = new HeatMap();
    this.stages = stageTable();
    this.layers = layerTable();
    this.flight = flightTable();
    this.which = h("select", { "aria-label": "Latency of" },
      ["all", "read", "write", "flush", "discard", "write-zeroes"].map((name) => h("option", {}, name)));
    this.element = h("div", {}, this.stuck, this.info.element,
      h("div", { class: "grid" }, this.iops.element, this.throughput.element, this.queue.element, this.latency.element),
      h("label", { class: "bar" }, "Latencies of ", this.which), this.heat.element,
      section("Stages: average of the last second", this.stages.element),
      section("Layers: average of the last second", this.layers.element),
      section("Requests in flight", this.flight.element));
    this.plots = [this.iops, this.throughput, this.queue, this.latency, this.heat];
  }

  take(before, now, rate) {
    const oldest = now.oldest_ns ?? 0;
    this.stuck.hidden = oldest < STUCK;
    if (oldest >= STUCK) {
      const where = now.requests[0]?.stage === "storage" ? "the storage"
        : "the disk: metadata, space or what it must not overtake";
      setText(this.stuckWhere, `A request waits for ${where}. `);
      setText(this.stuckAge, `It has been in flight for ${duration(oldest)}.`);
    }
    this.info.set({
      Process: now.pid ?? "", "Processes so far": now.processes, "In flight": now.in_flight,
      "Oldest request": now.oldest_ns === undefined ? "" : duration(now.oldest_ns),
      Errors: now.operations.reduce((sum, one) => sum + one.errors, 0),
      "Wake-ups a second": before && rate ? number((now.sleeps - before.sleeps) / rate.seconds) : "",
      "Polls that found work": now.polls_hit + now.polls_missed
        ? percent(now.polls_hit / (now.polls_hit + now.polls_missed)) : "",
    });
    this.flight.set(now.requests.map((request, index) => ({ ...request, key: index })));
    this.layers.set(layerRows(before, now, rate, STAGES));
    if (!rate) return;
    const at = Date.parse(now.at) / 1000;
    const kinds = [["read"], ["write"], ["flush", "discard", "write-zeroes"]];
    const each = (value) => kinds.map((names) =>
      names.reduce((sum, name) => sum + (rate.operations[name]?.[value] ?? 0), 0) / rate.seconds);
    this.iops.add(at, each("count"));
    this.throughput.add(at, each("bytes"));
    const all = Object.values(rate.operations);
    const inStage = (stage) => all.reduce((sum, one) => sum + one.stages[stage], 0) / 1e9 / rate.seconds;
    this.queue.add(at, [...STAGES.map(inStage), now.in_flight]);
    const rows = Object.entries(rate.operations).filter(([, one]) => one.count);
    this.stages.set(rows.map(([key, one]) => ({ key, one })));
    this.takeLatencies(at, before, now);
  }

  takeLatencies(at, before, now) {
    const chosen = this.which.value;
    const histograms = now.operations.filter((one) => chosen === "all" || one.operation === chosen).map((one) => {
      const old = before.operations.find((other) => other.operation === one.operation);
      return grown(old?.latencies, one.latencies ?? []);
    });
    const buckets = merged(histograms);
    this.latency.add(at, [0.5, 0.99, 0.999].map((part) => quantile(buckets, part)));
    this.heat.add(buckets);
  }

  destroy() {
    for (const plot of this.plots) plot.destroy();
  }
}

/** The buttons, each of which can be used when what it does is possible. */
function actionBar(vdi, vbd) {
  const button = (label, can, onclick) => {
    const element = h("button", { type: "button", onclick }, label);
    return { element, can };
  };
  const is = (...states) => () => states.includes(vbd()?.state);
  const all = [
    button("Snapshot", () => true, () => snapshot(vdi())),
    button("Clone", () => true, () => clone(vdi())),
    button("Resize", () => !vdi().read_only, () => resize(vdi())),
    button("Limit", () => vbd() !== undefined && vbd() !== null, () => limit(vbd(), vdi().name)),
    button("Share", () => vbd() !== undefined && vbd() !== null, () => share(vbd(), vdi().name)),
    button("Plug", is("unplugged"), () => plug(vbd(), vdi().name)),
    button("Unplug", is("plugged", "plugging", "restarting"), () => unplug(vbd(), vdi().name)),
    button("Destroy", () => !vdi().users.length, () => destroy(vdi())),
  ];
  return {
    element: h("div", { class: "bar", role: "group", "aria-label": "Actions" }, all.map(({ element }) => element)),
    draw() {
      for (const { element, can } of all) {
        const off = !vdi() || !can();
        if (element.disabled !== off) element.disabled = off;
      }
    },
  };
}

function family(uuid) {
  const vdi = state.vdi.get(uuid);
  const root = vdi?.snapshot_of && state.vdi.has(vdi.snapshot_of) ? vdi.snapshot_of : uuid;
  const all = [...state.vdi.values()].filter((one) => one.uuid === root || one.snapshot_of === root);
  all.sort((a, b) => (a.uuid === root ? -1 : b.uuid === root ? 1 : a.snapshot_time < b.snapshot_time ? -1 : 1));
  return all.map((one) => ({ ...one, key: one.uuid, className: one.uuid === root ? "" : "level1" }));
}

export function disk(uuid, wanted) {
  let live = null;
  let asked;
  const vdi = () => state.vdi.get(uuid);
  const vbd = () => vbdOf(uuid, wanted);
  const [heading, info, where] = [h("h1", {}, "Disk"), facts(), h("p")];
  const srLink = h("a");
  const actions = actionBar(vdi, vbd);
  const room = h("div");
  const none = h("p", { class: "dim" });
  const states = new Table("The disk and its snapshots", [
    { title: "Disk and snapshots", text: (one) => (one.className ? `↳ ${one.name}` : one.name) },
    { title: "Taken", wide: true, text: (one) => (one.snapshot_time ? moment(one.snapshot_time) : "") },
    { title: "Used", num: true, text: (one) => bytes(one.physical_utilisation) },
    { title: "State", text: (one) => one.state },
  ], { onOpen: (one) => { location.hash = `#/disk/${one.key}`; }, empty: "No snapshots" });
  states.element.classList.add("short");

  const take = (answer) => {
    takeDisks(answer ? [answer] : []);
    const found = answer && state.disks.get(answer.vbd);
    if (found) {
      if (!live) {
        live = new Live();
        room.replaceChildren(live.element);
      }
      live.take(found.before, found.now, found.rate);
    }
    none.hidden = Boolean(found);
  };

  const ask = () => {
    const of = vbd();
    const one = of && of.state !== "unplugged" && of.state !== "plugging" ? of.uuid : null;
    if (one === asked) return;
    asked = one;
    live?.destroy();
    live = null;
    room.replaceChildren();
    none.hidden = false;
    want(one ? `/vbds/${one}/statistics` : null, take);
  };

  return {
    element: h("div", {}, heading, where, info.element, actions.element, none, room,
      section("Snapshots", states.element)),
    table: states,
    draw() {
      ask();
      const [one, of] = [vdi(), vbd()];
      if (!one) {
        setText(heading, state.loaded ? `There is no disk ${uuid}` : "Loading…");
        actions.element.hidden = true;
        return;
      }
      actions.element.hidden = false;
      setText(heading, one.name);
      const vm = of?.vm && state.vm.get(of.vm);
      const sr = state.sr.get(one.sr);
      if (!srLink.isConnected) where.replaceChildren("In ", srLink);
      setText(srLink, sr?.name ?? short(one.sr));
      setAttribute(srLink, "href", `#/sr/${one.sr}`);
      info.set({
        VM: vm ? `${vm.name}, position ${of.position}` : "",
        Size: bytes(one.size), Used: bytes(one.physical_utilisation),
        Format: one.format, Chain: one.depth > 1 ? `${one.depth} images` : "1 image", File: one.file,
        State: one.state === "ready" ? "" : one.state, Access: one.read_only ? "read-only" : "",
        VBD: of ? `${of.state}, ${of.transport}` : "none", Restarts: of?.restarts || "",
        Space: of?.waits_for_space ? "the guest waits for space" : "",
        Problem: of?.problem?.detail, "What to do": of?.problem?.advice,
      });
      setText(none, of ? "It is not plugged: there are no statistics." : "It has no VBD: nothing uses it.");
      actions.draw();
      states.set(family(uuid));
    },
    destroy() {
      live?.destroy();
    },
  };
}
