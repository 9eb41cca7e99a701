// A single disk: what it is, what can be done with it, and, while it is plugged, what each layer does.

import { clone, destroy, detach, limit, plug, resize, schedule, setTags, share, snapshot, unplug } from "./actions.js";
import { facts, h, setAttribute, setText } from "./dom.js";
import { bytes, duration, megabytes, moment, number, percent, short } from "./format.js";
import { severity, vbdLevel, vbdWord, vdiLevel, vdiWord } from "./health.js";
import { history } from "./history.js";
import { layerRows, layerTable } from "./layers.js";
import { section, sectionWith } from "./parts.js";
import { grown, HeatMap, merged, Plot, quantile } from "./plots.js";
import { diskSnapshots } from "./snapshots.js";
import { STAGES, state, takeDisks, want } from "./store.js";
import { Table } from "./table.js";
import { scheduleWords } from "./view-schedules.js";

/** The VBD to look at: the one that was asked for, or the one that is plugged. */
function vbdOf(vdi, wanted) {
  const vbds = [...state.vbd.values()].filter((vbd) => vbd.vdi === vdi);
  return vbds.find((vbd) => vbd.uuid === wanted) ?? vbds.find((vbd) => vbd.state === "plugged") ?? vbds[0];
}

function stageTable() {
  const stage = (name, at) => ({
    title: name,
    num: true,
    rank: name === "storage" ? 0 : 7 - at,
    text: ({ one }) => (one.count ? `${duration(one.stages[name] / one.count)}` : ""),
  });
  const columns = [
    { title: "Operation", text: (row) => row.key },
    { title: "Requests", num: true, rank: 8, text: ({ one }) => number(one.count) },
    ...STAGES.map(stage),
    { title: "Total", num: true, text: ({ one }) => (one.count ? duration(one.time / one.count) : "") },
  ];
  const table = new Table("Average time in each stage, of the requests answered in the last second", columns, {
    empty: "No request was answered in the last second",
  });
  table.element.classList.add("short", "stages");
  return table;
}

function flightTable() {
  const columns = [
    { title: "Operation", text: (row) => row.operation },
    { title: "Age", num: true, text: (row) => duration(row.age_ns) },
    { title: "Waits for", text: (row) => (row.stage === "storage" ? "storage" : "disk process") },
    { title: "Size", num: true, rank: 1, text: (row) => bytes(row.size) },
    { title: "Offset", num: true, rank: 2, text: (row) => bytes(row.offset) },
  ];
  const table = new Table("Requests in flight", columns, { empty: "None in flight" });
  table.element.classList.add("short");
  return table;
}

/** Everything that moves: it is made once statistics come. */
class Live {
  constructor() {
    this.info = facts();
    const lines = (title, value) => new Plot(title, ["read", "write", "other"], { value });
    this.iops = lines("IOPS", number);
    this.throughput = lines("Throughput", (value) => megabytes(value));
    this.queue = new Plot("Queue by layer", [...STAGES, "in flight now"], { areas: STAGES.length, value: number });
    this.latency = new Plot("Latency", ["p50", "p99", "p99.9"], { value: duration, log: true });
    this.stages = stageTable();
    this.layers = layerTable();
    this.flight = flightTable();
    this.which = h(
      "select",
      { "aria-label": "Latency of" },
      ["all", "read", "write", "flush", "discard", "write-zeroes"].map((name) => h("option", {}, name)),
    );
    this.heat = new HeatMap(h("label", { class: "bar" }, "Latencies of ", this.which));
    this.element = h(
      "div",
      {},
      section("Process", this.info.element),
      h("div", { class: "grid" }, this.iops.element, this.throughput.element, this.queue.element, this.latency.element),
      this.heat.element,
      section("Stages: average of the last second", this.stages.element),
      section("Layers: average of the last second", this.layers.element),
      section("Requests in flight", this.flight.element),
    );
    this.plots = [this.iops, this.throughput, this.queue, this.latency, this.heat];
  }

