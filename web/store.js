// What is known of the daemon: its objects, kept up to date by events, and the statistics, read once a second while the
// page is visible. Views read from here and are told when something has changed.

import { follow, get } from "./api.js";
import { forgetChanges, takeChange, takeKnown } from "./events.js";

const PERIOD = 1000;
/** A silence that is told, in milliseconds. */
const STALE = 4000;
/** How many events are read again after a gap, if the daemon still has them, and how many tasks are kept. */
const EVENTS_READ = [400, 50, 10, 0];
const TASKS_KEPT = 200;
const LAST = "18446744073709551615";
const LISTS = { sr: "srs", vdi: "vdis", vbd: "vbds", vm: "vms" };

export const STAGES = ["ring", "map", "split", "queue", "storage", "completion", "notify"];

export const state = {
  host: null,
  sr: new Map(),
  vdi: new Map(),
  vbd: new Map(),
  vm: new Map(),
  /** Open tasks and the latest that have ended, the newest first. */
  tasks: [],
  /** The number of the last event. */
  seq: null,
  /** The last statistics and rates by VBD. */
  disks: new Map(),
  loaded: false,
  problem: null,
};

const listeners = new Set();
/** Calls `listener` when something has changed; gives back what ends that. */
export function subscribe(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}
function tell() {
  for (const listener of listeners) {
    try {
      listener();
    } catch (error) {
      // A fault in a view is not to end the asking.
      console.error(error);
    }
  }
}

let onUnauthorized = () => {};
/** What the current view wants to be asked each second: a path, and what is done with the answer. */
let wanted = null;
let generation = 0;
let lastAnswer = Date.now();
let failures = 0;
let ticks = 0;
let timer = null;
let stream = null;

/** The growth between two readings of a disk, a second: `null` if they do not belong together. */
export function rates(before, now) {
  if (!before) return null;
  const seconds = (now.clock_ns - before.clock_ns) / 1e9;
  if (seconds <= 0) return null;
  const rate = { seconds, iops: 0, bytes: 0, load: 0, errors: 0, operations: {} };
  for (const operation of now.operations) {
    const old = before.operations.find((one) => one.operation === operation.operation);
    if (!old || operation.count < old.count) return null;
    const count = operation.count - old.count;
    const one = { count, bytes: operation.size - old.size, stages: {}, time: 0 };
    for (const stage of STAGES) {
      one.stages[stage] = operation.stages[stage] - old.stages[stage];
      one.time += one.stages[stage];
    }
    rate.operations[operation.operation] = one;
    rate.iops += count / seconds;
    rate.bytes += one.bytes / seconds;
    rate.load += one.time / 1e9 / seconds;
    rate.errors += operation.errors - old.errors;
  }
  return rate;
}

/** A name of a disk for people. */
export const nameOf = (disk) => (disk.vm_name ? `${disk.vm_name}: ${disk.vdi_name}` : disk.vdi_name);

/** Takes in a list of statistics that is all of what was asked for. */
export function takeDisks(list) {
  const disks = new Map();
  for (const now of list ?? []) {
    const before = state.disks.get(now.vbd);
    const rate = rates(before?.now, now);
    // Requests that end much later than they began would show a load that has passed; those in flight are added.
    const load = Math.max(rate?.load ?? 0, now.in_flight);
    disks.set(now.vbd, { key: now.vbd, now, before: before?.now, rate, load });
  }
  state.disks = disks;
}

/** Has a path asked each second from now on, at once too. */
export function want(path, take) {
  wanted = path ? { path, take } : null;
  generation += 1;
  state.disks = new Map();
  if (timer !== null) schedule(0);
}

/** Asks again soon, after something was done. */
export function hurry() {
  ticks = 0;
  if (timer !== null) schedule(100);
}

async function loadList(kind) {
  const list = await get(`/${LISTS[kind]}`, { seconds: 30 });
  state[kind] = new Map(list.map((object) => [object.uuid, object]));
}

async function loadAll() {
  [state.host] = await Promise.all([get("/host"), ...Object.keys(LISTS).map(loadList)]);
  state.tasks = await get(`/tasks?limit=${TASKS_KEPT}`);
  state.loaded = true;
}

export const isOpen = (task) => ["pending", "running", "cancelling"].includes(task.state);

