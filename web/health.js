// The health of objects as the daemon computes it, and the list of what needs a person. Nothing is derived here from
// measurements: a state is shown as the daemon reports it, also one that this page does not know.

import { bytes } from "./format.js";
import { state } from "./store.js";

const LEVELS = {
  healthy: "good",
  unmanaged: "idle",
  slow: "warn",
  restarting: "warn",
  full: "bad",
  stuck: "bad",
  diverged: "bad",
  unreachable: "bad",
  damaged: "bad",
  failed: "bad",
};
const WEIGHT = { bad: 2, warn: 1 };
/** Failed tasks are shown for this long, in milliseconds. */
const FAILED_FOR = 24 * 3600e3;
const DISMISSED = "tapline-dismissed";
const DISMISSED_MAX = 200;

/** The level of a health: `good`, `idle`, `warn` or `bad`; a state that is not known is worth a look. */
export const levelOf = (health) => (health ? (LEVELS[health.state] ?? "warn") : "idle");
/** A number that is higher for what is worse, for sorting. */
export const severity = (health) => WEIGHT[levelOf(health)] ?? 0;

/** The word for a VBD: its health unless that is good, else whether it is plugged. */
export function vbdWord(vbd) {
  if (!vbd) return "";
  return severity(vbd.health) ? vbd.health.state : vbd.state;
}
export const vbdLevel = (vbd) => {
  if (!vbd) return null;
  if (vbd.health && severity(vbd.health)) return levelOf(vbd.health);
  return { plugged: "good", unplugged: "idle" }[vbd.state] ?? "warn";
};

/** The word for a VDI: its state if that is not ready, its health if that is not good. */
export function vdiWord(vdi) {
  if (severity(vdi.health)) return vdi.health.state;
  return vdi.state === "ready" ? (vdi.users.length ? "in use" : "unused") : vdi.state;
}
export const vdiLevel = (vdi) => {
  if (severity(vdi.health)) return levelOf(vdi.health);
  return vdi.state === "ready" ? (vdi.users.length ? "good" : "idle") : "bad";
};

/** The word for a repository. */
export const srWord = (sr) => (sr.state === "attached" ? (sr.health?.state ?? sr.state) : sr.state);
export const srLevel = (sr) => {
  if (sr.state !== "attached") return sr.state === "lost" ? "bad" : "idle";
  return sr.health ? levelOf(sr.health) : "good";
};

export const POWER = {
  running: "good",
  halted: "idle",
  suspended: "idle",
  paused: "warn",
  starting: "warn",
  stopping: "warn",
};
export const powerLevel = (vm) => (vm.problem ? "bad" : (POWER[vm.power] ?? "warn"));

/** How full a repository is, as a level: the reserve is not free. */
export function spaceLevel(sr) {
  const { space, reserve = 0 } = sr;
  if (!space) return "idle";
  if (space.full || space.free === 0 || sr.health?.state === "full") return "bad";
  return space.free < (space.physical_size - reserve) / 10 ? "warn" : "good";
}
export const spaceWords = ({ space, reserve = 0 }) =>
  space
    ? `${bytes(space.free)} free of ${bytes(space.physical_size)}${reserve ? `, ${bytes(reserve)} of it reserved` : ""}`
    : "";

function dismissed() {
  try {
    return JSON.parse(localStorage.getItem(DISMISSED)) ?? [];
  } catch {
    return [];
  }
}

/** Hides a failed task from the list of what needs a person, in this browser. */
export function dismiss(uuid) {
  const all = [...dismissed(), uuid].slice(-DISMISSED_MAX);
  localStorage.setItem(DISMISSED, JSON.stringify(all));
}

const name = (kind, uuid) => state[kind].get(uuid)?.name;

/** The name of the disk of a VBD, with its machine. */
export function diskOf(vbd) {
  const disk = name("vdi", vbd.vdi) ?? vbd.vdi.slice(0, 8);
  const vm = vbd.vm && name("vm", vbd.vm);
  return vm ? `${vm}: ${disk}` : disk;
}

/** An object that a task is about, as people call it. */
export function objectName(kind, uuid) {
  const object = state[kind] instanceof Map ? state[kind].get(uuid) : null;
  if (kind === "vbd" && object) return diskOf(object);
  return object?.name ?? `${kind} ${uuid.slice(0, 8)}`;
}

const VERBS = {
  vdi: "disk",
  vbd: "disk",
  vm: "VM",
  sr: "repository",
};
/** A task in words: "snapshot of disk 'web'". */
export function taskWords(task) {
  const [kind, ...verb] = task.verb.split("-");
  const about = task.about.find((one) => one.kind === kind) ?? task.about[0];
  const object = about ? ` of ${VERBS[about.kind] ?? about.kind} '${objectName(about.kind, about.uuid)}'` : "";
  return `${verb.join(" ") || kind}${object}`;
}

