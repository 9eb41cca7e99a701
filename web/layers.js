// The layers of a disk in one table: what its guest's kernel counts, what we count, and the host's device beneath. What is
// not known says so, and has no figure.

import { duration, megabytes, number } from "./format.js";
import { Table } from "./table.js";

const KINDS = ["read", "write", "discard", "flush"];
/** A queue that differs by more than this share from rate times latency is pointed out. */
const LITTLE = 0.05;
const QUEUE_MIN = 0.01;
/** Kernels cut times to milliseconds, each of them and their sum. */
const ROUNDED_MS = 5;
/** Their times are of 32 bits, and begin anew. */
const ROUND = 2 ** 32;

const grownMs = (before, now) => (now < before && before < ROUND && before - now > ROUND / 2 ? now + ROUND : now) - before;

/** What a kernel has counted for a device between two readings; `null` if they do not belong together. */
export function deviceRates(before, now) {
  const seconds = before && before.name === now.name ? (now.clock_ns - before.clock_ns) / 1e9 : 0;
  if (seconds <= 0) return null;
  const kinds = KINDS.map((kind) => ({
    count: now[kind].count - before[kind].count, size: now[kind].size - before[kind].size,
    ms: grownMs(before[kind].time_ms, now[kind].time_ms),
  }));
  const weighted = grownMs(before.weighted_ms, now.weighted_ms);
  if (weighted < 0 || kinds.some((one) => one.count < 0 || one.size < 0 || one.ms < 0)) return null;
  const [count, ms] = ["count", "ms"].map((what) => kinds.reduce((sum, one) => sum + one[what], 0));
  const queue = weighted / 1000 / seconds;
  const product = ms / 1000 / seconds;
  const differs = Math.abs(queue - product) * seconds * 1000 > ROUNDED_MS && isOff(queue, product);
  return {
    reads: kinds[0].count / seconds, writes: kinds[1].count / seconds,
    bytes: (kinds[0].size + kinds[1].size) / seconds, queue, latency: count ? (ms * 1e6) / count : null, differs,
  };
}

function isOff(queue, product) {
  const larger = Math.max(queue, product);
  return larger >= QUEUE_MIN && Math.abs(queue - product) > LITTLE * larger;
}

function ours(rate, stages) {
  if (!rate) return {};
  const all = Object.values(rate.operations);
  const sum = (value) => all.reduce((total, one) => total + value(one), 0);
  const time = sum((one) => stages.reduce((total, stage) => total + one.stages[stage], 0));
  const count = sum((one) => one.count);
  return {
    reads: (rate.operations.read?.count ?? 0) / rate.seconds, writes: (rate.operations.write?.count ?? 0) / rate.seconds,
    bytes: ((rate.operations.read?.bytes ?? 0) + (rate.operations.write?.bytes ?? 0)) / rate.seconds,
    queue: time / 1e9 / rate.seconds, latency: count ? time / count : null,
  };
}

/** The rows between two answers. */
export function layerRows(before, now, rate, stages) {
  const unknown = (layer, why) => ({ key: layer, layer, where: `unknown: ${why}` });
  const { guest, host } = now;
  const rows = [];
  if (guest?.device) {
    rows.push({ key: "guest", layer: "guest", where: guest.device.name, ...deviceRates(before?.guest?.device, guest.device) });
  } else {
    rows.push(unknown("guest", guest?.unknown ?? "the daemon does not say"));
  }
  rows.push({ key: "tapline", layer: "tapline", where: "all stages", ...ours(rate, stages) });
  rows.push({ key: "storage", layer: "storage", where: "as seen by Tapline", ...ours(rate, ["storage"]) });
  if (!host?.devices.length) rows.push(unknown("host", host?.unknown ?? "the daemon does not say"));
  host?.devices.forEach((device, depth) => {
    const shared = host.shared_by > 1 ? `, shared by ${host.shared_by} disks` : "";
    const where = depth ? `${device.name}, the whole disk` : `${device.name}${shared}`;
    rows.push({ key: `host${depth}`, layer: "host", where, ...deviceRates(before?.host?.devices[depth], device) });
  });
  return rows;
}

export function layerTable() {
  const mark = (row) => (row.differs ? " ≠ rate × latency" : "");
  const columns = [
    { title: "Layer", text: (row) => row.layer },
    { title: "Device", text: (row) => row.where },
    { title: "Reads/s", num: true, text: (row) => number(row.reads) },
    { title: "Writes/s", num: true, text: (row) => number(row.writes) },
    { title: "Throughput", num: true, text: (row) => megabytes(row.bytes) },
    { title: "Average time", num: true, text: (row) => duration(row.latency) },
    { title: "Queue", num: true, text: (row) => `${number(row.queue)}${mark(row)}` },
  ];
  const table = new Table("Layers, from the guest down, in the last second", columns, { empty: "" });
  table.element.classList.add("short");
  return table;
}