  take(before, now, rate) {
    this.info.set({
      "Process ID": now.pid ?? "",
      "Processes so far": now.processes,
      "In flight": now.in_flight,
      "Oldest request": now.oldest_ns === undefined ? "" : duration(now.oldest_ns),
      Errors: now.operations.reduce((sum, one) => sum + one.errors, 0),
      "Wake-ups a second": before && rate ? number((now.sleeps - before.sleeps) / rate.seconds) : "",
      "Polls that found work":
        now.polls_hit + now.polls_missed ? percent(now.polls_hit / (now.polls_hit + now.polls_missed)) : "",
    });
    this.flight.set(now.requests.map((request, index) => ({ ...request, key: index })));
    this.layers.set(layerRows(before, now, rate, STAGES));
    if (!rate) return;
    const at = Date.parse(now.at) / 1000;
    const kinds = [["read"], ["write"], ["flush", "discard", "write-zeroes"]];
    const each = (value) =>
      kinds.map((names) => names.reduce((sum, name) => sum + (rate.operations[name]?.[value] ?? 0), 0) / rate.seconds);
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
    const histograms = now.operations
      .filter((one) => chosen === "all" || one.operation === chosen)
      .map((one) => {
        const old = before.operations.find((other) => other.operation === one.operation);
        return grown(old?.latencies, one.latencies ?? []);
      });
    const buckets = merged(histograms);
    this.latency.add(
      at,
      [0.5, 0.99, 0.999].map((part) => quantile(buckets, part)),
    );
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
  const is =
    (...states) =>
    () =>
      states.includes(vbd()?.state);
  const all = [
    button(
      "Snapshot",
      () => true,
      () => snapshot(vdi()),
    ),
    button(
      "Clone",
      () => true,
      () => clone(vdi()),
    ),
    button(
      "Resize",
      () => !vdi().read_only,
      () => resize(vdi()),
    ),
    button(
      "Limit",
      () => vbd() !== undefined && vbd() !== null,
      () => limit(vbd(), vdi().name),
    ),
    button(
      "Share",
      () => vbd() !== undefined && vbd() !== null,
      () => share(vbd(), vdi().name),
    ),
    button("Plug", is("unplugged"), () => plug(vbd(), vdi().name)),
    button("Unplug", is("plugged", "plugging", "restarting"), () => unplug(vbd(), vdi().name)),
    button("Detach", is("unplugged"), () => detach(vbd(), vdi().name)),
    button(
      "Tags",
      () => true,
      () => setTags("vdis", vdi()),
    ),
    button(
      "Destroy",
      () => !vdi().users.length,
      () => destroy(vdi()),
    ),
  ];
  return {
    element: h(
      "div",
      { class: "bar", role: "group", "aria-label": "Actions" },
      all.map(({ element }) => element),
    ),
    draw() {
      for (const { element, can } of all) {
        const off = !vdi() || !can();
        if (element.disabled !== off) element.disabled = off;
      }
    },
  };
}

/** The disk of which a VDI is a snapshot, or itself. */
function rootOf(vdi) {
  return state.vdi.get(vdi.snapshot_of) ?? vdi;
}

export function disk(uuid, wanted) {
  let live = null;
  let asked;
  const vdi = () => state.vdi.get(uuid);
  const vbd = () => vbdOf(uuid, wanted);
  const [heading, word, info, where] = [h("h1", {}, "Disk"), h("span"), facts(), h("p", { class: "where" })];
  const [srLink, vmLink, rootLink] = [h("a"), h("a"), h("a")];
  where.append("In ", srLink, h("span", {}, ", attached to ", vmLink), h("span", {}, ", snapshot of ", rootLink));
  const actions = actionBar(vdi, vbd);
  const sick = h("p", { class: "banner" });
  const [room, day] = [h("div"), h("div")];
  let past = null;
  const none = h("p", { class: "dim" });
  const snapshots = diskSnapshots();
  const plan = h("p");
  const planButton = h(
    "button",
    { type: "button", onclick: () => schedule("vdis", rootOf(vdi())) },
    "Set the schedule",
  );

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

  const setLink = (link, text, href) => {
    const part = link === srLink ? link : link.parentElement;
    part.hidden = !href;
    setText(link, text ?? "");
    setAttribute(link, "href", href);
  };

  return {
    element: h(
      "div",
      {},
      h("div", { class: "title" }, heading, word),
      where,
      sick,
      actions.element,
      section("Disk", info.element),
      h(
        "div",
        { class: "grid" },
        sectionWith("Snapshots", null, snapshots.table.element),
        sectionWith("Schedule of snapshots", planButton, plan),
      ),
      none,
      room,
      day,
    ),
    table: snapshots.table,
    draw() {
      ask();
      const [one, of] = [vdi(), vbd()];
      for (const part of [...this.element.children].slice(1)) if (part !== none && part !== sick) part.hidden = !one;
      if (!one) {
        setText(heading, state.loaded ? `There is no disk ${uuid}` : "Loading…");
        none.hidden = true;
        sick.hidden = true;
        return;
      }
      setText(heading, one.name);
      setText(word, of ? vbdWord(of) : vdiWord(one));
      word.dataset.level = of ? vbdLevel(of) : vdiLevel(one);
      const vm = of?.vm && state.vm.get(of.vm);
      const root = rootOf(one);
      setLink(srLink, state.sr.get(one.sr)?.name ?? short(one.sr), `#/sr/${one.sr}`);
      setLink(vmLink, vm?.name, vm ? `#/vm/${vm.uuid}` : null);
      setLink(rootLink, root.name, root === one ? null : `#/disk/${root.uuid}`);
      const health = of && severity(of.health) ? of.health : one.health;
      sick.hidden = !severity(health);
      if (!sick.hidden)
        setText(sick, `${health.state}: ${health.reason ?? ""}${health.advice ? ` → ${health.advice}` : ""}`);
      info.set({
        Size: bytes(one.size),
        Used: bytes(one.physical_utilisation),
        Format: one.format,
        Chain: one.depth > 1 ? `${one.depth} images` : "1 image",
        File: one.file,
        State: one.state === "ready" ? "" : one.state,
        Access: one.read_only ? "read-only" : "",
        VBD: of ? `${of.state}, ${of.transport}` : "none",
        Position: vm ? of.position : "",
        Restarts: of?.restarts || "",
        Taken: one.snapshot_time ? moment(one.snapshot_time) : "",
        Tags: (one.tags ?? []).join(", "),
        Space: of?.waits_for_space ? "the guest waits for space" : "",
        Problem: of?.problem?.detail,
        "What to do": of?.problem?.advice,
      });
      setText(
        none,
        of ? "The disk is not plugged: there are no statistics." : "The disk has no VBD: it is not in use.",
      );
      actions.draw();
      if (past?.vbd !== of?.uuid) {
        past?.destroy();
        past = of ? history(of.uuid) : null;
        day.replaceChildren(...(past ? [past.element] : []));
      }
      past?.draw();
      setText(
        plan,
        scheduleWords(root) + (root.retention_problem ? `. The last one failed: ${root.retention_problem.detail}` : ""),
      );
      plan.className = root.retention_problem ? "bad" : "";
      snapshots.set(root, root === one ? of : vbdOf(root.uuid));
    },
    destroy() {
      live?.destroy();
      past?.destroy();
    },
  };
}