function sickObjects() {
  const needs = [];
  const add = (key, object, kind, title, href, health) => {
    const level = levelOf(health);
    if (level === "bad") {
      needs.push({
        key,
        kind,
        level,
        title,
        href,
        word: health.state,
        text: health.reason ?? "",
        advice: health.advice ?? "",
        since: health.since,
      });
    }
  };
  for (const sr of state.sr.values()) add(sr.uuid, sr, "repository", sr.name, `#/sr/${sr.uuid}`, sr.health);
  const told = new Set();
  for (const vbd of state.vbd.values()) {
    if (severity(vbd.health)) told.add(vbd.vdi);
    add(vbd.uuid, vbd, "disk", diskOf(vbd), `#/disk/${vbd.vdi}/${vbd.uuid}`, vbd.health);
  }
  for (const vdi of state.vdi.values()) {
    if (!told.has(vdi.uuid)) add(vdi.uuid, vdi, "disk", vdi.name, `#/disk/${vdi.uuid}`, vdi.health);
  }
  return needs;
}

/** Problems that objects have besides their health. */
function problems(known) {
  const needs = [];
  const add = (key, kind, title, href, word, problem, level = "warn") => {
    if (problem && !known.has(key)) {
      needs.push({
        key: `${key} ${word}`,
        kind,
        level,
        title,
        href,
        word,
        text: problem.detail,
        advice: problem.advice ?? "",
      });
    }
  };
  for (const sr of state.sr.values())
    add(sr.uuid, "repository", sr.name, `#/sr/${sr.uuid}`, sr.state, sr.problem, "bad");
  for (const vbd of state.vbd.values()) {
    if (!known.has(vbd.vdi))
      add(vbd.uuid, "disk", diskOf(vbd), `#/disk/${vbd.vdi}/${vbd.uuid}`, "problem", vbd.problem);
  }
  for (const vm of state.vm.values()) {
    add(vm.uuid, "VM", vm.name, `#/vm/${vm.uuid}`, "problem", vm.problem, "bad");
    add(vm.uuid, "VM", vm.name, `#/vm/${vm.uuid}`, "schedule failed", vm.retention_problem);
    add(vm.uuid, "VM", vm.name, `#/vm/${vm.uuid}`, "backup failed", vm.backup_problem);
  }
  for (const vdi of state.vdi.values()) {
    add(vdi.uuid, "disk", vdi.name, `#/disk/${vdi.uuid}`, "schedule failed", vdi.retention_problem);
    add(vdi.uuid, "disk", vdi.name, `#/disk/${vdi.uuid}`, "backup failed", vdi.backup_problem);
    const bad = vdi.state !== "ready" && { detail: `The disk is ${vdi.state}.` };
    if (bad && !vdi.health) add(vdi.uuid, "disk", vdi.name, `#/disk/${vdi.uuid}`, vdi.state, bad, "bad");
  }
  return needs;
}

/** Tasks that failed and were not repeated with success, and those that are stuck or retried. */
function troubledTasks() {
  const hidden = new Set(dismissed());
  const isLater = (one, other) => one.created > other.created;
  const same = (one, other) => one.verb === other.verb && one.about[0]?.uuid === other.about[0]?.uuid;
  const all = state.tasks.filter(
    (task) =>
      task.problem &&
      !hidden.has(task.uuid) &&
      (!task.ended || (task.state === "failed" && Date.now() - Date.parse(task.ended) < FAILED_FOR)),
  );
  const open = all.filter((task) => !state.tasks.some((other) => same(task, other) && isLater(other, task)));
  return open.map((task) => ({
    key: task.uuid,
    kind: "task",
    level: task.state === "stuck" ? "bad" : "warn",
    title: taskWords(task),
    href: "#/tasks",
    word: task.state,
    text: task.problem.detail,
    advice: task.problem.advice ?? "",
    since: task.ended ?? task.created,
    task: task.ended ? task.uuid : null,
  }));
}

/** Several objects of one kind in the same state are one line from this number on. */
const MANY = 4;

function grouped(needs) {
  const groups = new Map();
  for (const need of needs) {
    const key = `${need.kind} ${need.word}`;
    groups.set(key, [...(groups.get(key) ?? []), need]);
  }
  return [...groups].flatMap(([key, group]) => {
    if (group.length < MANY || group[0].kind === "task") return group;
    const names = group
      .slice(0, 3)
      .map((need) => need.title)
      .join(", ");
    const kinds = { disk: "disks", repository: "repositories", VM: "VMs" };
    return [
      {
        ...group[0],
        key,
        title: `${group.length} ${kinds[group[0].kind]}`,
        href: null,
        text: `${names} and ${group.length - 3} more. ${group[0].title}: ${group[0].text}`,
      },
    ];
  });
}

/** What needs a person, the worst first. */
export function needs() {
  const sick = sickObjects();
  const known = new Set(sick.map((need) => need.key));
  const all = grouped([...sick, ...problems(known), ...troubledTasks()]);
  return all.sort((a, b) => WEIGHT[b.level] - WEIGHT[a.level] || (a.since ?? "").localeCompare(b.since ?? ""));
}
