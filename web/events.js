// Changes that matter to a person, made of the stream of events: what has changed of an object, in words. Measurements,
// and states that an object only passes through, are left out; the same change of the same object is one line.

import { bytes, percent } from "./format.js";

const KEPT = 60;
/** States between two others. */
const PASSING = ["starting", "stopping", "plugging", "unplugging"];

/** The changes, the newest first: `{ key, at, kind, uuid, title, text, level, count, requester }`. */
export const changes = [];
/** The last object of each event, by UUID: what the next one has changed. */
const last = new Map();

const KINDS = { vm: "VM", vdi: "disk", vbd: "disk", sr: "repository", task: "task", host: "host" };
const isEqual = (a, b) => JSON.stringify(a) === JSON.stringify(b);

/** What of these fields differs, each in words. */
function differences(before, now, fields) {
  const changed = Object.entries(fields).filter(([name]) => !isEqual(before[name], now[name]));
  return changed.map(([name, words]) => words(now[name], before[name])).filter(Boolean);
}

const health = (now, before) => {
  if (!now || now.state === before?.state) return "";
  return now.state === "healthy" ? "healthy again" : now.state;
};
const shared = {
  health,
  name: (now) => `renamed to '${now}'`,
  tags: (now) => `tags: ${now?.join(", ") || "none"}`,
  problem: (now) => (now ? now.detail : ""),
  retention: (now) => (now ? "schedule of snapshots set" : "schedule of snapshots removed"),
  retention_problem: (now) => (now ? `scheduled snapshot failed: ${now.detail}` : ""),
  backup_schedule: (now) => (now ? "schedule of backups set" : "schedule of backups removed"),
  last_backup: (now) => (now ? "backed up by its schedule" : ""),
  backup_problem: (now) => (now ? `scheduled backup: ${now.detail}` : ""),
};
const passes = (now) => (PASSING.includes(now) ? "" : now);
const FIELDS = {
  vm: { power: passes, memory: (now) => `memory ${bytes(now)}`, vcpus: (now) => `${now} processors`, ...shared },
  vbd: {
    state: passes,
    restarts: (now, before) => (now > before ? "process restarted" : ""),
    waits_for_space: (now) => (now ? "the guest waits for space" : "has space again"),
    limits: (now) => (now && Object.keys(now).length ? "limits set" : "limits removed"),
    share_weight: (now) => `share weight ${now ?? 100}`,
    ...shared,
  },
  vdi: {
    size: (now) => `resized to ${bytes(now)}`,
    state: (now) => now,
    read_only: (now) => (now ? "read-only" : "writable"),
    image: () => "",
    ...shared,
  },
  sr: { state: (now) => now, reserve: (now) => `reserve ${bytes(now)}`, ...shared },
};

/** A change in words; empty if it does not matter to a person. `before` is the object as it was, if that is known. */
export function describe(event, before) {
  const { kind, change, object } = event;
  if (kind === "task") return describeTask(event);
  if (change === "removed") return "removed";
  if (!object || !(kind in FIELDS)) return "";
  if (change === "added") {
    if (kind === "vdi" && object.snapshot_of) return object.scheduled ? "taken by schedule" : "snapshot taken";
    return kind === "vbd" ? "attached" : "created";
  }
  return before ? differences(before, object, FIELDS[kind]).join("; ") : "";
}

function describeTask({ change, object }) {
  if (change === "removed" || !["failed", "cancelled", "stuck"].includes(object?.state)) return "";
  return `${object.state} at ${percent(object.progress)}${object.problem ? `: ${object.problem.detail}` : ""}`;
}

const levelOf = (event, text) => {
  const { kind, object } = event;
  if (kind === "task") return object.state === "cancelled" ? "idle" : "bad";
  const states = { stuck: "bad", full: "bad", diverged: "bad", lost: "bad", damaged: "bad", missing: "bad" };
  if (text.startsWith("process restarted") || text.includes("failed")) return "warn";
  return states[text.split(";")[0]] ?? (object?.problem ? "warn" : "idle");
};

/** Takes in an event. */
export function takeChange(event) {
  const before = last.get(event.uuid);
  if (event.change === "removed") last.delete(event.uuid);
  else if (event.kind !== "task") last.set(event.uuid, event.object);
  const text = describe(event, before);
  if (!text) return;
  const object = event.object ?? before;
  // A disk and its VBD are one thing to a person.
  const key = `${event.kind === "vbd" ? object.vdi : event.uuid} ${text}`;
  const at = changes.findIndex((one) => one.key === key);
  const old = at < 0 ? null : changes.splice(at, 1)[0];
  changes.unshift({
    key,
    at: event.at,
    kind: KINDS[event.kind] ?? event.kind,
    object,
    event,
    text,
    level: levelOf(event, text),
    count: (old?.count ?? 0) + (old && old.event.kind !== event.kind ? 0 : 1),
    requester: event.requester,
  });
  changes.length = Math.min(changes.length, KEPT);
}

/** Takes the objects of the lists as known, where no event has shown them: a later change can then be told. */
export function takeKnown(objects) {
  for (const object of objects) if (!last.has(object.uuid)) last.set(object.uuid, object);
}

/** Forgets all changes, before the events are read again. */
export function forgetChanges() {
  changes.length = 0;
  last.clear();
}