/** Takes in an event. One that is older than the lists is followed by those that have led to them. */
function takeEvent(event) {
  state.seq = event.seq;
  takeChange(event);
  const object = event.change === "removed" ? null : event.object;
  if (event.kind === "task") {
    state.tasks = state.tasks.filter((task) => task.uuid !== event.uuid);
    if (object) state.tasks.push(object);
    state.tasks.sort((a, b) => (a.created < b.created ? 1 : -1));
    state.tasks.length = Math.min(state.tasks.length, TASKS_KEPT);
  } else if (event.kind in LISTS) {
    if (object) state[event.kind].set(event.uuid, object);
    else state[event.kind].delete(event.uuid);
  }
}

let told = null;
/** Many events come together; views are told once. */
function tellSoon() {
  told ??= setTimeout(() => {
    told = null;
    tell();
  }, 100);
}

/** The number of the last event: what lies behind all events is answered with it. */
async function lastEvent(signal) {
  let last = 0;
  await follow(
    LAST,
    (name, id) => {
      last = Number(id);
      return false;
    },
    signal,
  );
  return last;
}

/** Follows the events, from some that have passed on; after a gap everything is loaded again. */
async function followAll(outer) {
  const inner = new AbortController();
  const signal = AbortSignal.any([outer, inner.signal]);
  const last = await lastEvent(signal);
  const seen = state.loaded && state.seq !== null ? state.seq : last + 1;
  // The lists are read when the stream has begun, so that no change is between the two.
  let waiting = [];
  const load = async () => {
    await loadAll();
    for (const event of waiting) takeEvent(event);
    waiting = null;
    for (const kind of Object.keys(LISTS)) takeKnown(state[kind].values());
    tell();
  };
  const on = (name, id, data) => {
    if (name !== "change") return false;
    if (waiting) waiting.push(JSON.parse(data));
    else {
      takeEvent(JSON.parse(data));
      tellSoon();
    }
    return true;
  };
  const listen = async () => {
    if (seen <= last && (await follow(seen, on, signal))) return;
    // How far back the events are kept is not known; a stream that is known ends only with the daemon.
    for (const back of EVENTS_READ) {
      forgetChanges();
      if (await follow(Math.max(0, last - back), on, signal)) return;
    }
  };
  try {
    await Promise.all([listen(), load()]);
  } finally {
    inner.abort();
  }
}

async function keepFollowing(signal) {
  while (!signal.aborted) {
    try {
      await followAll(signal);
    } catch (error) {
      if (signal.aborted) return;
      failed(error);
    }
    await new Promise((resolve) => setTimeout(resolve, 2000));
  }
}

function failed(error) {
  if (error.status === 401) {
    stop();
    onUnauthorized(error);
  } else if (error.status !== undefined) {
    state.problem = error;
  }
}

function schedule(delay) {
  clearTimeout(timer);
  timer = setTimeout(tick, delay);
}

async function tick() {
  const mine = generation;
  const run = stream;
  const begun = Date.now();
  try {
    if (wanted) {
      const { path, take } = wanted;
      const answer = await get(path).catch((error) => {
        // What is looked at is not plugged, or gone; the daemon answers.
        if ([404, 409].includes(error.status)) return null;
        throw error;
      });
      if (mine === generation) take(answer);
    }
    // Their space changes without an event.
    if (state.loaded && ticks % 10 === 0) await loadList("sr");
    if (!wanted || ticks % 10 === 0) state.host = await get("/host");
    ticks += 1;
    failures = 0;
    lastAnswer = Date.now();
    state.problem = null;
  } catch (error) {
    // What was asked before it was begun anew, perhaps with another token, does not count.
    if (stream !== run) return;
    failures += 1;
    failed(error);
  }
  if (stream !== run || timer === null) return;
  if (mine === generation) {
    tell();
    const pause = failures ? Math.min(PERIOD * failures, 5000) : PERIOD;
    schedule(Math.max(pause - (Date.now() - begun), 50));
  } else {
    schedule(0);
  }
}

/** For how many milliseconds the daemon has not answered, if that is to be told. */
export function staleFor() {
  const silence = Date.now() - lastAnswer;
  return timer !== null && silence > STALE ? silence : 0;
}

export function stop() {
  clearTimeout(timer);
  timer = null;
  stream?.abort();
  stream = null;
}

/** Begins to ask, unless the page is hidden: then nothing is asked. */
export function start(unauthorized = onUnauthorized) {
  onUnauthorized = unauthorized;
  stop();
  if (document.hidden) return;
  lastAnswer = Date.now();
  ticks = 0;
  stream = new AbortController();
  keepFollowing(stream.signal);
  schedule(0);
}
